"""Leases of a workspace in a bucket: other machines see a lease only in the bucket, never in their mirror alone."""

import logging
from pathlib import Path

from ml_factory.checkpoints.slot_pool import CheckpointUnit
from ml_factory.checkpoints.slots import Slots
from ml_factory.errors import WorkspaceError
from ml_factory.storage.bucket_sync import LEASES_PREFIX
from ml_factory.storage.workspace import pull_workspace_checkpoints, push_workspace_checkpoints

_log = logging.getLogger("ml_factory")


class MirroredLeases:
    """Leases and slots in a local mirror, downloaded before they are read; a written lease is uploaded at once.

    A bucket that does not answer leaves what the mirror holds.

    Parameters
    ----------
    slots : of the mirror.
    root : folder of the workspace.
    """

    other_machines_write = True

    def __init__(self, slots: Slots, root: Path):
        self._slots, self._root = slots, root

    def read_lease(self, unit: CheckpointUnit) -> dict:
        self._pull(LEASES_PREFIX)
        return self._slots.read_lease(unit)

    def renew(self, unit: CheckpointUnit, record: dict) -> None:
        self._slots.renew(unit, record)
        push_workspace_checkpoints(self._root, LEASES_PREFIX)

    def list_unverified(self, unit: CheckpointUnit) -> list[dict]:
        self._pull("checkpoints/")
        return self._slots.list_unverified(unit)

    def _pull(self, place: str) -> None:
        try:
            pull_workspace_checkpoints(self._root, place)
        except WorkspaceError as error:
            _log.warning("The leases in the bucket cannot be read, those of its mirror count: %s", error)
