"""Checkpoints of one phase: when a save is due, how it is made, and which process owns the phase."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.schedule import SaveTimer, reserved_save_seconds
from ml_factory.checkpoints.slot_pool import CheckpointUnit
from ml_factory.checkpoints.stop_signals import stop
from ml_factory.checkpoints.store import CheckpointStore
from ml_factory.checkpoints.uploader import COPIED, IN_MEMORY, LOCAL, REFUSED, SAVED, SaveStatus, publish_save_status
from ml_factory.errors import CheckpointError, SessionOverError, SettingsError, WorkspaceError
from ml_factory.redaction import redact_secrets
from ml_factory.storage.locks import HeldLock, acquire_lock_file, check_lock_file_free, release_lock_file
from ml_factory.storage.safetensors_layout import SafetensorsLayout
from ml_factory.storage.serialization import plan_state_layout

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_WAIT_SECONDS = 1.0  # seconds that an unforced save waits for the one before, and the end of a unit for the mount
_END_UPLOAD_SECONDS = 10.0  # seconds that a process asked to stop waits for the mount
# Message on the last save when the work ends.
_REACHED = {
    SAVED: "the work was saved and stopped here",
    COPIED: "the work was saved and stopped here; that the mount's copy was uploaded is not confirmed",
    LOCAL: "the work was saved on this machine's disk alone, the mount did not accept it in time",
    IN_MEMORY: "the last save is still being written, only the one before it is sure",
    REFUSED: "the last save was refused, only the one before it stands",
}
_log = logging.getLogger("ml_factory")


class PhaseCheckpoints:
    """Checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to the training.

    Parameters
    ----------
    store : the slots, the staging buffer and the leases.
    unit : run and phase.
    timer : schedule of the saves that are not forced.
    ending : as of `SaveSchedule`.
    """

    def __init__(self, store: CheckpointStore, unit: CheckpointUnit, timer: SaveTimer, ending: Callable[[float], bool]):
        self.store, self.unit, self.name = store, unit, unit.phase
        self._timer, self._ending = timer, ending
        self._lock_file = store.locks / f"{unit.run}--{unit.phase}.lock"
        self._lock: HeldLock | None = None
        self._warned = self._listening = self._passed_over = self._refused = False
        self.lease_holder = store.lease_holder(unit)
        self._taken_over: LeaseTakenOverError | None = None

    @property
    def last_save(self) -> SaveStatus | None:
        """Status of the last save; None before the first."""
        return self.store.last_saves.get(self.unit)

    def due(self) -> bool:
        """Return True when a save that is not forced would happen now. Cheap: called at every step boundary."""
        if self.store.uploader is not None:
            self.store.uploader.retry_if_due()
        if self._taken_over is not None or self._is_stopping():
            return True
        return not self.store.staging.is_allocating and self._timer.due()

    def due_in(self) -> float:
        """Return the seconds until a save that is not forced would happen, if nothing ends the session before."""
        return 0.0 if self._taken_over is not None or self._is_stopping() else self._timer.due_in()

    def _is_stopping(self) -> bool:
        """Return True after a signal, or when the session is about to end: the next step then saves."""
        return stop.requested is not None or self._ending(self.store.durations.seconds)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """Save a state, as `CheckpointManager.save_checkpoint`."""
        self.store.check_process()
        if not force and not self.due():
            return None
        if self._taken_over is not None:
            raise self._taken_over
        metrics = {key: _check_metric(key, value) for key, value in (metrics or {}).items()}
        layout = plan_state_layout(state, finite=True)
        self.acquire(wait=False)
        must = force or self._is_stopping()
        if not must:
            self.store.staging.prepare(layout.size)
            if self.store.staging.is_allocating:  # for the first time: a later step copies without waiting for pages
                self._passed_over = True
                return None
        with self.store.staging_lock(self.unit, self.store.deadline if must else _WAIT_SECONDS) as free:
            if not free:
                self._warn(WorkspaceError("The save before it is still being written", where=self.store.home_folder))
                self._passed_over = True
                return None  # still due: the next step tries again
            info = {"saved_at": datetime.now(UTC).isoformat(), "metrics": metrics}
            saved = self._hand_over(layout, {**info, "lease": self.lease_holder.lease.to_dict()}, force)
        if self._taken_over is not None:
            raise self._taken_over
        if self._is_stopping():
            self._end_work()
        return saved

    def _end_work(self) -> None:
        """Wait for the upload as long as the session allows; then re-send the signal, or raise SessionOver."""
        store, last = self.store, self.store.last_saves[self.unit]
        store.wait_home(store.deadline)
        store.wait(
            _END_UPLOAD_SECONDS if stop.requested is not None else reserved_save_seconds(store.durations.seconds)
        )
        reached = _REACHED[last.where]
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
            self._taken_over, self.lease_holder.held = None, False
        self.acquire()
        self._listen()
        found = self.latest()
        if found is not None:
            self.store.staging.prepare(found["bytes"])
        return found

    def acquire(self, wait: bool = True) -> None:
        """Own this phase until `release`, `CheckpointManager.close` or the end of the process.

        wait : query the mount's lease too, and wait for it to expire.
        Raises CheckpointError when another living process owns it, on this or another machine; nothing was written
        then, and nothing is kept.
        """
        self.store.check_process()
        if self.lease_holder.held:
            return
        try:
            self._lock = self._lock or acquire_lock_file(self._lock_file, f"run {self.unit.run}, phase {self.name}")
        except WorkspaceError as error:  # a disk that refuses the lock file must not stop the work
            self._warn(error)
        try:
            self.lease_holder.acquire(query_mount=wait, lock=self._lock)
        except BaseException:
            self.lease_holder.held = False
            self._unlock()
            raise
        self.store.heartbeat.start()

    def check_unlocked_by_others(self) -> None:
        """Raise CheckpointError when another living process of this machine owns this phase; nothing is acquired."""
        check_lock_file_free(self._lock_file, f"run {self.unit.run}, phase {self.name}")

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
        if not self.store.owned_by_this_process:
            return
        self.store.wait_home()
        self.lease_holder.renew(released=True)
        self._unlock()
        if self._listening:
            self._listening = False
            stop.remove_listener()

    def is_saved(self) -> bool:
        """Wait for the last write; return True when the last state given to `save` is on the disk.

        False when that save was skipped because the one before was still being written or its pages were being made.
        """
        self.store.wait_home()
        last = self.last_save
        return not self._passed_over and last is not None and last.where not in (IN_MEMORY, REFUSED)

    def wait_uploaded(self) -> None:
        """Wait for the last save, for a mount at most one second.

        Raises TakenOverError when it was refused because another session works on the unit: its result must not be
        registered then.
        """
        self.store.wait_home()
        if self.store.uploader is not None:
            self.store.uploader.wait(_WAIT_SECONDS)
        if self._taken_over is not None:
            raise self._taken_over

    def release_slots(self) -> None:
        """Return the unit's slots to the pool after its artifact is registered; they can be read until another unit
        overwrites them.

        Raises TakenOverError when another session works on the unit: then the slots are that session's.
        """
        self.store.check_process()
        self.wait_uploaded()
        holder = self.lease_holder.lease.to_dict() if self.lease_holder.held else None
        try:
            self.store.release(self.unit, holder)
        except WorkspaceError as error:
            self._warn(error)

    def latest(self) -> dict | None:
        """Return the newest verified checkpoint, without owning the phase, as `CheckpointStore.load_latest`."""
        return self.store.load_latest(self.unit, self.lease_holder.lease.fence)

    def latest_info(self) -> dict | None:
        """Return the newest checkpoint's description, as `CheckpointStore.latest_info`."""
        return self.store.latest_info(self.unit)

    def _hand_over(self, layout: SafetensorsLayout, info: dict, force: bool) -> dict | None:
        """Copy the state now; write it now, or in the background while training continues. NonFiniteError changes
        nothing; a save that is refused is due again soon.
        """
        store, began = self.store, time.perf_counter()
        staged = store.staging.copy(layout)
        blocking = time.perf_counter() - began
        saved = {"run": self.unit.run, "phase": self.name, **info, "status": IN_MEMORY}
        status = store.last_saves[self.unit] = SaveStatus(self.name, at=time.time())
        self._passed_over = False
        publish_save_status(status)
        self._timer.record_save()

        def write() -> None:
            written, on_mount = self._write_or_warn(info, staged, force)
            status.at = time.time()
            if written is None:
                status.where = saved["status"] = REFUSED
                self._timer.record_refused()
                return
            self._timer.record_accepted()
            store.durations.written = time.perf_counter() - began
            self._timer.record_cost(blocking, store.durations.seconds - blocking)
            status.sequence, status.where = written["sequence"], SAVED if store.uploader is None else LOCAL
            saved.update(written, status=status.where)
            if store.uploader is not None and on_mount:
                store.uploader.discard(self.unit)
                copied()
            elif store.uploader is not None:
                store.uploader.enqueue_upload(self.unit, copied, self._mark_taken_over, self.lease_holder.mount_fence)
            store.on_saved()

        def copied() -> None:
            status.where, status.at, saved["status"] = COPIED, time.time(), COPIED
            # a copy that waited for an unresponsive mount does not predict the next
            if store.uploader is not None and not store.uploader.unresponsive:
                store.durations.copied = time.perf_counter() - began
                self._timer.record_cost(blocking, store.durations.seconds - blocking)

        store.executor.submit(write)
        return None if saved["status"] == REFUSED else saved

    def _write_or_warn(self, info: dict, staged: memoryview, force: bool) -> tuple[dict | None, bool]:
        """Return as `CheckpointStore.write`; (None, False) where it was refused."""
        try:
            fence, last = self.lease_holder.mount_fence, self._is_stopping()
            written = self.store.write(self.unit, info, staged, mount_fence=fence, force=force, last=last)
        except LeaseTakenOverError as error:
            self._mark_taken_over(error)
            return None, False
        except (WorkspaceError, CheckpointError, OSError, RuntimeError, MemoryError) as error:
            if not self._refused:
                _log.warning("Checkpoint of %s not saved, the run goes on and tries again: %s", self.name, error)
            self._refused = True
            return None, False
        self._warned = self._refused = False
        return written

    def _mark_taken_over(self, error: LeaseTakenOverError) -> None:
        """Make the next step end the work: another session continues it."""
        if self._taken_over is None:
            _log.warning("%s The work of this session ends at its next step; its saves stay.", error)
        self._taken_over = error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock = None
            release_lock_file(self._lock_file)

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            stop.listen()

    def _warn(self, error: Exception) -> None:
        """Log one warning until a save works again; a refused save has its own."""
        if not self._warned:
            _log.warning("Checkpoints of %s: the run goes on. %s", self.name, error)
        self._warned = True


def check_phase_name(name: str, field: str) -> str:
    """Return the name if it is legal in a slot. Raises SettingsError with a legal one.

    field : what is named.
    """
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    proposal = re.sub(r"[^A-Za-z0-9._=-]+", "-", str(name)).lstrip("._=-")[:100] or "train"
    raise SettingsError(
        f"A {field}'s name is written into every slot",
        where=field, got=repr(name), wanted="letters, digits and . _ = - (100 at most)", next_step=f"use {proposal!r}",
    )  # fmt: skip


def _check_metric(key: str, value: object) -> object:
    """Return a metric as JSON can hold it; NumPy and torch scalars become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int | float | str):
        return redact_secrets(value) if isinstance(value, str) else value
    raise CheckpointError("A metric is a number or a text", where=key, got=type(value).__name__)
