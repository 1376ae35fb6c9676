"""Checkpoints of a run, saved on a schedule and loaded by phase.

A phase is a unit of work, such as "train_xgboost". Its state is copied in memory, written in a thread to a file that
verifies itself (`checkpoint_folder`), and pushed where the workspace is elsewhere. One process owns it (`lease`).
"""

import atexit
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.background import BackgroundThread
from ml_factory.checkpoints.checkpoint_folder import USER_SUFFIX, CheckpointFolder
from ml_factory.checkpoints.latest_training import latest_training_checkpoint
from ml_factory.checkpoints.lease import RENEW_SECONDS, LeaseTakenOverError, PhaseLease
from ml_factory.checkpoints.schedule import SaveTimer, reserved_save_seconds
from ml_factory.errors import CheckpointError, SessionOverError, SettingsError, WorkspaceError
from ml_factory.interrupt import stop
from ml_factory.process_identity import process_id
from ml_factory.redaction import redact_secrets
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import acquire_lock_file, is_lock_file_held, release_lock_file
from ml_factory.storage.serialization import pack_state

NO_RUN = "default"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
# Status of a save. Saved locally: on this machine's disk alone. Saved: verified in the workspace.
IN_MEMORY, REFUSED, LOCAL, SAVED = "in memory", "not saved", "saved locally", "saved"
COPIED = "copied to the mount, upload unconfirmed"
# That the end of a unit waits for the upload, and the end of a run whose last save has waited before.
_WAIT_SECONDS = 1.0
_END_SECONDS = 10.0  # that a process that is to stop waits for the upload, and for the last writes
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds between the attempts of a save that must be made
# Message on the last save when the work ends.
_REACHED = {
    SAVED: "the work was saved and stopped here",
    COPIED: "the work was saved and stopped here; that the mount's copy was uploaded is not confirmed",
    LOCAL: "the work was saved on this machine's disk alone, the workspace did not accept it in time",
    IN_MEMORY: "the last save is still being written, only the one before it is sure",
    REFUSED: "the last save was refused, only the one before it stands",
}
_UPLOAD_SECONDS = 60.0  # that the end of a run waits for its uploads
_save_seconds: dict[Path, float] = {}  # by folder: a unit that begins late in a session knows how long saves take
_newest: list[dict] = []  # the save whose status is shown
_open: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()
_log = logging.getLogger("ml_factory")


class PhaseCheckpoints:
    """Checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to the training.

    Attributes: `last_save`, description of the last save, None before the first; `lease`.
    """

    def __init__(self, manager: "CheckpointManager", name: str):
        self._manager, self.folder, self._writer = manager, manager.folder, manager.writer
        self.run, self.name = manager.save_run, _check_phase_name(name, "phase")
        self._timer = SaveTimer(manager.auto_seconds, manager.clock)
        self.last_save: dict | None = None
        self.lease = PhaseLease(
            self.folder.leases / f"{fingerprint_json([self.run, name])[:16]}.json",
            self.folder.folder / "locks" / f"{self.run}--{name}.lock", f"run {self.run}, phase {name}", process_id(),
            self.folder.lease_mirror,
        )  # fmt: skip
        self._listening = self._refused = False

    def due(self) -> bool:
        """Return True when a save that is not forced would happen now. Cheap: called at every step boundary."""
        return self.due_in() == 0.0

    def due_in(self, pause: float = 0.0) -> float:
        """Return the seconds until a save that is not forced would happen, if nothing ends the session before.

        pause : least seconds between two saves, unless the disk refused the one before or the session ends.
        """
        return 0.0 if self.lease.taken_over is not None or self._is_stopping() else self._timer.due_in(pause)

    def _is_stopping(self) -> bool:
        """Return True after a signal, or when the session is about to end: the next step then saves."""
        return stop.requested is not None or self._manager.ending(self._save_seconds())

    def _save_seconds(self) -> float:
        """Return the seconds until the last save in this folder survived the loss of this machine."""
        return _save_seconds.get(self.folder.folder, 0.0)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """Save a state, as `CheckpointManager.save_checkpoint`: copy it, and write it in the background."""
        if not force and not self.due():
            return None
        self._check_taken_over()
        metrics = {key: _check_metric(key, value) for key, value in (metrics or {}).items()}
        self.acquire()
        self._writer.wait()  # of the write before: two states in memory, never three
        began = time.perf_counter()
        copy = pack_state(state, finite=True, pages=self._manager.take_pages)
        info = {"saved_at": datetime.now(UTC).isoformat(), "metrics": metrics, "lease": self.lease.to_dict()}
        saved = self.last_save = {"run": self.run, "phase": self.name, **info}
        _set_status(saved, IN_MEMORY)
        _newest[:] = [saved]
        self._timer.record_save()
        pauses = (*(_PAUSES if force or self._is_stopping() else ()), None)
        self._writer.submit(lambda: self._write(info, copy, pauses, saved, began))
        if self._is_stopping():
            self._end_work(saved)
        return saved

    def _write(
        self, info: dict, copy: tuple[dict, memoryview], pauses: tuple[float | None, ...], saved: dict, began: float
    ) -> None:
        """Write the copied state, then push it where the workspace is elsewhere.

        pauses : in seconds, between attempts where the disk refuses; None ends them.
        """
        written = None
        for pause in pauses:
            try:
                written = self.folder.write(self.run, self.name, info, copy, self.lease.compare)
                break
            except LeaseTakenOverError:
                break
            except (WorkspaceError, OSError, MemoryError) as error:
                if not self._refused:
                    _log.warning("Checkpoint of %s not saved, the run continues and tries again: %s", self.name, error)
                self._refused = True
                time.sleep(pause or 0.0)
        packed: Any = copy[1].obj
        self._manager.pages[:] = [packed.base]
        self._timer.record_outcome(written is not None)
        if written is None:
            _set_status(saved, REFUSED)
            return
        self._refused, is_local = False, self.folder.mirror is None
        saved.update(written)
        _set_status(saved, SAVED if is_local else LOCAL)
        seconds = time.perf_counter() - began
        _save_seconds[self.folder.folder] = seconds if is_local else max(seconds, self._save_seconds())
        self._push(saved, began)

    def _push(self, saved: dict, began: float) -> None:
        """Push this run's files in the background where the workspace is elsewhere."""
        mirror = self.folder.mirror
        if mirror is None:
            return

        def pushed() -> None:
            # Else it was torn, and set aside; or a push that a beat had queued behind the upload found nothing left.
            if saved["status"] == LOCAL and files.is_file(saved["path"]):
                _set_status(saved, COPIED if mirror.remote.is_mount else SAVED)
                _save_seconds[self.folder.folder] = time.perf_counter() - began

        mirror.push_in_background(self.folder.place(self.run), check=self.lease.check, done=pushed)

    def beat(self) -> None:
        """Renew the lease, and push the last save again where the workspace did not take it. Raises FactoryError; where
        another session has the lease, the next step ends the work.
        """
        self.lease.renew()
        if self.last_save is not None and self.last_save["status"] == LOCAL:
            self._push(self.last_save, time.perf_counter() - self._save_seconds())

    def _check_taken_over(self) -> None:
        if self.lease.taken_over is not None:
            raise self.lease.taken_over

    def _end_work(self, saved: dict) -> None:
        """Wait for the upload as long as the session allows; then re-send the signal, or raise SessionOverError."""
        self._writer.wait()
        stopping = stop.requested is not None
        self.folder.wait(_END_SECONDS if stopping else reserved_save_seconds(self._save_seconds()))
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
        if self.lease.taken_over is not None:
            self.lease.taken_over, self.lease.held = None, False
        self._own()
        self.folder.pull(self.run)
        return self.latest()

    def acquire(self) -> None:
        """Own this phase until `release`, `CheckpointManager.close` or the end of the process.

        Raises CheckpointError when another living process owns it, on this or another machine; nothing was written
        then, and nothing is kept.
        """
        self._manager.check_process()
        self.lease.acquire(
            lambda: max((one["lease"]["fence"] for one in self.folder.infos(self.run, self.name)), default=0)
        )
        self._manager.start_beating()

    def _own(self) -> None:
        """Own this phase, and handle SIGTERM and SIGINT."""
        self.acquire()
        if not self._listening:
            self._listening = True
            stop.listen()

    def check_unlocked_by_others(self) -> None:
        """Raise CheckpointError when another living process of this machine owns this phase; nothing is written."""
        if is_lock_file_held(self.lease.lock_file):  # by this process: released again; else the error names the holder
            acquire_lock_file(self.lease.lock_file, self.lease.what)
            release_lock_file(self.lease.lock_file)

    @contextmanager
    def acquired(self) -> Iterator["PhaseCheckpoints"]:
        """Own this phase inside a `with`. Raises CheckpointError when another living process does."""
        self._own()
        try:
            yield self
        finally:
            self.release()

    def release(self) -> None:
        """Release this phase; its checkpoints stay. No effect in a forked process."""
        if self._manager.is_forked():
            return
        self._writer.wait()
        self._manager.pages.clear()
        self.lease.release()
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
        self._manager.check_process()
        self.wait_uploaded()
        try:
            self.folder.remove(self.run, self.name)
        except WorkspaceError as error:
            _log.warning("Checkpoints of %s stay: %s", self.name, error)

    def latest(self) -> dict | None:
        """Return the newest verified checkpoint, without owning the phase, as `CheckpointFolder.load`."""
        self._manager.check_process()
        self._writer.wait()
        self._manager.pages.clear()
        return self.folder.load(self.run, self.name)

    def latest_info(self) -> dict | None:
        """Return the newest checkpoint's description, unverified; None without one."""
        self._writer.wait()
        return next(iter(self.folder.infos(self.run, self.name)), None)


class CheckpointManager:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : folder of all runs' checkpoints (`workspace.checkpoints`).
    auto_save_minutes : interval of saves that are not forced. The first is made at once, and for this long after it one
        every two minutes: a new run has most to lose.
    keep_last : number of checkpoints kept of each phase (1 keeps two); the best one is kept in addition.
    run : name of the run, usually a fingerprint; a run never loads another run's checkpoint. Without one,
        `load_latest_checkpoint` finds the newest that any training of this workspace saved.
    ending : returns True when the session is about to end, given the seconds until a save is in the workspace (on the
        mount, if there is one); called at every step boundary. The state is then saved once more, and
        SessionOverError ends the work.
    clock : monotonic seconds.
    during_training : `run` is a training's: its checkpoints are read, and saves made here are stored separately, so
        that the training resumes from its own.

    Attributes: `folder`, the files; `save_run`, the run whose files are written; `writer`, which runs the writes in
    order; `pages`, the memory of the last written state, which the next save of any phase fills again until a phase is
    released or loads: finding fresh pages takes longer than the copy; `auto_seconds`, `ending`, `clock`.
    """

    def __init__(
        self, folder: str | os.PathLike, auto_save_minutes: float = 30, keep_last: int = 3, run: str = NO_RUN, *,
        ending: Callable[[float], bool] = lambda save_seconds: False,
        clock: Callable[[], float] = time.monotonic, during_training: bool = False,
    ):  # fmt: skip
        if not auto_save_minutes >= 0:
            raise SettingsError(
                "A time between saves is not negative", where="auto_save_minutes", got=auto_save_minutes, wanted=">= 0"
            )
        if type(keep_last) is not int or keep_last < 1:
            raise SettingsError("At least one checkpoint is kept", where="keep_last", got=keep_last, wanted=">= 1")
        self.run = _check_phase_name(run, "run")
        self.save_run = _check_phase_name(f"{run}{USER_SUFFIX}" if during_training else run, "run")
        self.auto_seconds, self.ending, self.clock = auto_save_minutes * 60, ending, clock
        self._phases: dict[str, PhaseCheckpoints] = {}
        self.pages: list[np.ndarray] = []
        self._warned = False  # of an unfitted model
        self.folder = CheckpointFolder(folder, keep_last)
        self.writer = BackgroundThread("checkpoint")
        self._process = process_id()
        self._stop_beating: threading.Event | None = None
        _open.add(self)

    def phase(self, name: str) -> PhaseCheckpoints:
        """Return the checkpoints of one phase (one unit of work: a model, a fold)."""
        if name not in self._phases:
            self._phases[name] = PhaseCheckpoints(self, name)
        return self._phases[name]

    def save_checkpoint(self, phase: str, state: dict, force: bool = False, metrics: dict | None = None) -> dict | None:
        """Save when a save is due, or always with `force`. After SIGTERM or SIGINT the save is made at once,
        and the process ends.

        The values are those of this moment: on return the caller may overwrite or free everything; a thread writes
        them (`wait`).

        Returns None when no save is due, else the description of the save: run, phase, saved_at, metrics, status; once
        written also sequence, path, bytes, hash. Where the disk refuses, its status is "not saved", a warning is
        logged, the earlier checkpoints stand, and the next save is due in seconds.
        Raises CheckpointError for a state that cannot be saved (NonFiniteError where a weight is not finite), or when
        another process owns this run and phase.
        """
        self._warn_of_unfitted_model(state)
        return self.phase(phase).save(state, metrics=metrics, force=force)

    def _warn_of_unfitted_model(self, state: dict) -> None:
        """Log once that a value is the state of a model that was never fitted: `get_state` of another object."""
        for name, value in state.items() if isinstance(state, dict) and not self._warned else ():
            if isinstance(value, dict) and "model" in value and value.get("n_features") == 0:
                self._warned = True
                _log.warning("state[%r] is a %s that was never fitted. Next: pipeline.train(..., estimator=model) fits "
                             "that object, or a callback (epoch, metrics, model)", name, value["model"])  # fmt: skip

    def load_latest_checkpoint(self, phase: str) -> dict | None:
        """Return the newest checkpoint that verifies, or None: {"state", "run", "phase", "sequence", "saved_at",
        "metrics", "path", "hash", "skipped"}. `skipped` lists the files that were passed over, with reasons.

        For a training's phase ("train_xgboost") a manager without a run returns the newest that a training of this
        workspace saved, of any symbol and horizon, with the keys `symbol` and `horizon`, `state["model_state"]` for the
        model's `load_state`, and `state["epoch"]`. A state saved with `save_checkpoint` under that phase is returned
        when no training has saved one.
        """
        found = latest_training_checkpoint(self.folder, phase, "" if self.run == NO_RUN else self.run)
        return self.phase(phase).latest() if found is None else found

    def list_checkpoints(self, phase: str | None = None) -> list[dict]:
        """List the verified checkpoints of one phase or of all, oldest first, at most `keep_last` of each."""
        self.writer.wait()
        names = [_check_phase_name(phase, "phase")] if phase else self.folder.phases(self.save_run)
        return [info for name in names for info in self.folder.list_verified(self.save_run, name)]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for every background write and upload; return False when some are unfinished after `seconds`, or the
        workspace refused them. Refused writes have been logged.
        """
        return self.writer.wait(seconds) and self.folder.wait(seconds)

    def close(self, seconds: float = _UPLOAD_SECONDS) -> None:
        """Finish the writes and release the run for other processes; wait `seconds` for the uploads. What the workspace
        does not accept in time stays on the local disk, and the next session uploads it. No effect in a forked process.
        """
        if self.is_forked():
            return
        self.writer.wait()
        if self._stop_beating is not None:
            self._stop_beating.set()
            self._stop_beating = None
        for phase in self._phases.values():
            phase.release()
        if self._phases:
            self.folder.wait(seconds)
        _open.discard(self)

    def take_pages(self, size: int) -> np.ndarray:
        """Return as many bytes to fill, those of the last written state where they fit."""
        with suppress(IndexError):  # another thread saves: a list gives each array to one of them
            if size <= len(pages := self.pages.pop()) <= size + size // 4:
                return pages[:size]
        return np.empty(size + size // 16, np.uint8)[:size]  # a history that grows still fits the next time

    def start_beating(self) -> None:
        """Renew the leases in the background from now on."""
        if self._stop_beating is None:
            self._stop_beating = threading.Event()
            threading.Thread(target=self._beat, args=(self._stop_beating,), name="lease", daemon=True).start()

    def _beat(self, stopped: threading.Event) -> None:
        while not stopped.wait(RENEW_SECONDS):
            for phase in list(self._phases.values()):
                with suppress(Exception):  # a thread that ends here would hand the work over
                    phase.beat()

    def is_forked(self) -> bool:
        """Return True in a forked process: the writing thread and the leases are its parent's."""
        return self._process != process_id()

    def check_process(self) -> None:
        """Raise CheckpointError in a forked process."""
        if self.is_forked():
            raise CheckpointError(
                "This CheckpointManager belongs to another process", where=self.folder.folder,
                got="a process made by fork", wanted="the process that opened it",
                next_step="open a CheckpointManager in the process that saves",
            )  # fmt: skip

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; a process that was asked to stop (Ctrl-C, SIGTERM, session end) already waited for the upload in its
        last save.
        """
        stopping = kind is not None and (issubclass(kind, SessionOverError) or not issubclass(kind, Exception))
        self.close(_WAIT_SECONDS if stopping else _UPLOAD_SECONDS)


def _at_exit() -> None:
    for manager in list(_open):
        if not manager.is_forked() and manager.writer.wait(_END_SECONDS):
            manager.close(_END_SECONDS)


atexit.register(_at_exit)


def describe_save(saved: dict) -> str:
    """Return phase, number, status and time of a save."""
    number = f" #{saved['sequence']}" if "sequence" in saved else ""
    return f"{saved['phase']}{number} {saved['status']} {time.strftime('%H:%M:%S', time.localtime(saved['status_at']))}"


def save_status_line() -> str:
    """Return the status of this process's newest checkpoint; "" before the first."""
    return describe_save(_newest[0]) if _newest else ""


def _set_status(saved: dict, status: str) -> None:
    saved.update(status=status, status_at=time.time())


def _check_phase_name(name: str, field: str) -> str:
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
