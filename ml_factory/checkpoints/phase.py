"""Checkpoints of one phase: when a save is due, how it is made, and which process owns the phase."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.background import BackgroundThread
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.checkpoints.lease import LeaseTakenOverError, PhaseLease
from ml_factory.checkpoints.save_status import (
    COPIED,
    IN_MEMORY,
    LOCAL,
    REFUSED,
    SAVED,
    describe_save,
    set_save_status,
)
from ml_factory.checkpoints.schedule import SaveTimer, reserved_save_seconds
from ml_factory.checkpoints.stop_signals import stop
from ml_factory.errors import CheckpointError, FileError, SessionOverError, SettingsError, WorkspaceError
from ml_factory.process_identity import process_id
from ml_factory.redaction import redact_secrets
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import acquire_lock_file, check_lock_file_free, release_lock_file
from ml_factory.storage.serialization import pack_state

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_WAIT_SECONDS = 1.0  # that the end of a unit waits for the upload
_END_UPLOAD_SECONDS = 10.0  # that a process asked to stop waits for the upload
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds between the attempts of a save that must be made
# Message on the last save when the work ends.
_REACHED = {
    SAVED: "the work was saved and stopped here",
    COPIED: "the work was saved and stopped here; that the mount's copy was uploaded is not confirmed",
    LOCAL: "the work was saved on this machine's disk alone, the workspace did not accept it in time",
    IN_MEMORY: "the last save is still being written, only the one before it is sure",
    REFUSED: "the last save was refused, only the one before it stands",
}
_save_seconds: dict[Path, float] = {}  # by folder: a unit that begins late in a session knows how long saves take
_log = logging.getLogger("ml_factory")


class PhaseCheckpoints:
    """Checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to the training.

    Parameters
    ----------
    folder : the files.
    run, name : of the phase.
    timer : schedule of the saves that are not forced.
    ending : as of `SaveSchedule`.
    writer : runs the writes, in order.
    on_acquired : called when this process begins to own the phase.

    Attributes: `last_save`, description of the last save, None before the first; `lease`.
    """

    def __init__(
        self, folder: CheckpointFolder, run: str, name: str, timer: SaveTimer, ending: Callable[[float], bool],
        writer: BackgroundThread, on_acquired: Callable[[], object],
    ):  # fmt: skip
        self.folder, self.run, self.name = folder, run, name
        self._timer, self._ending, self._writer, self._on_acquired = timer, ending, writer, on_acquired
        self.last_save: dict | None = None
        self.lease = PhaseLease(
            folder.leases / f"{fingerprint_json([run, name])[:16]}.json", f"run {run}, phase {name}", process_id(),
            folder.lease_mirror,
        )  # fmt: skip
        self._lock_file = folder.folder / "locks" / f"{run}--{name}.lock"
        self._lock = ""  # identity of the lock file, while it is held
        self._listening = self._refused = False
        self._taken_over: LeaseTakenOverError | None = None
        self._process = process_id()

    def due(self) -> bool:
        """Return True when a save that is not forced would happen now. Cheap: called at every step boundary."""
        return self.due_in() == 0.0

    def due_in(self) -> float:
        """Return the seconds until a save that is not forced would happen, if nothing ends the session before."""
        return 0.0 if self._taken_over is not None or self._is_stopping() else self._timer.due_in()

    def _is_stopping(self) -> bool:
        """Return True after a signal, or when the session is about to end: the next step then saves."""
        return stop.requested is not None or self._ending(self._save_seconds())

    def _save_seconds(self) -> float:
        """Return the seconds until the last save in this folder survived the loss of this machine."""
        return _save_seconds.get(self.folder.folder, 0.0)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """Save a state, as `CheckpointManager.save_checkpoint`: copy it, and write it in the background."""
        self._check_process()
        if not force and not self.due():
            return None
        self._check_taken_over()
        metrics = {key: _check_metric(key, value) for key, value in (metrics or {}).items()}
        self.acquire()
        self._writer.wait()  # of the write before: two states in memory, never three
        began = time.perf_counter()
        copy = pack_state(state, finite=True)
        info = {"saved_at": datetime.now(UTC).isoformat(), "metrics": metrics, "lease": self.lease.to_dict()}
        saved = self.last_save = {"run": self.run, "phase": self.name, **info}
        set_save_status(saved, IN_MEMORY)
        self._timer.record_save()
        must = force or self._is_stopping()
        self._writer.submit(lambda: self._write(info, copy, must, saved, began))
        self._check_taken_over()
        if self._is_stopping():
            self._end_work(saved)
        return None if saved["status"] == REFUSED else saved

    def _write(self, info: dict, copy: tuple[dict, memoryview], must: bool, saved: dict, began: float) -> None:
        """Write the copied state, then push it where the workspace is elsewhere."""
        written = self._write_or_warn(info, copy, must)
        self._timer.record_outcome(written is not None)
        if written is None:
            set_save_status(saved, REFUSED)
            return
        local, seconds = self.folder.mirror is None, time.perf_counter() - began
        saved.update(written)
        set_save_status(saved, SAVED if local else LOCAL)
        _save_seconds[self.folder.folder] = seconds if local else max(seconds, self._save_seconds())
        self._push(saved, began)

    def _write_or_warn(self, info: dict, copy: tuple[dict, memoryview], must: bool) -> dict | None:
        """Return the description of the written file; None where it was refused.

        must : repeat a refused write, with growing pauses.
        """
        for pause in (*(_PAUSES if must else ()), None):
            try:
                written = self.folder.write(self.run, self.name, info, copy)
            except LeaseTakenOverError as error:
                self._mark_taken_over(error)
                return None
            except (WorkspaceError, OSError, MemoryError) as error:
                if not self._refused:
                    _log.warning("Checkpoint of %s not saved, the run goes on and tries again: %s", self.name, error)
                self._refused = True
                if pause is not None:
                    time.sleep(pause)
                continue
            self._refused = False
            return written
        return None

    def _push(self, saved: dict, began: float) -> None:
        """Push this run's files in the background where the workspace is elsewhere."""
        mirror = self.folder.mirror
        if mirror is None:
            return

        def pushed() -> None:
            set_save_status(saved, COPIED if mirror.remote.may_drop_files else SAVED)
            _save_seconds[self.folder.folder] = time.perf_counter() - began

        self.folder.push(self.run, lambda: self._watch_lease(self.lease.check), pushed)

    def beat(self) -> None:
        """Renew the lease, and push the last save again where the workspace did not take it. Raises FactoryError; where
        another session has the lease, the next step ends the work.
        """
        self._watch_lease(self.lease.renew)
        if self.last_save is not None and self.last_save["status"] == LOCAL:
            self._push(self.last_save, time.perf_counter() - self._save_seconds())

    def _watch_lease(self, ask: Callable[[], object]) -> None:
        """Raise LeaseTakenOverError where another session has the lease; the next step then ends the work."""
        try:
            ask()
        except LeaseTakenOverError as error:
            self._mark_taken_over(error)
            raise

    def _check_taken_over(self) -> None:
        if self._taken_over is not None:
            raise self._taken_over

    def _end_work(self, saved: dict) -> None:
        """Wait for the upload as long as the session allows; then re-send the signal, or raise SessionOver."""
        self._writer.wait()
        stopping = stop.requested is not None
        self.folder.wait(_END_UPLOAD_SECONDS if stopping else reserved_save_seconds(self._save_seconds()))
        reached, last = _REACHED[saved["status"]], describe_save(saved)
        if stop.requested is not None:
            _log.warning("Stopped: %s (%s)", reached, last)
            stop.resend_if_requested()
        raise SessionOverError(
            f"This session is about to end: {reached}", where=self.name, got=last,
            next_step="run again in a new session: it resumes from the newest save",
        )  # fmt: skip

    def load(self) -> dict | None:
        """Load the newest checkpoint, as `CheckpointManager.load_latest_checkpoint`, for the process that continues
        the work.

        That process owns the phase from here on, and handles SIGTERM and SIGINT until `release`. A session that was
        taken over may return with this call when the other session is gone. Raises CheckpointError when another living
        process owns the phase.
        """
        if self._taken_over is not None:
            self._taken_over, self.lease.held = None, False
        self.acquire()
        self._listen()
        self.folder.pull(self.run)
        return self.latest()

    def acquire(self) -> None:
        """Own this phase until `release`, `CheckpointManager.close` or the end of the process.

        Raises CheckpointError when another living process owns it, on this or another machine; nothing was written
        then, and nothing is kept.
        """
        self._check_process()
        if self.lease.held:
            return
        try:
            self._lock = self._lock or acquire_lock_file(self._lock_file, f"run {self.run}, phase {self.name}")
        except FileError as error:  # a disk that refuses the lock file must not stop the work
            _log.warning("Checkpoints of %s: the run goes on. %s", self.name, error)
        try:
            self.lease.acquire(self._lock, self._saved_fence)
        except BaseException:
            self._unlock()
            raise
        self._on_acquired()

    def _saved_fence(self) -> int:
        return max((one["lease"]["fence"] for one in self.folder.infos(self.run, self.name)), default=0)

    def check_unlocked_by_others(self) -> None:
        """Raise CheckpointError when another living process of this machine owns this phase; nothing is acquired."""
        check_lock_file_free(self._lock_file, f"run {self.run}, phase {self.name}")

    @contextmanager
    def acquired(self) -> Iterator["PhaseCheckpoints"]:
        """Own this phase inside a `with`. Raises CheckpointError when another living process does."""
        self.acquire()
        self._listen()
        try:
            yield self
        finally:
            self.release()

    def release(self) -> None:
        """Release this phase; its checkpoints stay. No effect in a forked process."""
        if self._process != process_id():
            return
        self._writer.wait()
        try:
            self.lease.renew(released=True)
        except LeaseTakenOverError:  # it is the other session's
            self.lease.held = False
        self._unlock()
        if self._listening:
            self._listening = False
            stop.remove_listener()

    def wait_uploaded(self) -> None:
        """Wait for the last save, for its upload at most one second.

        Raises LeaseTakenOverError when another session works on the phase: its result must not be registered then.
        """
        self._writer.wait()
        self.folder.wait(_WAIT_SECONDS)
        self._check_taken_over()

    def remove_files(self) -> None:
        """Delete the phase's files after its artifact is registered, or its result stored.

        Raises LeaseTakenOverError when another session works on the phase: then they are that session's.
        """
        self._check_process()
        self.wait_uploaded()
        try:
            self.folder.remove(self.run, self.name)
        except WorkspaceError as error:
            _log.warning("Checkpoints of %s stay: %s", self.name, error)

    def latest(self) -> dict | None:
        """Return the newest verified checkpoint, without owning the phase, as `CheckpointFolder.load`."""
        self._check_process()
        self._writer.wait()
        return self.folder.load(self.run, self.name)

    def latest_info(self) -> dict | None:
        """Return the newest checkpoint's description, unverified; None without one."""
        self._writer.wait()
        return next(iter(self.folder.infos(self.run, self.name)), None)

    def _check_process(self) -> None:
        """Raise CheckpointError in a forked process: the writing thread and the leases are its parent's."""
        if self._process != process_id():
            raise CheckpointError(
                "This CheckpointManager belongs to another process", where=self.folder.folder,
                got="a process made by fork", wanted="the process that opened it",
                next_step="open a CheckpointManager in the process that saves",
            )  # fmt: skip

    def _mark_taken_over(self, error: LeaseTakenOverError) -> None:
        """Make the next step end the work: another session continues it."""
        if self._taken_over is None:
            _log.warning("%s The work of this session ends at its next step; its saves stay.", error)
        self._taken_over = error

    def _unlock(self) -> None:
        if self._lock:
            self._lock = ""
            release_lock_file(self._lock_file)

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            stop.listen()


def check_phase_name(name: str, field: str) -> str:
    """Return the name if it is legal in a file's name. Raises SettingsError with a legal one.

    field : what is named.
    """
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    proposal = re.sub(r"[^A-Za-z0-9._=-]+", "-", str(name)).lstrip("._=-")[:100] or "train"
    raise SettingsError(
        f"A {field}'s name becomes the name of a file",
        where=field, got=repr(name), wanted="letters, digits and . _ = - (100 at most)", next_step=f"use {proposal!r}",
    )  # fmt: skip


def _check_metric(key: str, value: object) -> object:
    """Return a metric as JSON can hold it; NumPy and torch scalars become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int | float | str):
        return redact_secrets(value) if isinstance(value, str) else value
    raise CheckpointError("A metric is a number or a text", where=key, got=type(value).__name__)
