"""Checkpoint manager: the checkpoints of one run, saved on a schedule and loaded by phase.

A phase is a unit of work, such as "train_xgboost". Saves are self-verifying files (`checkpoint_folder`).
"""

import atexit
import logging
import os
import threading
import weakref
from contextlib import suppress

from ml_factory.background import BackgroundThread
from ml_factory.checkpoints.checkpoint_folder import USER_SUFFIX, CheckpointFolder
from ml_factory.checkpoints.latest_training import latest_training_checkpoint
from ml_factory.checkpoints.lease import RENEW_SECONDS
from ml_factory.checkpoints.phase import PhaseCheckpoints, check_phase_name
from ml_factory.checkpoints.schedule import SaveSchedule, SaveTimer
from ml_factory.errors import FactoryError, SessionOverError, SettingsError
from ml_factory.process_identity import process_id

NO_RUN = "default"
_UPLOAD_SECONDS = 60.0  # that the end of a run waits for its uploads
_STOPPED_SECONDS = 1.0  # where the process was asked to stop: its last save has waited before
_EXIT_SECONDS = 10.0  # for the last writes at interpreter exit
_open: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()
_log = logging.getLogger("ml_factory")


class CheckpointManager:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : folder of all runs' checkpoints (`workspace.checkpoints`).
    auto_save_minutes : interval of saves that are not forced. The first is made at once, and for this long after it one
        every `schedule.first_save_minutes`: a new run has most to lose.
    keep_last : number of checkpoints kept of each phase, at least two; the best one is kept in addition.
    run : name of the run, usually a fingerprint; a run never loads another run's checkpoint. Without one,
        `load_latest_checkpoint` finds the newest that any training of this workspace saved.
    background : `save_checkpoint` returns when the values are copied in memory, and a thread writes them; otherwise
        they are on the disk when it returns.
    schedule : when to save besides; see `SaveSchedule`.
    during_training : `run` is a training's: its checkpoints are read, and saves made here are stored separately, so
        that the training resumes from its own.

    Attribute: `folder`, the files.
    """

    def __init__(
        self, folder: str | os.PathLike, auto_save_minutes: float = 30, keep_last: int = 3, run: str = NO_RUN, *,
        background: bool = True, schedule: SaveSchedule | None = None, during_training: bool = False,
    ):  # fmt: skip
        if not auto_save_minutes >= 0:
            raise SettingsError(
                "A time between saves is not negative", where="auto_save_minutes", got=auto_save_minutes, wanted=">= 0"
            )
        if type(keep_last) is not int or keep_last < 1:
            raise SettingsError("At least one checkpoint is kept", where="keep_last", got=keep_last, wanted=">= 1")
        self.run = check_phase_name(run, "run")
        self._save_run = check_phase_name(f"{run}{USER_SUFFIX}" if during_training else run, "run")
        self._auto_seconds, self._schedule = auto_save_minutes * 60, schedule or SaveSchedule()
        self._phases: dict[str, PhaseCheckpoints] = {}
        self._warned = False  # of an unfitted model
        self.folder = CheckpointFolder(folder, keep_last)
        self._writer = BackgroundThread("checkpoint", inline=not background)
        self._process, self._stop_beating = process_id(), threading.Event()
        self._heart: threading.Thread | None = None
        _open.add(self)

    def phase(self, name: str) -> PhaseCheckpoints:
        """Return the checkpoints of one phase (one unit of work: a model, a fold)."""
        if name not in self._phases:
            check_phase_name(name, "phase")
            schedule = self._schedule
            timer = SaveTimer(self._auto_seconds, schedule.first_save_minutes * 60, schedule.clock)
            self._phases[name] = PhaseCheckpoints(
                self.folder, self._save_run, name, timer, schedule.ending, self._writer, self._beat
            )
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
        self._writer.wait()
        names = [check_phase_name(phase, "phase")] if phase else self.folder.phases(self._save_run)
        return [info for name in names for info in self.folder.list_verified(self._save_run, name)]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for every background write and upload; return False when some are unfinished after `seconds`, or the
        workspace refused them. Refused writes have been logged.
        """
        return self._writer.wait(seconds) and self.folder.wait(seconds)

    @property
    def last_saves(self) -> list[dict]:
        """Descriptions of the last save of each phase."""
        return [phase.last_save for phase in self._phases.values() if phase.last_save is not None]

    def close(self, seconds: float = _UPLOAD_SECONDS) -> None:
        """Finish the writes and release the run for other processes; wait `seconds` for the uploads. What the workspace
        does not accept in time stays on the local disk, and the next session uploads it. No effect in a forked process.
        """
        if self._process != process_id():
            return
        self._writer.wait()
        self._stop_beating.set()
        for phase in self._phases.values():
            phase.release()
        if self._phases:
            self.folder.wait(seconds)
        _open.discard(self)

    def _beat(self) -> None:
        """Renew the leases in the background from now on."""
        if self._heart is None or self._stop_beating.is_set():
            self._stop_beating = threading.Event()
            self._heart = threading.Thread(target=self._renew, args=(self._stop_beating,), name="lease", daemon=True)
            self._heart.start()

    def _renew(self, stopped: threading.Event) -> None:
        while not stopped.wait(RENEW_SECONDS):
            for phase in list(self._phases.values()):
                with suppress(FactoryError):
                    phase.beat()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; a process that was asked to stop (Ctrl-C, SIGTERM, session end) already waited for the upload in its
        last save.
        """
        stopping = kind is not None and (issubclass(kind, SessionOverError) or not issubclass(kind, Exception))
        self.close(_STOPPED_SECONDS if stopping else _UPLOAD_SECONDS)


def open_checkpoint_managers() -> list[CheckpointManager]:
    """List the managers that this process has open."""
    return [manager for manager in list(_open) if manager._process == process_id()]


def _at_exit() -> None:
    for manager in open_checkpoint_managers():
        manager._writer.wait(_EXIT_SECONDS)


atexit.register(_at_exit)
