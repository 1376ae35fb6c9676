"""Checkpoints that survive: a timer, reused slots that each verify alone, the newest verified one wins.

    checkpoints/{run}/{phase}/slot-0.ckpt … slot-3.ckpt   keep_last + 1 files, overwritten in turn, never deleted
                              manifest.json               written last; for people, and repaired from the slots
                              owner.lock                  the one living process that may write here

The one slot more than `keep_last` is the one being written: a process killed there leaves `keep_last` good ones.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.errors import CheckpointError, SettingsError, WorkspaceError
from ml_factory.runs.ownership import claim, release
from ml_factory.runs.slots import Slots
from ml_factory.runs.state import encode_state

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_log = logging.getLogger("ml_factory")


class CheckpointManager:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : where all runs' checkpoints are (`workspace.checkpoints`).
    auto_save_minutes : a save that is not forced happens this often. The first is made at once, and until this much
        time has passed since then, one every `first_save_minutes`: a new run has most to lose.
    keep_last : how many checkpoints of each phase are kept.
    run : name of the run, usually a fingerprint; one run never loads another's.
    background : write in a thread. `save_checkpoint` then returns when the values are copied, and only `wait` tells
        that they are on disk; without it they are on disk when `save_checkpoint` returns.
    clock : seconds that never go back.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        auto_save_minutes: float = 30,
        keep_last: int = 3,
        run: str = "default",
        clock: Callable[[], float] = time.monotonic,
        *,
        first_save_minutes: float = 2,
        background: bool = False,
    ):
        for name, value in (("auto_save_minutes", auto_save_minutes), ("first_save_minutes", first_save_minutes)):
            if not value >= 0:
                raise SettingsError("A time between saves is not negative", where=name, got=value, wanted=">= 0")
        if type(keep_last) is not int or keep_last < 1:
            raise SettingsError("At least one checkpoint is kept", where="keep_last", got=keep_last, wanted=">= 1")
        self.folder, self.run, self.keep_last = Path(folder), _check_name(run, "run"), keep_last
        self.auto_seconds, self.first_seconds = auto_save_minutes * 60, min(first_save_minutes, auto_save_minutes) * 60
        self.clock = clock
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future | None = None
        self._phases: dict[str, PhaseCheckpoints] = {}

    def phase(self, name: str) -> "PhaseCheckpoints":
        """The checkpoints of one phase (one unit of work: a model, a fold)."""
        if name not in self._phases:
            self._phases[name] = PhaseCheckpoints(self, _check_name(name, "phase"))
        return self._phases[name]

    def save_checkpoint(self, phase: str, state: dict, force: bool = False, metrics: dict | None = None) -> dict | None:
        """Save if the timer says so, or always with `force`. The values are those of this moment: on return the
        caller may overwrite or free everything.

        Returns what was saved (run, phase, sequence, saved_at, metrics, path, bytes, hash), or None when it is not
        due yet or the disk refused: then one line is logged and the earlier checkpoints stand.
        Raises CheckpointError for a state that cannot be kept, or when another process owns this run and phase.
        """
        return self.phase(phase).save(state, metrics=metrics, force=force)

    def load_latest_checkpoint(self, phase: str) -> dict | None:
        """None, or {"state", "sequence", "saved_at", "metrics", "path", "hash", "skipped"} of the newest verified one.

        `skipped` says in words which slots were passed over and why.
        """
        self.wait()
        return self.phase(phase).latest()

    def list_checkpoints(self, phase: str | None = None) -> list[dict]:
        """The verified checkpoints of one phase or of all, oldest first, at most `keep_last` of each."""
        self.wait()
        root = self.folder / self.run
        found = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        names = [name for name in found if _NAME.fullmatch(name)] if phase is None else [phase]
        return [info for name in names for info in self.phase(name).list()]

    def wait(self) -> None:
        """Return when every background write is done (on disk, or refused with a line logged)."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the background writes and let another process have this run."""
        self.wait()
        for phase in self._phases.values():
            phase.done()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _write(self, job: Callable[[], dict | None], promised: dict) -> dict | None:
        self.wait()
        if self._writer is None:
            return job()
        self._pending = self._writer.submit(job)
        return promised


class PhaseCheckpoints:
    """The checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to what trains."""

    def __init__(self, manager: CheckpointManager, name: str):
        self.manager, self.name = manager, name
        self.folder = manager.folder / manager.run / name
        self._first = self._last = None
        self._claimed = self._warned = False
        self._slots = Slots(self.folder, manager.run, name, manager.keep_last)

    def due(self) -> bool:
        """Whether a save that is not forced would happen now."""
        if self._last is None:
            return True
        now, manager = self.manager.clock(), self.manager
        starting = now - self._first < manager.auto_seconds
        return now - self._last >= (manager.first_seconds if starting else manager.auto_seconds)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """As `CheckpointManager.save_checkpoint`."""
        if not force and not self.due():
            return None
        metrics = {key: _plain(key, value) for key, value in (metrics or {}).items()}
        payload = encode_state(state)
        self.claim()
        self._last = self.manager.clock()
        self._first = self._last if self._first is None else self._first
        info = {
            "run": self.manager.run,
            "phase": self.name,
            "saved_at": datetime.now(UTC).isoformat(),
            "metrics": metrics,
        }
        return self.manager._write(lambda: self._write_or_warn(info, payload), info)

    def load(self) -> dict | None:
        """As `CheckpointManager.load_latest_checkpoint`, for the process that goes on with the work: it owns the phase
        from here on. Raises CheckpointError when another living process does."""
        self.claim()
        self.manager.wait()
        return self.latest()

    def claim(self) -> None:
        """Own this phase until `done`, `CheckpointManager.close` or the end of the process."""
        if not self._claimed:
            try:
                claim(self.folder / "owner.lock", f"run {self.manager.run}, phase {self.name}")
                self._claimed = True
            except WorkspaceError as error:  # a disk that refuses the lock does not stop the work either
                self._warn(error)

    @contextmanager
    def claimed(self) -> Iterator["PhaseCheckpoints"]:
        """Own this phase inside a `with`. Raises CheckpointError when another living process does."""
        self.claim()
        try:
            yield self
        finally:
            self.done()

    def done(self) -> None:
        """The unit is finished: let go of it. The checkpoints stay."""
        self.manager.wait()
        if self._claimed:
            self._claimed = False
            release(self.folder / "owner.lock")

    def latest(self) -> dict | None:
        """The newest verified checkpoint, without owning the phase."""
        checkpoint, skipped = self._slots.newest()
        if checkpoint is None and skipped:
            _log.warning("No checkpoint of %s can be used: %s", self.name, "; ".join(skipped))
        return checkpoint

    def list(self) -> list[dict]:
        """The verified checkpoints, oldest first, at most `keep_last`."""
        good, _ = self._slots.survey()
        return list(good.values())[-self.manager.keep_last :]

    def _write_or_warn(self, info: dict, payload: bytes) -> dict | None:
        try:
            saved = self._slots.write(info, payload)
        except (WorkspaceError, CheckpointError) as error:
            self._warn(error)
            return None
        self._warned = False
        return saved

    def _warn(self, error: Exception) -> None:
        """One line until a save works again: a full Drive must not end a training, nor fill its log."""
        if not self._warned:
            _log.warning("Checkpoint of %s not saved, the run goes on: %s", self.name, error)
        self._warned = True


def _check_name(name: str, field: str) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    proposal = re.sub(r"[^A-Za-z0-9._=-]+", "-", str(name)).lstrip("._=-")[:100] or "train"
    raise SettingsError(
        f"A {field}'s name becomes a folder",
        where=field,
        got=repr(name),
        wanted="letters, digits and . _ = - (100 at most)",
        next_step=f"use {proposal!r}",
    )


def _plain(key: str, value: object) -> object:
    """A metric as JSON can keep it; NumPy and torch scalars become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError("A metric is a number or a text", where=key, got=type(value).__name__)
