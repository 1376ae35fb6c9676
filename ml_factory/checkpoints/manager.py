"""Checkpoint manager: saves states on a schedule to self-verifying slots and loads the newest intact one.

A save copies the state in memory and returns; a child process writes it to a slot of the workspace's pool and reads it
back. Where the workspace is on a mount (Drive), the slot is on the local disk, and another child uploads it to the
mount. The newest checkpoint is the one with the highest sequence that verifies, on either disk.
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
from ml_factory.checkpoints.mount_slots import RemoteSlots
from ml_factory.checkpoints.phase import PhaseCheckpoints, check_name
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
_INLINE_BYTES = 1 << 22  # bytes; a thread of this process writes less, because starting a child would take longer
_EXIT_SECONDS = 10.0  # for a local save at interpreter exit
_UNRESPONSIVE_SECONDS = 1.0  # last wait for a mount that did not answer before, or when the process was asked to stop
_log = logging.getLogger("ml_factory")
_open: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()


@dataclass(frozen=True)
class SafeStopResult:
    """Result of a safe stop: `safe` only if every checkpoint is in the workspace and the upload was confirmed."""

    safe: bool
    text: str


class CheckpointManager:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : folder of all runs' checkpoints (`workspace.checkpoints`).
    auto_save_minutes : interval of saves that are not forced. The first is made at once, and for this long after it one
        every `first_save_minutes`: a new run has most to lose.
    keep_last : number of checkpoints kept of each phase, at least two; the best one is kept in addition.
    run : name of the run, usually a fingerprint; a run never loads another run's checkpoint. Without one,
        `load_latest_checkpoint` finds the newest that any training of this workspace saved.
    clock : monotonic seconds.
    first_save_minutes : interval of saves while the run is young.
    background : `save_checkpoint` returns when the values are copied in memory, and a child process writes them;
        otherwise they are on the disk when it returns.
    local : folder on a local disk that saves are written to first when `folder` is on a mount. None: below the user's
        cache folder for a mount (by the mount table, or $ML_FACTORY_MOUNTS), unused otherwise.
    quota_bytes : bytes that all checkpoints in `folder` together may take; None: the free space.
    deadline_seconds : seconds without a reply after which a mount counts as dead.
    ending : returns True when the session is about to end, given the seconds until a save is in the workspace (on the
        mount, if there is one); called at every step boundary. The state is then saved once more, and SessionOver ends
        the work.
    mean_life_seconds : mean time until a session is preempted; a shorter one makes saves more frequent.
    on_saved : called after each save that is on the disk, from the writing thread; it must not wait for a mount.
    lease : identity of the writer, for workspaces that several sessions share.
    disk : a Disk through which this process itself works on `folder`, for tests; None: children do.
    during_training : `run` is a training's: its checkpoints are read, and saves made here are stored separately, under
        the name `save_run`, so that the training resumes from its own.
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
        self.staging, self._process, self._save_lock = StagingBuffer(), os.getpid(), threading.RLock()
        self._phases: dict[str, PhaseCheckpoints] = {}
        self._open_tiers(None if local is None else Path(os.path.abspath(local)), quota_bytes, disk)
        self._executor = BackgroundThread("checkpoint") if background else InlineExecutor()
        self.heartbeat = Heartbeat(lambda: [phase.lease_holder for phase in list(self._phases.values())])
        _open.add(self)

    def _open_tiers(self, local: Path | None, quota: int | None, disk: Disk | None) -> None:
        """Open the slots: `home` is written first, by `writer`; `uploader` copies from there to `mount`."""
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
            self.uploader = Uploader(self.home, self.mount, self.keep_last, executor, target=str(self.folder))

    @property
    def owned_by_this_process(self) -> bool:
        """True in the process that opened the manager, False in a fork of it."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raise CheckpointError in a forked process: the staging buffer, the writing threads and the leases are its
        parent's.
        """
        if not self.owned_by_this_process:
            raise CheckpointError(
                "This CheckpointManager belongs to another process", where=f"run {self.run}",
                got=f"process {os.getpid()}, made by fork", wanted=f"process {self._process}",
                next_step="open a CheckpointManager in the process that saves",
            )  # fmt: skip

    @contextmanager
    def staging_lock(self, seconds: float) -> Iterator[bool]:
        """Hold the staging buffer alone among this process's threads, after its last content was written.

        Yields False when that took longer than `seconds`.
        """
        ends = time.monotonic() + seconds
        if not self._save_lock.acquire(timeout=seconds):
            yield False
            return
        try:
            yield self._wait_home(max(0.0, ends - time.monotonic()))
        finally:
            self._save_lock.release()

    @property
    def locks(self) -> Path:
        """Folder of the lock files, on a local disk."""
        return self.home_folder / "locks"

    def phase(self, name: str) -> PhaseCheckpoints:
        """Return the checkpoints of one phase (one unit of work: a model, a fold)."""
        if name not in self._phases:
            self._phases[name] = PhaseCheckpoints(self, check_name(name, "phase"))
        return self._phases[name]

    def save_checkpoint(self, phase: str, state: dict, force: bool = False, metrics: dict | None = None) -> dict | None:
        """Save when a save is due, or always with `force`. After SIGTERM or SIGINT the save is made at once,
        and the process ends.

        The values are those of this moment: on return the caller may overwrite or free everything.

        Returns the description of the save (run, phase, saved_at, metrics, status; once written also sequence, path,
        bytes, hash), or None when it is not due yet or the disk refused: then a warning is logged and the earlier
        checkpoints stand.
        Raises CheckpointError for a state that cannot be saved (NonFiniteError where a weight is not finite), or when
        another process owns this run and phase.
        """
        return self.phase(phase).save(state, metrics=metrics, force=force)

    def load_latest_checkpoint(self, phase: str) -> dict | None:
        """Return the newest checkpoint that verifies, or None: {"state", "run", "phase", "sequence", "saved_at",
        "metrics", "path", "hash", "skipped"}. `skipped` lists the slots that were passed over, with reasons.

        For a training's phase ("train_xgboost") a manager without a run returns the newest that a training of this
        workspace saved, of any symbol and horizon, with the keys `symbol` and `horizon`, `state["model_state"]` for the
        model's `load_state`, and `state["epoch"]`. A state saved with `save_checkpoint` under that phase is returned
        when no training has saved one.
        """
        run = "" if self.run == NO_RUN else self.run
        if phase.startswith("train_") and (not run or is_training_run(run, phase)):
            self.check_process()
            self._wait_saves()
            if (found := latest_training(self, phase, run)) is not None:
                return found
        return self.phase(phase).latest()

    def list_trainings(self, phase: str) -> list[dict]:
        """List the descriptions of each training's newest checkpoint with this phase, on the local disk or the
        mount.
        """
        remote = self._query_mount(lambda mount: mount.list_trainings(phase)) or []
        newest = {info["run"]: info for info in remote}
        for info in self.home.list_trainings(phase):
            newest[info["run"]] = max(info, newest.get(info["run"], info), key=recency)
        return list(newest.values())

    def list_checkpoints(self, phase: str | None = None, verify: bool = True) -> list[dict]:
        """List the verified checkpoints of one phase or of all, oldest first, at most `keep_last` of each.

        verify : False returns the descriptions without reading the files through.
        """
        self.check_process()
        self._wait_saves()
        return [info for name in ([phase] if phase else self._names()) for info in self.phase(name).list(verify)]

    def _names(self) -> list[str]:
        """List the phases of this run that have slots, on the local disk or the mount."""
        remote = self._query_mount(lambda mount: mount.list_phases(self.save_run)) or ()
        return sorted({*self.home.list_phases(self.save_run), *remote})

    def release_user_saves(self) -> None:
        """Release the slots of the user's own saves (`during_training`) after the training of this run has ended.

        They can be read until another unit overwrites them.
        """
        self._wait_saves()
        run = f"{self.run}{USER_SUFFIX}"
        remote = self._query_mount(lambda mount: mount.list_phases(run)) or ()
        try:
            for phase in sorted({*self.home.list_phases(run), *remote}):
                self.home.release(Unit(run, phase))
                if self.uploader is not None:
                    self.uploader.release(Unit(run, phase))
        except WorkspaceError as error:
            _log.warning("The user's own checkpoints keep their slots: %s", error)

    def status(self) -> list[SaveStatus]:
        """Return the status of each phase's last save."""
        return [phase.last_save for phase in self._phases.values() if phase.last_save is not None]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for every background write (disk and mount); return False when some are unfinished after `seconds`.

        Refused writes have been logged; a mount that does not answer is given up after its deadline.
        """
        began = time.monotonic()
        if not self._wait_home(seconds):
            return False
        remaining = None if seconds is None else seconds - (time.monotonic() - began)
        return self.uploader is None or self.uploader.wait(remaining)

    def safe_stop(
        self,
        seconds: float = 300,
        *,
        logs: Iterable[Callable[[], object]] = (),
        flush: Callable[[], object] | None = None,
        on_status: Callable[[str], object] = print,
    ) -> SafeStopResult:
        """Wait for every write, run `logs`, and `flush` the mount (on Colab: flush and unmount).

        Parameters
        ----------
        seconds : time for everything.
        logs : callables that write their logs.
        flush : confirms the mount's upload; on a mount without `flush` the upload stays unconfirmed, and the result is
            not safe.
        on_status : receives what is waited for, each checkpoint's status, and the result, as text.
        """
        return _safe_stop([self], seconds, logs, flush, on_status)

    def close(self, seconds: float | None = None) -> None:
        """Finish the writes and release the run for other processes.

        Uploads that a mount does not accept in time (`seconds`, by default its deadline, or one second where it did not
        answer before) stay on the local disk, and the next session uploads them. No effect in a forked process.
        """
        if not self.owned_by_this_process:
            return
        self._wait_home(seconds)
        self.heartbeat.stop()
        for phase in self._phases.values():
            phase.release()
        if self.uploader is not None:
            usual = (
                _UNRESPONSIVE_SECONDS if self.uploader.unresponsive or is_unresponsive(self.folder) else self.deadline
            )
            self.uploader.wait(usual if seconds is None else seconds)
            self.uploader.close()
        self._executor.close()
        self._close_children()
        if self in _open:
            _open.discard(self)
            self.staging.close()

    def flush_at_exit(self) -> None:
        """Finish the local write at interpreter exit, within a few seconds."""
        if self.owned_by_this_process:
            self._wait_home(_EXIT_SECONDS)
            self._close_children()

    def select_writer(self, payload: memoryview) -> Slots | RemoteSlots:
        """Select the child process for a large payload that it can see, else this process."""
        return self.writer if len(payload) > _INLINE_BYTES and self.staging.shared else self.home

    def _close_children(self) -> None:
        for tier in (self.writer, self.mount):
            if isinstance(tier, RemoteSlots):
                tier.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; a process that was asked to stop (Ctrl-C, SIGTERM, session end) already waited for the mount in its
        last save.
        """
        stopping = kind is not None and (issubclass(kind, SessionOver) or not issubclass(kind, Exception))
        self.close(_UNRESPONSIVE_SECONDS if stopping else None)

    def _wait_home(self, seconds: float | None = None) -> bool:
        return self._executor.wait(seconds)

    def _wait_saves(self) -> None:
        """Wait until every save that any manager of this process started on this disk is written."""
        for manager in list(_open):
            if manager.home_folder == self.home_folder and manager.owned_by_this_process:
                manager._wait_home(self.deadline)

    def _query_mount(self, query: Callable[[RemoteSlots | Slots], Any], needed: bool = False) -> Any:
        """Return the mount's answer; None, with a warning, when it does not answer.

        needed : raise UnresponsiveMountError instead of returning None.
        """
        if self.mount is None:
            return None
        try:
            return query(self.mount)
        except WorkspaceError as error:
            if needed and isinstance(error, UnresponsiveMountError):
                raise
            _log.warning("Only the local disk is read: %s", error)
            return None


def safe_stop(
    seconds: float = 300, *, logs: Iterable[Callable[[], object]] = (), flush: Callable[[], object] | None = None,
    on_status: Callable[[str], object] = print,
) -> SafeStopResult:  # fmt: skip
    """Run `CheckpointManager.safe_stop` for all managers that this process has open."""
    return _safe_stop(
        [manager for manager in list(_open) if manager.owned_by_this_process], seconds, logs, flush, on_status
    )


def _safe_stop(
    managers: list[CheckpointManager],
    seconds: float,
    logs: Iterable[Callable],
    flush: Callable | None,
    on_status: Callable,
) -> SafeStopResult:
    """Run `CheckpointManager.safe_stop` for several managers; every outcome is reported to `on_status`."""
    ends = time.monotonic() + seconds
    if any(state.where in (IN_MEMORY, LOCAL) for manager in managers for state in manager.status()):
        on_status(f"Stopping safely: waiting up to {seconds:.0f} s for the checkpoints")
    written = [manager.wait(max(0.0, ends - time.monotonic())) for manager in managers]
    for manager in managers:
        for state in manager.status():
            on_status(f"  {state}")
    failure = "" if all(written) else "a checkpoint is not in the workspace yet"
    if not failure and (unfinished := pending()):
        failure = f"on this machine's disk alone, until it is run again: {', '.join(unfinished)}"
    failure = failure or _in_time([*logs, *([flush] if flush else [])], ends)
    if not failure and flush is None and any(manager.mount is not None for manager in managers):
        failure = "copied to the mount, and the upload is not confirmed"
    reached = "; ".join(str(state) for manager in managers for state in manager.status())
    text = "Safe to stop: every checkpoint is in the workspace"
    if failure:
        text = f"Not confirmed: {failure}" + (f" ({reached})" if reached and not all(written) else "")
    on_status(text)
    return SafeStopResult(not failure, text)


def _in_time(steps: list[Callable[[], object]], ends: float) -> str:
    """Run the steps in order in a thread that may be abandoned; return the failure, or ""."""
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
    """Finish local saves at interpreter exit; no mount is waited for."""
    for manager in list(_open):
        manager.flush_at_exit()


atexit.register(_at_exit)
