"""Background upload of checkpoints from the local disk to the mount, while training continues.

It has a thread of its own, because a slow mount must not delay the next local save. At interpreter exit the threads of
both get a few seconds to finish; a checkpoint that did not reach the mount is on the local disk and is uploaded by the
next session.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ml_factory.background_thread import BackgroundThread
from ml_factory.checkpoints.child_slots import ChildSlots
from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.slot_pool import CheckpointUnit
from ml_factory.checkpoints.slots import Slots, slot_val_loss
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.pending_uploads import clear_pending_upload, mark_upload_pending

IN_MEMORY, REFUSED = "in memory", "not saved"
SAVED, LOCAL = "saved", "saved locally"
COPIED = "copied to the mount, upload unconfirmed"
_log = logging.getLogger("ml_factory")
_OnTakenOver = Callable[[LeaseTakenOverError], None]


@dataclass
class SaveStatus:
    """Status of a unit's newest checkpoint.

    Parameters
    ----------
    phase : of the unit.
    sequence : of the checkpoint, once written.
    where : IN_MEMORY, SAVED (a workspace on a local disk), LOCAL or COPIED (one on a mount), or REFUSED.
    at : seconds since 1970.
    """

    phase: str
    sequence: int | None = None
    where: str = IN_MEMORY
    at: float = 0.0

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return f"{self.phase}{number} {self.where} {time.strftime('%H:%M:%S', time.localtime(self.at))}"


_published: list[SaveStatus] = []


def publish_save_status(status: SaveStatus) -> None:
    """Make `save_status_line` report this checkpoint from now on."""
    _published[:] = [status]


def save_status_line() -> str:
    """Return the status of this process's newest checkpoint; "" before the first."""
    return str(_published[0]) if _published else ""


class CheckpointUploader:
    """Copies checkpoints from the local pool (`home`) to the pool on a mount, as far as the mount answers.

    Only the newest and the best checkpoint of a unit are copied: a slow mount skips those in between. One warning
    reports that uploads fell behind, one that they caught up.

    Parameters
    ----------
    home, mount : `Slots` of the local pool and of the mount.
    keep : checkpoints retained per unit.
    executor : runs the copies.
    retry_seconds : between two attempts while the mount fails.
    target : the folder on the mount, by name.

    Attributes: `executor`; `pending`, units with a local checkpoint that is not on the mount; `unresponsive`, True when
    the mount failed the last upload.
    """

    def __init__(
        self, home: Slots, mount: Slots | ChildSlots, keep: int, executor: BackgroundThread,
        retry_seconds: float = 60, target: str = "",
    ):  # fmt: skip
        self._home, self._mount, self._keep, self.executor, self._retry = home, mount, keep, executor, retry_seconds
        self._target = target
        self.pending: dict[CheckpointUnit, tuple[Callable[[], None], _OnTakenOver, Callable[[], int]]] = {}
        self._next_try, self.unresponsive = 0.0, False

    def enqueue_upload(
        self, unit: CheckpointUnit, on_uploaded: Callable[[], None] = lambda: None,
        on_taken_over: _OnTakenOver = lambda error: _log.warning("%s", error), fence: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """Upload the unit's newest checkpoint in the background.

        Parameters
        ----------
        unit : the unit of work.
        on_uploaded : called once the checkpoint is on the mount.
        on_taken_over : called when another session has taken the unit over; logs a warning by default.
        fence : returns that of this session; checkpoints that an earlier session of this machine left are uploaded
            under it. It may raise what a copy raises.
        """
        self.pending[unit] = on_uploaded, on_taken_over, fence
        if not self.unresponsive:
            self.executor.submit(self._upload_unless_unresponsive)
        self.retry_if_due()

    def retry_if_due(self) -> None:
        """Retry failed uploads after `retry_seconds`; cheap otherwise."""
        if self.unresponsive and self.pending and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + self._retry
            self.executor.submit(self._upload_pending)

    def _upload_unless_unresponsive(self) -> None:
        """Skip jobs that were queued before the mount became unresponsive: each would cost one more deadline."""
        if not self.unresponsive:
            self._upload_pending()

    def _upload_pending(self) -> None:
        """Try every pending upload."""
        for unit, job in list(self.pending.items()):
            on_uploaded, on_taken_over, fence = job
            try:
                self._copy(unit, fence())
            except LeaseTakenOverError as error:
                self.pending.pop(unit, None)
                on_taken_over(error)
                continue
            except (WorkspaceError, CheckpointError) as error:
                self._next_try = time.monotonic() + self._retry
                if not self.unresponsive:
                    _log.warning("Checkpoints stay on the local disk for now, the run goes on: %s", error)
                self.unresponsive = True
                return
            if self.pending.get(unit) == job:
                self.pending.pop(unit, None)
                clear_pending_upload((self._target, unit))
            on_uploaded()
        if self.unresponsive:
            _log.warning("Uploads work again: the mount holds every newest checkpoint now")
        self.unresponsive = False

    def discard(self, unit: CheckpointUnit) -> None:
        """Forget the unit's pending upload: the mount has a newer checkpoint."""
        self.pending.pop(unit, None)
        clear_pending_upload((self._target, unit))

    def release(self, unit: CheckpointUnit, holder: dict | None = None) -> None:
        """Return the unit's slots on the mount to its pool, unless a later session than this lease's holds the unit."""
        self.discard(unit)
        self.executor.submit(lambda: self._mount.release(unit, holder))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for all uploads, after retrying failed ones; return True when every checkpoint is on the mount."""
        if self.pending:
            self.executor.submit(self._upload_pending)
        return self.executor.wait(seconds) and not self.pending

    def close(self) -> None:
        """Stop; pending uploads are left to the next session."""
        for unit in self.pending:
            mark_upload_pending((self._target, unit), f"the newest checkpoint of {unit.phase} ({unit.run})")
        self.executor.close()

    def _copy(self, unit: CheckpointUnit, fence: int) -> None:
        local = self._home.list_unverified(unit)
        if not local:
            return
        remote_hashes = {info["hash"] for info in self._mount.list_unverified(unit)}
        best = min(local, key=slot_val_loss)
        for info in [*([best] if slot_val_loss(best) < float("inf") else []), local[0]]:
            if info["hash"] not in remote_hashes:
                self._mount.copy_from_pool(unit, self._keep, info["path"], fence)
                remote_hashes.add(info["hash"])
