"""The checkpoint files of a workspace: which are kept, the last and the best, and which is the newest.

checkpoints/RUN/PHASE.SLOT.ckpt, written in turn; the newest by (fence, sequence).

A phase has `keep` + 2 slots: the last `keep`, the best one, and the one that the next save is written to. Where the
workspace is on a mount or in a bucket, these are the files of its local working copy, and `mirror` brings them there.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ml_factory.errors import CheckpointError, FactoryError, WorkspaceError
from ml_factory.storage.checkpoint_file import (
    read_checkpoint,
    read_checkpoint_info,
    verify_checkpoint,
    write_checkpoint,
)
from ml_factory.storage.files import files, mount_of
from ml_factory.storage.mirror import open_mirror, opened_mirror
from ml_factory.storage.remote import LEASES

_MIN_KEPT = 2
_FILE = re.compile(r"(.+)\.(\d+)\.ckpt")
_log = logging.getLogger("ml_factory")


class CheckpointFolder:
    """The files of all runs.

    Parameters
    ----------
    folder : `workspace.checkpoints`, or a folder on a mount.
    keep : checkpoints kept of each phase, besides the best one.

    Attributes: `folder`, the local one, with the folder `leases`; `mirror` and `lease_mirror`, None where that is all
    there is.
    """

    def __init__(self, folder: str | os.PathLike, keep: int):
        self.folder = Path(os.path.abspath(folder))
        self.mirror = opened_mirror(self.folder)
        if self.mirror is None and mount_of(self.folder):
            self.mirror = open_mirror(str(self.folder.parent))
            self.mirror.pull(f"{self.folder.name}/")
            self.folder = self.mirror.folder / self.folder.name
        self.leases = self.folder / LEASES
        self.lease_mirror = None
        self._below = Path()  # the folder, relative to the mirrored workspace
        if self.mirror is not None:
            self._below = self.folder.relative_to(self.mirror.folder)
            self.lease_mirror = open_mirror(f"{self.mirror.address}/{(self._below / LEASES).as_posix()}", self.leases)
        self.keep = keep

    def infos(self, run: str, phase: str) -> list[dict]:
        """List the descriptions of the phase's files, newest first, by their headers alone; torn ones are left out."""
        return self._scan(run, phase)[0]

    def _scan(
        self, run: str, phase: str, read: Callable[[Path], dict] = read_checkpoint_info
    ) -> tuple[list[dict], list[FactoryError]]:
        """Return (`infos`, why other files of the phase are passed over)."""
        found: list[dict] = []
        torn: list[FactoryError] = []
        for path in self._paths(run, phase):
            try:
                found.append(read(path))
            except (CheckpointError, WorkspaceError) as error:
                torn.append(error)
        own = [info for info in found if (info["run"], info["phase"]) == (run, phase)]
        # By fence first: a session that was taken over may use any sequence.
        return sorted(own, key=lambda info: (info["lease"]["fence"], info["sequence"]), reverse=True), torn

    def write(
        self, run: str, phase: str, info: dict, state: tuple[dict, memoryview], check: Callable[[dict], object]
    ) -> dict:
        """Write a state, as `pack_state` returns it, to the next slot; return its description.

        check : called with the lease of each checkpoint that is there; what it raises refuses the write.

        Raises FileError where the disk refuses.
        """
        there = self.infos(run, phase)
        for one in there:
            check(one["lease"])
        kept = {one["path"] for one in there[: max(self.keep, _MIN_KEPT)]}
        best = min(reversed(there), key=val_loss, default=None)
        if best is not None and val_loss(best) < math.inf:
            kept.add(best["path"])
        slots = [self.folder / run / f"{phase}.{slot}.ckpt" for slot in range(max(self.keep, _MIN_KEPT) + 2)]
        path = next(path for path in slots if str(path) not in kept)
        sequence = 1 + max((one["sequence"] for one in there), default=0)
        return write_checkpoint(path, {"run": run, "phase": phase, "sequence": sequence, **info}, *state)

    def load(self, run: str, phase: str) -> dict | None:
        """Return the newest checkpoint that verifies, with its `state`, and in `skipped` the files passed over.

        Raises WorkspaceError where none does, and the remote of a mirrored workspace did not give one: to start again
        would lose it.
        """
        infos, skipped = self._scan(run, phase, partial(self._read, read_checkpoint_info))
        for info in infos:
            try:
                found, state = self._read(read_checkpoint, Path(info["path"]))
                return {"state": state, **found, "skipped": [*map(str, skipped)]}
            except (CheckpointError, WorkspaceError) as error:
                skipped.append(error)
        refused = [reason for reason in skipped if isinstance(reason, WorkspaceError)]
        if self.mirror is not None and refused:
            raise refused[0]
        if skipped:
            _log.warning("No checkpoint of %s can be used: %s", phase, "; ".join(map(str, skipped)))
        return None

    def _read(self, read: Callable[[Path], Any], path: Path) -> Any:
        """Read a file; one that is torn here, or only a header, may be whole in the mirrored workspace."""
        try:
            return read(path)
        except CheckpointError:
            if self.mirror is not None:
                with suppress(CheckpointError):
                    return read(self.mirror.fetch((self._below / path.relative_to(self.folder)).as_posix()))
            raise

    def list_verified(self, run: str, phase: str) -> list[dict]:
        """List the descriptions of the phase's intact checkpoints, oldest first, at most `keep`."""
        return self._scan(run, phase, partial(self._read, verify_checkpoint))[0][: self.keep][::-1]

    def phases(self, run: str) -> list[str]:
        """List the phases that this run has saved."""
        return sorted({found[1] for found in map(_FILE.fullmatch, files.names(self.folder / run)) if found})

    def list_trainings(self, phase: str) -> list[dict]:
        """List the description of each training's newest checkpoint with this phase."""
        runs = [
            name for name in files.names(self.folder) if name.startswith("train-") and not name.endswith(USER_SUFFIX)
        ]
        return [infos[0] for run in runs if (infos := self.infos(run, phase))]

    def remove(self, run: str, phase: str) -> None:
        """Delete the phase's files, here and with the next push in the mirrored workspace."""
        for path in self._paths(run, phase):
            files.remove(path)
        with suppress(OSError):
            (self.folder / run).rmdir()  # where it is empty

    def pull(self, run: str) -> None:
        """Download what other machines saved of this run, of a large checkpoint the header alone.

        Raises WorkspaceError where the remote does not answer and nothing is here: to start again would lose what it
        holds.
        """
        if self.mirror is None:
            return
        try:
            self.mirror.pull(self.place(run))
        except WorkspaceError as error:
            if not files.names(self.folder / run):
                raise
            _log.warning("Resuming from the local disk: %s", error)

    def place(self, run: str) -> str:
        """Return the place of this run's files below the mirrored workspace."""
        return f"{(self._below / run).as_posix()}/"

    def wait(self, seconds: float | None) -> bool:
        """Wait for the uploads; return False where something is on this machine alone."""
        waited = [mirror.wait(seconds) for mirror in (self.mirror, self.lease_mirror) if mirror is not None]
        return all(waited)

    def _paths(self, run: str, phase: str) -> Iterator[Path]:
        for name in files.names(self.folder / run):
            if (found := _FILE.fullmatch(name)) and found[1] == phase:
                yield self.folder / run / name


USER_SUFFIX = "-user"  # of the run name under which the user's own saves during a training are stored


def val_loss(info: dict) -> float:
    """Return a checkpoint's val_loss; infinity when it was not measured."""
    loss = info["metrics"].get("val_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf
