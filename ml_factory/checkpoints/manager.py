"""Checkpoints that survive: a timer, slots that each verify alone, the newest verified one wins.

A save copies the state in memory and returns; a child process writes it to a slot of the workspace's pool and reads it
back. Where the workspace is on a mount (Drive), the slot is on the local disk, and another child copies it to the
mount. The newest checkpoint is the one with the highest sequence that verifies, here or there.
"""

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_factory.checkpoints.latest_training import is_training_run, latest_training
from ml_factory.checkpoints.leases import Heartbeat, session_id
from ml_factory.checkpoints.phase import PhaseCheckpoints, check_name
from ml_factory.checkpoints.remote_slots import RemoteSlots
from ml_factory.checkpoints.schedule import save_durations
from ml_factory.checkpoints.slot_pool import USER_SUFFIX, Pool, Unit, WriterId
from ml_factory.checkpoints.slots import Slots, recency
from ml_factory.checkpoints.staging_buffer import StagingBuffer
from ml_factory.checkpoints.uploader import IN_MEMORY, LOCAL, BackgroundThread, InlineExecutor, SaveStatus, Uploader
from ml_factory.errors import CheckpointError, SessionOver, SettingsError, WorkspaceError
from ml_factory.storage.atomic_files import Disk, cache_folder, fingerprint
from ml_factory.storage.file_access import UnresponsiveMountError, is_unresponsive
from ml_factory.storage.mount_table import on_mount
from ml_factory.storage.pending_uploads import pending

NO_RUN = "default"
_SMALL = 1 << 22  # bytes that a thread of this process writes: a child would take longer to start
_LAST_SECONDS = 10.0  # a local save at the interpreter's end
_SILENT_SECONDS = 1.0  # that a mount which did not answer, or an end that was asked for, waits once more
_log = logging.getLogger("ml_factory")
_open: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()


@dataclass(frozen=True)
class SafeStopResult:
    """What a safe stop found: `safe` only if every checkpoint is where it belongs and the upload was confirmed."""

    safe: bool
    text: str


class CheckpointManager:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : where all runs' checkpoints are (`workspace.checkpoints`).
    auto_save_minutes : a save that is not forced happens this often. The first is made at once, and until this much
        time has passed since then, one every `first_save_minutes`: a new run has most to lose.
    keep_last : how many checkpoints of each phase are kept, at least two; the best one is kept beside them.
    run : name of the run, usually a fingerprint; one run never loads another's. Without one,
        `load_latest_checkpoint` finds what any training of this workspace saved.
    beside_training : `run` is a training's: its checkpoints are read, and what is saved here is kept beside them, under
        the name `saves_as`, so that the training goes on from its own.
    clock : seconds that never go back.
    background : `save_checkpoint` returns when the values are copied in memory, and a child process writes them;
        otherwise they are on the disk when it returns.
    local : a folder on a local disk where checkpoints land first when `folder` is on a mount. None: below the user's
        cache folder on a mount (told by the mount table, or $ML_FACTORY_MOUNTS), and nowhere otherwise.
    quota_bytes : what all checkpoints in `folder` together may take; None: what is free there.
    deadline_seconds : silence after which a mount counts as dead.
    ending : whether the session is about to end, given the seconds until a save is where it belongs (on the mount, if
        there is one); asked at every step boundary. Then it is saved once more, and SessionOver ends the work.
    mean_life_seconds : what a session lives here before it is taken away unannounced; saves come more often for it.
    on_saved : called after each save that is on the disk, from the thread that writes; it must not wait for a mount.
    lease : who writes, for who shares the workspace.
    disk : a Disk through which this process itself works on `folder`, for tests; None: children do.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        auto_save_minutes: float = 30,
        keep_last: int = 3,
        run: str = NO_RUN,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_save_minutes: float = 2,
        background: bool = True,
        local: str | os.PathLike | None = None,
        quota_bytes: int | None = None,
        deadline_seconds: float = 60,
        ending: Callable[[float], bool] = lambda save_seconds: False,
        mean_life_seconds: float = math.inf,
        on_saved: Callable[[], object] = lambda: None,
        lease: WriterId | None = None,
        disk: Disk | None = None,
        during_training: bool = False,
    ):
        for name, value in (("auto_save_minutes", auto_save_minutes), ("first_save_minutes", first_save_minutes)):
            if not value >= 0:
                raise SettingsError("A time between saves is not negative", where=name, got=value, wanted=">= 0")
        if type(keep_last) is not int or keep_last < 1:
            raise SettingsError("At least one checkpoint is kept", where="keep_last", got=keep_last, wanted=">= 1")
        self.folder, self.run, self.keep_last = Path(os.path.abspath(folder)), check_name(run, "run"), keep_last
        self.save_run = check_name(f"{run}{USER_SUFFIX}" if during_training else run, "run")
        self.auto_seconds, self.first_seconds = auto_save_minutes * 60, min(first_save_minutes, auto_save_minutes) * 60
        self.clock, self.ending, self.background = clock, ending, background
        self.mean_life, self.on_saved, self.durations = mean_life_seconds, on_saved, save_durations(self.folder)
        self.lease, self.deadline = lease or WriterId(session_id()), deadline_seconds
        self.staging, self._process, self._one_save = StagingBuffer(), os.getpid(), threading.RLock()
        self._phases: dict[str, PhaseCheckpoints] = {}
        self._open_tiers(None if local is None else Path(os.path.abspath(local)), quota_bytes, disk)
        self._executor = BackgroundThread("checkpoint") if background else InlineExecutor()
        self.heartbeat = Heartbeat(lambda: [phase.lease_holder for phase in list(self._phases.values())])
        _open.add(self)

    def _open_tiers(self, local: Path | None, quota: int | None, disk: Disk | None) -> None:
        """home: where a save lands first.  writer: who writes there.  courier: who carries it on to the mount."""
        if local is None and on_mount(self.folder):
            local = cache_folder("checkpoints") / fingerprint(str(self.folder))[:12]
        self.home_folder = local or self.folder
        own_disk, own_quota = (disk, quota) if local is None else (None, None)
        self.home = Slots(Pool(self.home_folder, own_disk, quota=own_quota), self.lease)
        self.writer: RemoteSlots | Slots = self.home
        if self.background and own_disk is None:
            self.writer = RemoteSlots(
                self.home_folder, self.locks / "pool.lock", self.lease, memory=self.staging.file, quota=own_quota,
                deadline=self.deadline,
            )  # fmt: skip
        self.mount = self.uploader = None
        if local is not None:
            lock = self.locks / "mount.lock"
            self.mount = (
                RemoteSlots(self.folder, lock, self.lease, quota=quota, deadline=self.deadline)
                if disk is None
                else Slots(Pool(self.folder, disk, lock=lock, quota=quota), self.lease)
            )
            executor = BackgroundThread("checkpoint-mount") if self.background else InlineExecutor()
            self.uploader = Uploader(self.home, self.mount, self.keep_last, executor, place=str(self.folder))

    @property
    def owned_by_this_process(self) -> bool:
        """Whether this very process opened it."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raises CheckpointError in a process made by fork: the copy in memory, the threads that write and the leases
        are its parent's."""
        if not self.owned_by_this_process:
            raise CheckpointError(
                "This CheckpointManager is another process's", where=f"run {self.run}",
                got=f"process {os.getpid()}, made by fork", wanted=f"process {self._process}",
                next_step="open a CheckpointManager in the process that saves",
            )  # fmt: skip

    @contextmanager
    def staging_lock(self, seconds: float) -> Iterator[bool]:
        """Alone among the threads of this process with the copy in memory, once it was written; False inside when that
        took longer."""
        ends = time.monotonic() + seconds
        if not self._one_save.acquire(timeout=seconds):
            yield False
            return
        try:
            yield self._wait_home(max(0.0, ends - time.monotonic()))
        finally:
            self._one_save.release()

    @property
    def locks(self) -> Path:
        """Where locks are: on a disk of this machine."""
        return self.home_folder / "locks"

    def phase(self, name: str) -> PhaseCheckpoints:
        """The checkpoints of one phase (one unit of work: a model, a fold)."""
        if name not in self._phases:
            self._phases[name] = PhaseCheckpoints(self, check_name(name, "phase"))
        return self._phases[name]

    def save_checkpoint(self, phase: str, state: dict, force: bool = False, metrics: dict | None = None) -> dict | None:
        """Save if the timer says so, or always with `force`. The values are those of this moment: on return the
        caller may overwrite or free everything. After SIGTERM or SIGINT it is written at once, and the process ends.

        Returns what is saved (run, phase, saved_at, metrics, status; once written also sequence, path, bytes, hash),
        or None when it is not due yet or the disk refused: then one line is logged and the earlier checkpoints stand.
        Raises CheckpointError for a state that cannot be kept (NonFiniteError where a weight is not finite), or when
        another process owns this run and phase.
        """
        return self.phase(phase).save(state, metrics=metrics, force=force)

    def load_latest_checkpoint(self, phase: str) -> dict | None:
        """None, or the newest one that verified: {"state", "run", "phase", "sequence", "saved_at", "metrics", "path",
        "hash", "skipped"}. `skipped` says in words which slots were passed over and why.

        For a training's phase ("train_xgboost") a manager without a run gives the newest that a training of this
        workspace saved, of any symbol and horizon; there are the keys `symbol` and `horizon`, `state["model_state"]`
        for the model's `load_state`, and `state["epoch"]`. What was saved with `save_checkpoint` under that phase is
        given when there is none from a training.
        """
        run = "" if self.run == NO_RUN else self.run
        if phase.startswith("train_") and (not run or is_training_run(run, phase)):
            self.check_process()
            self._wait_neighbours()
            if (found := latest_training(self, phase, run)) is not None:
                return found
        return self.phase(phase).latest()

    def list_trainings(self, phase: str) -> list[dict]:
        """What the newest checkpoint of each training with this phase says of itself, here or on the mount."""
        there = self._ask_mount(lambda mount: mount.list_trainings(phase)) or []
        newest = {one["run"]: one for one in there}
        for one in self.home.list_trainings(phase):
            newest[one["run"]] = max(one, newest.get(one["run"], one), key=recency)
        return list(newest.values())

    def list_checkpoints(self, phase: str | None = None, verify: bool = True) -> list[dict]:
        """The verified checkpoints of one phase or of all, oldest first, at most `keep_last` of each.

        verify : without it they are not read through, and what each says of itself is told.
        """
        self.check_process()
        self._wait_neighbours()
        return [info for name in ([phase] if phase else self._names()) for info in self.phase(name).list(verify)]

    def _names(self) -> list[str]:
        """The phases of this run that have slots, here or on the mount."""
        there = self._ask_mount(lambda mount: mount.list_phases(self.save_run)) or ()
        return sorted({*self.home.list_phases(self.save_run), *there})

    def release_user_saves(self) -> None:
        """The training of this run has ended: the slots of what the user saved beside it (`beside_training`) go back to
        the pool, as its own do. They can be read until another unit writes over them."""
        self._wait_neighbours()
        run = f"{self.run}{USER_SUFFIX}"
        there = self._ask_mount(lambda mount: mount.list_phases(run)) or ()
        try:
            for phase in sorted({*self.home.list_phases(run), *there}):
                self.home.release(Unit(run, phase))
                if self.uploader is not None:
                    self.uploader.release(Unit(run, phase))
        except WorkspaceError as error:
            _log.warning("Checkpoints saved beside the training keep their slots: %s", error)

    def status(self) -> list[SaveStatus]:
        """How far the newest checkpoint of each phase has come."""
        return [one.last_save for one in self._phases.values() if one.last_save is not None]

    def wait(self, seconds: float | None = None) -> bool:
        """Whether every background write is done (on disk, on the mount); refused ones had a line logged.

        Returns then, or after so many seconds; a mount that does not answer is given up after its deadline.
        """
        began = time.monotonic()
        if not self._wait_home(seconds):
            return False
        left = None if seconds is None else seconds - (time.monotonic() - began)
        return self.uploader is None or self.uploader.wait(left)

    def safe_stop(
        self,
        seconds: float = 300,
        *,
        logs: Iterable[Callable[[], object]] = (),
        flush: Callable[[], object] | None = None,
        tell: Callable[[str], object] = print,
    ) -> SafeStopResult:
        """Wait for every write, let `logs` write theirs, and `flush` the mount (on Colab: flush and unmount).

        Safe is said only when all of it came back in time; on a mount without `flush` the upload stays unconfirmed.
        tell : hears what is waited for, how far each checkpoint has come, and whether it is safe.
        """
        return _safe_stop([self], seconds, logs, flush, tell)

    def close(self, seconds: float | None = None) -> None:
        """Finish the writes and let another process have this run. What a mount does not take in time (unless said
        otherwise its deadline, or a second where it did not answer before) stays on the local disk, and the next
        session carries it over. In a process made by fork nothing happens."""
        if not self.owned_by_this_process:
            return
        self._wait_home(seconds)
        self.heartbeat.stop()
        for phase in self._phases.values():
            phase.release()
        if self.uploader is not None:
            usual = _SILENT_SECONDS if self.uploader.unresponsive or is_unresponsive(self.folder) else self.deadline
            self.uploader.wait(usual if seconds is None else seconds)
            self.uploader.close()
        self._executor.close()
        self._close_children()
        if self in _open:
            _open.discard(self)
            self.staging.close()

    def flush_at_exit(self) -> None:
        """What the interpreter's end can still do in a few seconds."""
        if self.owned_by_this_process:
            self._wait_home(_LAST_SECONDS)
            self._close_children()

    def select_writer(self, payload: memoryview) -> Slots | RemoteSlots:
        """Who writes this: the child, if it pays and can see the bytes."""
        return self.writer if len(payload) > _SMALL and self.staging.shared else self.home

    def _close_children(self) -> None:
        for tier in (self.writer, self.mount):
            if isinstance(tier, RemoteSlots):
                tier.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Who was told to stop (Ctrl-C, SIGTERM, the session's end) has waited for the mount in its last save."""
        told = kind is not None and (issubclass(kind, SessionOver) or not issubclass(kind, Exception))
        self.close(_SILENT_SECONDS if told else None)

    def _wait_home(self, seconds: float | None = None) -> bool:
        return self._executor.wait(seconds)

    def _wait_neighbours(self) -> None:
        """What any manager of this process was told to save here is on the disk."""
        for manager in list(_open):
            if manager.home_folder == self.home_folder and manager.owned_by_this_process:
                manager._wait_home(self.deadline)

    def _ask_mount(self, question: Callable[[RemoteSlots | Slots], Any], needed: bool = False) -> Any:
        """Return the answer of the mount; None, with a warning, when it does not answer.

        needed : raise UnresponsiveMountError instead of returning None.
        """
        if self.mount is None:
            return None
        try:
            return question(self.mount)
        except WorkspaceError as error:
            if needed and isinstance(error, UnresponsiveMountError):
                raise
            _log.warning("Only the local disk is looked at: %s", error)
            return None


def safe_stop(
    seconds: float = 300, *, logs: Iterable[Callable[[], object]] = (), flush: Callable[[], object] | None = None,
    tell: Callable[[str], object] = print,
) -> SafeStopResult:  # fmt: skip
    """`CheckpointManager.safe_stop` for all that this process has open."""
    return _safe_stop([manager for manager in list(_open) if manager.owned_by_this_process], seconds, logs, flush, tell)


def _safe_stop(
    managers: list[CheckpointManager], seconds: float, logs: Iterable[Callable], flush: Callable | None, tell: Callable
) -> SafeStopResult:
    """As `CheckpointManager.safe_stop`, of several; every ending is told."""
    ends = time.monotonic() + seconds
    if any(state.where in (IN_MEMORY, LOCAL) for manager in managers for state in manager.status()):
        tell(f"Stopping safely: waiting up to {seconds:.0f} s for the checkpoints")
    written = [manager.wait(max(0.0, ends - time.monotonic())) for manager in managers]
    for manager in managers:
        for state in manager.status():
            tell(f"  {state}")
    failure = "" if all(written) else "a checkpoint is not where it belongs yet"
    if not failure and (left := pending()):
        failure = f"on this machine's disk alone, until it is run again: {', '.join(left)}"
    failure = failure or _in_time([*logs, *([flush] if flush else [])], ends)
    if not failure and flush is None and any(manager.mount is not None for manager in managers):
        failure = "copied to the mount, and nobody told that it was uploaded"
    reached = "; ".join(str(state) for manager in managers for state in manager.status())
    text = "Safe to stop: every checkpoint is where it belongs"
    if failure:
        text = f"Not confirmed: {failure}" + (f" ({reached})" if reached and not all(written) else "")
    tell(text)
    return SafeStopResult(not failure, text)


def _in_time(steps: list[Callable[[], object]], ends: float) -> str:
    """Do the steps one after the other in a thread that may be left behind; what went wrong, or ""."""
    found: list[str] = []

    def work() -> None:
        try:
            for step in steps:
                step()
            found.append("")
        except (OSError, ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="safe-stop", daemon=True)
    thread.start()
    thread.join(max(0.0, ends - time.monotonic()))
    if found:
        return found[0]
    return "writing the logs and flushing " + ("took too long" if thread.is_alive() else "failed")


def _at_exit() -> None:
    """The interpreter ends: a local save may finish, a mount is waited for by nobody."""
    for manager in list(_open):
        manager.flush_at_exit()


atexit.register(_at_exit)
