"""Writing of staged states to the first disk that takes them: the local disk, else the mount itself.

A writing process that was killed is started again, and the write repeated from the staged bytes. A disk that did not
answer is tried after the other one for a while, and with a shorter deadline.
"""

import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ml_factory.checkpoints.child_slots import LOCAL_DISK, MOUNT, ChildSlots, KilledChildError, no_answer_error
from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.slot_pool import CheckpointUnit
from ml_factory.checkpoints.slots import Slots
from ml_factory.errors import CheckpointError, UnresponsiveMountError, WorkspaceError

_INLINE_BYTES = 1 << 22  # bytes; a thread of this process writes less, because starting a child would take longer
# Seconds without a sign of life after which the other disk is tried: of a disk that has answered so far, of one that
# has not. Two of each and the longest retry delay of `SaveTimer` are less than a minute.
_ANSWER_SECONDS, _RETRY_ANSWER_SECONDS = 15.0, 8.0
_AVOID_SECONDS = 300.0  # so long the other disk is tried before one that did not answer
_RESTARTS = 3  # of a writing process that is killed again and again, for each attempt
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # seconds between the attempts of a forced save
_log = logging.getLogger("ml_factory")


class SaveWriter:
    """Writes the states of one store.

    Parameters
    ----------
    local : slots of the first disk, which this process itself writes.
    child : the same through a child process; `local` where there is none.
    direct : slots of the mount, for states that the local disk refuses; None without a mount.
    keep_last : number of checkpoints kept of each unit.
    deadline : seconds without a reply after which a disk counts as dead; repeated attempts end after as many.
    background : the caller does not wait for the writes.

    Attributes
    ----------
    newer : set when another save waits for the staging buffer: the one being repeated is given up for it.
    """

    def __init__(
        self, local: Slots, child: ChildSlots | Slots, direct: ChildSlots | Slots | None, keep_last: int,
        deadline: float, background: bool,
    ):  # fmt: skip
        self._local, self.child, self.direct, self._keep = local, child, direct, keep_last
        self._deadline, self._background, self.newer = deadline, background, threading.Event()
        self._silent_since: dict[str, float] = {}  # disk -> when it did not answer
        self._sequences: dict[CheckpointUnit, int] = {}
        self._local_refuses = False

    def write(
        self, unit: CheckpointUnit, info: dict, state: memoryview, *, shared: bool, mount_fence: Callable[[], int],
        force: bool = False, last: bool = False,
    ) -> tuple[dict, str]:  # fmt: skip
        """Write a staged state, as `Slots.write`; return (its info, LOCAL_DISK or MOUNT).

        Parameters
        ----------
        shared : a child process can see the staged bytes.
        mount_fence : returns the session's fence on the mount, as `LeaseHolder.mount_fence`.
        force : repeat a refused write at once, then with growing pauses, until a newer save waits.
        last : no later save will come: repeat it as long as the deadline allows.
        """
        ends, pauses = time.monotonic() + self._deadline, self._pauses(force, last)
        while True:
            try:
                return self._write_once(unit, info, state, shared, mount_fence)
            except LeaseTakenOverError:
                raise
            except (WorkspaceError, CheckpointError):
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause > ends or self.newer.wait(pause):
                    raise

    def _pauses(self, force: bool, last: bool) -> Iterator[float]:
        if last:
            return itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        if force:
            return iter(_PAUSES if self._background else (0.0, 0.0))
        return iter(())

    def _write_once(
        self, unit: CheckpointUnit, info: dict, state: memoryview, shared: bool, mount_fence: Callable[[], int]
    ) -> tuple[dict, str]:
        """Try each disk once."""
        disks, refused = [LOCAL_DISK], {}
        if self.direct is not None and (shared or isinstance(self.direct, Slots)):
            disks.append(MOUNT)
        for disk in sorted(disks, key=self._is_avoided):
            deadline = self._answer_seconds(disk) if len(disks) > 1 else None
            try:
                if disk == MOUNT:
                    info = {**info, "lease": {**info["lease"], "fence": mount_fence()}}
                saved = self._write_to(disk, unit, info, state, shared, deadline)
            except LeaseTakenOverError:
                raise
            except (WorkspaceError, CheckpointError) as error:
                refused[disk] = error
                if _is_timeout(error):
                    self._silent_since[disk] = time.monotonic()
                continue
            self._silent_since.pop(disk, None)
            self._sequences[unit] = saved["sequence"]
            self._report_disk(disk, refused.get(LOCAL_DISK))
            return saved, disk
        if len(refused) == 1:
            raise next(iter(refused.values()))
        raise WorkspaceError(
            "Neither disk takes this checkpoint", got="; ".join(f"{disk}: {refused[disk]}" for disk in disks)
        ) from refused[LOCAL_DISK]

    def _write_to(
        self, disk: str, unit: CheckpointUnit, info: dict, state: memoryview, shared: bool, deadline: float | None
    ) -> dict:
        """Write to one disk; a writing process that is killed is started again a few times."""
        slots = self.direct if disk == MOUNT else self._local
        if disk == LOCAL_DISK and shared and (len(state) > _INLINE_BYTES or disk in self._silent_since):
            slots = self.child
        after = self._sequences.get(unit, 0)
        if not isinstance(slots, ChildSlots):
            if deadline is None or not self._background:
                return slots.write(unit, self._keep, info, state, after)
            copy = bytes(state)  # the staging buffer is written again when this thread is given up
            return _in_time(lambda: slots.write(unit, self._keep, info, copy, after), disk, slots.pool.folder, deadline)
        for restarts in itertools.count():
            try:
                return slots.write(unit, self._keep, info, state, after, deadline)
            except KilledChildError:
                if restarts == _RESTARTS:
                    raise

    def _is_avoided(self, disk: str) -> bool:
        since = self._silent_since.get(disk)
        return since is not None and time.monotonic() - since < _AVOID_SECONDS

    def _answer_seconds(self, disk: str) -> float:
        return min(self._deadline, _RETRY_ANSWER_SECONDS if disk in self._silent_since else _ANSWER_SECONDS)

    def _report_disk(self, disk: str, refusal: Exception | None) -> None:
        """Log once that saves go to the mount itself, and once that they go to the local disk again."""
        if disk == MOUNT and not self._local_refuses:
            _log.warning("Checkpoints are written to the mount itself for now: %s", refusal or "see the warning before")
        if disk == LOCAL_DISK and self._local_refuses:
            _log.warning("The local disk takes checkpoints again")
        self._local_refuses = disk == MOUNT


def _is_timeout(error: Exception) -> bool:
    """Return True when the disk did not answer; it may still carry out the write."""
    if isinstance(error, UnresponsiveMountError):
        return not isinstance(error, KilledChildError)
    return getattr(error.__cause__, "errno", None) == errno.ETIMEDOUT


def _in_time(write: Callable[[], dict], disk: str, folder: Path, seconds: float) -> dict:
    """Run a write of this process in a thread of its own; a disk that hangs keeps the thread, not its caller.

    The thread holds the pool's lock until the disk answers. Raises UnresponsiveMountError after `seconds`.
    """
    results: list[dict] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(write())
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="checkpoint-write", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise no_answer_error(disk, folder, f"no answer for {seconds:g} s")
    return results[0]
