"""Who carries a saved checkpoint on: from memory to the local disk, from there to the mount, while training goes on.

Two threads, because a slow mount must not delay the next local save. Neither is waited for when the interpreter ends
later than a few seconds; what did not reach the mount lies on the local disk and is carried over by the next session.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ml_factory.checkpoints.leases import TakenOverError
from ml_factory.checkpoints.slot_pool import Unit
from ml_factory.checkpoints.slots import val_loss
from ml_factory.errors import CheckpointError, FactoryError, WorkspaceError
from ml_factory.storage.pending_uploads import clear_pending, mark_pending

IN_MEMORY, REFUSED = "in memory", "not saved"
SAVED, LOCAL = "saved", "saved locally"
COPIED = "copied to the mount, upload unconfirmed"
_log = logging.getLogger("ml_factory")


class BackgroundThread:
    """One daemon thread that does jobs in order; `wait` tells when none is left.

    A job that fails costs a line in the log and no other job; after `close` the next job has a thread again.
    """

    def __init__(self, name: str):
        self._name, self._jobs, self._working = name, queue.SimpleQueue(), False
        self._thread: threading.Thread | None = None
        self._left, self._changed = 0, threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._left += 1
            self._jobs.put(job)
            if not self._working:
                self._working = True
                self._thread = threading.Thread(target=self._work, args=(self._thread,), name=self._name, daemon=True)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether every job is done, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, seconds)

    def close(self) -> None:
        """End after the jobs that are there."""
        with self._changed:
            if self._working:
                self._working = False
                self._jobs.put(None)

    def _work(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except FactoryError as error:
                _log.warning("%s", error)
            except Exception:  # noqa: BLE001 - a thread that ends here would leave every later save undone
                _log.exception("A job of the thread %s failed; it goes on with the next", self._name)
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()


class InlineExecutor:
    """The interface of BackgroundThread without a thread: each job is done before `do` returns."""

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def wait(self, seconds: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing is under way."""


@dataclass
class SaveStatus:
    """How far the newest checkpoint of a unit has come.

    where : IN_MEMORY, SAVED (a workspace on a disk of this machine), LOCAL or COPIED (one on a mount), or REFUSED.
    at : wall-clock seconds.
    """

    phase: str
    sequence: int | None = None
    where: str = IN_MEMORY
    at: float = 0.0

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return f"{self.phase}{number} {self.where} {time.strftime('%H:%M:%S', time.localtime(self.at))}"


_newest: list[SaveStatus] = []


def publish_status(state: SaveStatus) -> None:
    """From now on `status_line` tells of this one."""
    _newest[:] = [state]


def status_line() -> str:
    """How far the newest checkpoint of this process has come; "" before the first."""
    return str(_newest[0]) if _newest else ""


class Uploader:
    """Copies what lies in the local pool (`home`) to the pool on a mount, as far as the mount answers.

    Only the newest and the best checkpoint of a unit are copied: a slow mount skips those between. One line tells that
    it fell behind, one that it caught up.

    place : the folder on the mount, by name.
    """

    def __init__(
        self,
        home,
        mount,
        keep: int,
        executor: BackgroundThread | InlineExecutor,
        retry_seconds: float = 60,
        place: str = "",
    ):
        self._home, self._mount, self._keep, self._executor, self._retry = home, mount, keep, executor, retry_seconds
        self._place = place
        self._pending: dict[Unit, tuple[Callable[[], None], Callable[[TakenOverError], None], int]] = {}
        self._next_try, self._unresponsive = 0.0, False

    @property
    def has_pending(self) -> bool:
        """Whether something that was saved locally is not on the mount."""
        return bool(self._pending)

    @property
    def unresponsive(self) -> bool:
        """Whether the mount did not take what was brought last; what is copied then waited for the mount."""
        return self._unresponsive

    def enqueue_upload(
        self, unit: Unit, then: Callable[[], None] = lambda: None,
        lost: Callable[[TakenOverError], None] = lambda error: _log.warning("%s", error), fence: int = 0,
    ) -> None:  # fmt: skip
        """Copy the unit's newest checkpoint when its turn comes; `then` is called once it is there, `lost` when the
        mount tells that another session has taken the unit over (without one, a line in the log tells).

        fence : of this session; what an earlier one of this machine left behind is carried under it.
        """
        self._pending[unit] = then, lost, fence
        if not self._unresponsive:
            self._executor.submit(self._upload_unless_unresponsive)
        self.retry_if_due()

    def retry_if_due(self) -> None:
        """A moment to try again what failed a while ago; costs nothing."""
        if self._unresponsive and self._pending and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + self._retry
            self._executor.submit(self.upload_pending)

    def _upload_unless_unresponsive(self) -> None:
        """What was queued before the mount fell silent does not ask it again, one deadline after the other."""
        if not self._unresponsive:
            self.upload_pending()

    def upload_pending(self) -> None:
        """Try all that is behind."""
        for unit, job in list(self._pending.items()):
            then, lost, fence = job
            try:
                self._copy(unit, fence)
            except TakenOverError as error:
                del self._pending[unit]
                lost(error)
                continue
            except (WorkspaceError, CheckpointError) as error:
                self._next_try = time.monotonic() + self._retry
                if not self._unresponsive:
                    _log.warning("Checkpoints stay on the local disk for now, the run goes on: %s", error)
                self._unresponsive = True
                return
            if self._pending.get(unit) == job:
                del self._pending[unit]
                clear_pending((self._place, unit))
            then()
        if self._unresponsive:
            _log.warning("The mount answers again: it holds every newest checkpoint now")
        self._unresponsive = False

    def submit(self, job: Callable[[], None]) -> None:
        """Something small on the mount, when its turn comes."""
        self._executor.submit(job)

    def release(self, unit: Unit, holder: dict | None = None) -> None:
        """The unit's artifact is where it belongs: its slots on the mount serve others, unless a later session than the
        one with this lease holds the unit."""
        self._pending.pop(unit, None)
        clear_pending((self._place, unit))
        self._executor.submit(lambda: self._mount.release(unit, holder))

    def wait(self, seconds: float | None = None) -> bool:
        """Whether everything is on the mount now; what failed before is tried once more."""
        if self.has_pending:
            self._executor.submit(self.upload_pending)
        return self._executor.wait(seconds) and not self.has_pending

    def close(self) -> None:
        """What is behind now stays so until another session carries it."""
        for unit in self._pending:
            mark_pending((self._place, unit), f"the newest checkpoint of {unit.phase} ({unit.run})")
        self._executor.close()

    def _copy(self, unit: Unit, fence: int) -> None:
        here = self._home.list_unverified(unit)
        if not here:
            return
        there = {info["hash"] for info in self._mount.list_unverified(unit)}
        best = min(here, key=val_loss)
        for info in [*([best] if val_loss(best) < float("inf") else []), here[0]]:
            if info["hash"] not in there:
                self._mount.copy_in(unit, self._keep, info["path"], fence)
                there.add(info["hash"])
