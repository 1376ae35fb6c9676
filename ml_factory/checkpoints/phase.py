"""Checkpoints of one phase: when a save is due, how it is made, and which one is the newest."""

import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from ml_factory.checkpoints.leases import LeaseHolder, TakenOverError
from ml_factory.checkpoints.schedule import SaveTimer, reserved_seconds
from ml_factory.checkpoints.slot_pool import Unit
from ml_factory.checkpoints.slots import recency
from ml_factory.checkpoints.stop_signals import stop
from ml_factory.checkpoints.uploader import COPIED, IN_MEMORY, LOCAL, REFUSED, SAVED, SaveStatus, publish_status
from ml_factory.errors import CheckpointError, SessionOver, SettingsError, WorkspaceError
from ml_factory.redaction import redact
from ml_factory.storage.locks import acquire, release
from ml_factory.storage.safetensors_layout import Layout
from ml_factory.storage.serialization import decode_state, plan_layout

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
    """Checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to the training."""

    def __init__(self, manager, name: str, run: str = ""):
        """run : a run whose checkpoints are only read; the manager's own run without it."""
        self.manager, self.name, self.unit = manager, name, Unit(run or manager.save_run, name)
        self.last_save: SaveStatus | None = None
        self._lock = manager.locks / f"{self.unit.run}--{name}.lock"
        self._timer = SaveTimer(
            manager.auto_seconds, manager.first_seconds, clock=manager.clock, mean_life=manager.mean_life
        )
        self._locked = self._warned = self._listening = self._passed_over = False
        later = manager.uploader.submit if manager.uploader is not None else None
        self.lease_holder = LeaseHolder(self.unit, manager.lease.session, manager.home, manager.mount, later)
        self._taken_over: TakenOverError | None = None

    def due(self) -> bool:
        """Return True when a save that is not forced would happen now. Cheap: called at every step boundary."""
        if self.manager.uploader is not None:
            self.manager.uploader.retry_if_due()
        if self._taken_over is not None or self.stopping():
            return True
        return not self.manager.staging.preparing and self._timer.due()

    def due_in(self) -> float:
        """Return the seconds until a save that is not forced would happen, if nothing ends the session before."""
        return 0.0 if self._taken_over is not None or self.stopping() else self._timer.due_in()

    def stopping(self) -> bool:
        """Return True after a signal, or when the session is about to end: the next step then saves."""
        return stop.requested is not None or self.manager.ending(self.manager.durations.seconds)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """Save a state, as `CheckpointManager.save_checkpoint`."""
        self.manager.check_process()
        if not force and not self.due():
            return None
        if self._taken_over is not None:
            raise self._taken_over
        metrics = {key: _check_metric(key, value) for key, value in (metrics or {}).items()}
        layout = plan_layout(state, finite=True)
        self.acquire(wait=False)
        must = force or self.stopping()
        if not must:
            self.manager.staging.prepare(layout.size)
            if self.manager.staging.preparing:  # for the first time: a later step copies without waiting for pages
                self._passed_over = True
                return None
        with self.manager.staging_lock(self.manager.deadline if must else _WAIT_SECONDS) as free:
            if not free:
                self._warn(WorkspaceError("The save before it is still being written", where=self.manager.home_folder))
                self._passed_over = True
                return None  # still due: the next step tries again
            info = {"saved_at": datetime.now(UTC).isoformat(), "metrics": metrics}
            saved = self._hand_over(layout, {**info, "lease": self.lease_holder.lease.to_dict()})
        if self._taken_over is not None:
            raise self._taken_over
        self._timer.record_save()
        if self.stopping():
            self._end_work()
        return saved

    def _end_work(self) -> None:
        """Wait for the upload as long as the session allows; then re-send the signal, or raise SessionOver."""
        manager = self.manager
        manager._wait_home(manager.deadline)
        manager.wait(_END_UPLOAD_SECONDS if stop.requested is not None else reserved_seconds(manager.durations.seconds))
        reached = _REACHED[self.last_save.where]
        if stop.requested is not None:
            _log.warning("Stopped: %s (%s)", reached, self.last_save)
            stop.resend_if_requested()
        raise SessionOver(
            f"This session is about to end: {reached}", where=self.name, got=self.last_save,
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
            self.manager.staging.prepare(found["bytes"])
        return found

    def acquire(self, wait: bool = True) -> None:
        """Own this phase until `release`, `CheckpointManager.close` or the end of the process.

        wait : query the mount's lease too, and wait for it to expire.
        Raises CheckpointError when another living process owns it, on this or another machine.
        """
        self.manager.check_process()
        if not self._locked:
            try:
                acquire(self._lock, f"run {self.unit.run}, phase {self.name}")
                self._locked = True
            except WorkspaceError as error:  # a disk that refuses the lock file must not stop the work
                self._warn(error)
        if not self.lease_holder.held:
            self.lease_holder.acquire(query_mount=wait)
            self.manager.heartbeat.start()

    def check_unlocked_by_others(self) -> None:
        """Raise CheckpointError when another living process of this machine owns this phase; nothing is acquired."""
        if self._lock.is_file():
            acquire(self._lock, f"run {self.manager.run}, phase {self.name}")
            release(self._lock)

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
        if not self.manager.owned_by_this_process:
            return
        self.manager._wait_home()
        self.lease_holder.renew(released=True)
        if self._locked:
            self._locked = False
            release(self._lock)
        if self._listening:
            self._listening = False
            stop.unlisten()

    def is_saved(self) -> bool:
        """Wait for the last write; return True when the last state given to `save` is on the disk.

        False when that save was skipped because the one before was still being written or its pages were being made.
        """
        self.manager._wait_home()
        return not self._passed_over and self.last_save is not None and self.last_save.where not in (IN_MEMORY, REFUSED)

    def wait_uploaded(self) -> None:
        """Wait for the last save, for a mount at most one second.

        Raises TakenOverError when it was refused because another session works on the unit: its result must not be
        registered then.
        """
        self.manager._wait_home()
        if self.manager.uploader is not None:
            self.manager.uploader.wait(_WAIT_SECONDS)
        if self._taken_over is not None:
            raise self._taken_over

    def release_slots(self) -> None:
        """Return the unit's slots to the pool after its artifact is registered; they can be read until another unit
        overwrites them.

        Raises TakenOverError when another session works on the unit: then the slots are that session's.
        """
        self.manager.check_process()
        self.wait_uploaded()
        holder = self.lease_holder.lease.to_dict() if self.lease_holder.held else None
        try:
            self.manager.home.release(self.unit, holder)
            if self.manager.uploader is not None:
                self.manager.uploader.release(self.unit, holder)
        except WorkspaceError as error:
            self._warn(error)

    def latest(self) -> dict | None:
        """Return the newest verified checkpoint, without owning the phase.

        Raises WorkspaceError when the mount does not answer and nothing is on the local disk: to start from scratch
        then would lose what the mount holds.
        """
        self.manager.check_process()
        self.manager._wait_saves()
        home = self.manager.home
        info, state, skipped = home.latest_valid(self.unit, decode_state)
        unusable = self._download_newer(info)
        if unusable is not None:
            info, state, unreadable = home.latest_valid(self.unit, decode_state)
            skipped = list(dict.fromkeys([*unusable, *skipped, *unreadable]))
        if info is not None:
            return {"state": state, **_with_metrics(info), "skipped": skipped}
        if skipped:
            _log.warning("No checkpoint of %s can be used: %s", self.name, "; ".join(skipped))
        return None

    def list(self, verify: bool = True) -> list[dict]:
        """List the checkpoints, oldest first, at most `keep_last`.

        verify : read them through and drop the torn ones; a checkpoint on the local disk is not read again on a mount.
        """
        manager, found = self.manager, []
        manager._wait_saves()
        local: list[dict] = []
        with suppress(WorkspaceError):
            local = manager.home.list_unverified(self.unit)
        remote = manager._query_mount(lambda mount: mount.list_unverified(self.unit)) or []
        by_hash: dict[str, list[tuple]] = {}
        for tier, infos in ((manager.home, local), (manager.mount, remote)):
            for info in infos:
                by_hash.setdefault(info["hash"], []).append((tier, info))
        for copies in sorted(by_hash.values(), key=lambda copies: recency(copies[0][1]), reverse=True):
            if len(found) < manager.keep_last:
                found += _first_valid(copies) if verify else [copies[0][1]]
        return [_with_metrics(info) for info in reversed(found)]

    def latest_info(self) -> dict | None:
        """Return the newest checkpoint's description, unverified; None without one. Cheap on a mount.

        Raises UnresponsiveMountError when the mount does not answer and nothing is on the local disk.
        """
        manager = self.manager
        manager.check_process()
        manager._wait_saves()
        infos: list[dict] = []
        with suppress(WorkspaceError):
            infos = manager.home.list_unverified(self.unit)
        infos = [
            *infos,
            *(manager._query_mount(lambda mount: mount.list_unverified(self.unit), needed=not infos) or []),
        ]
        return _with_metrics(max(infos, key=recency)) if infos else None

    def _download_newer(self, local: dict | None) -> "list[str] | None":
        """Download a checkpoint that only the mount has; return the slots skipped there, None if nothing was
        downloaded.

        local : the newest that verified on the local disk. One that is torn there may be intact on the mount.
        """
        manager = self.manager
        if manager.mount is None:
            return None
        try:
            remote = manager.mount.list_unverified(self.unit)
            if remote and (local is None or recency(remote[0]) > recency(local)):
                return manager.mount.copy_out(self.unit, manager.keep_last, str(manager.home_folder))
            if local is not None and local["hash"] not in {info["hash"] for info in remote}:
                # an earlier session ended before this upload
                manager.uploader.enqueue_upload(self.unit, fence=self.lease_holder.lease.fence)
        except WorkspaceError as error:
            if local is None:
                raise
            _log.warning("Resuming from the local disk: %s", error)
        return None

    def _hand_over(self, layout: Layout, info: dict) -> dict | None:
        """Copy the state now; write it now, or in the background while training continues. NonFiniteError changes
        nothing.
        """
        manager, began = self.manager, time.perf_counter()
        payload = manager.staging.copy(layout)
        blocking = time.perf_counter() - began
        saved = {"run": self.unit.run, "phase": self.name, **info, "status": IN_MEMORY}
        self.last_save, self._passed_over = SaveStatus(self.name, at=time.time()), False
        state = self.last_save
        publish_status(state)
        description = {**info, "metrics": {key: _encode_metric(value) for key, value in info["metrics"].items()}}

        def write() -> None:
            written = self._write_or_warn(description, payload)
            state.at = time.time()
            if written is None:
                state.where = saved["status"] = REFUSED
                return
            manager.durations.written = time.perf_counter() - began
            self._timer.record_cost(blocking, manager.durations.seconds - blocking)
            state.sequence = written["sequence"]
            state.where = SAVED if manager.uploader is None else LOCAL
            saved.update(_with_metrics(written), status=state.where)
            if manager.uploader is not None:
                manager.uploader.enqueue_upload(self.unit, copied, self._mark_taken_over, self.lease_holder.lease.fence)
            manager.on_saved()

        def copied() -> None:
            state.where, state.at, saved["status"] = COPIED, time.time(), COPIED
            if (
                not manager.uploader.unresponsive
            ):  # a copy that waited for an unresponsive mount does not predict the next
                manager.durations.copied = time.perf_counter() - began
                self._timer.record_cost(blocking, manager.durations.seconds - blocking)

        manager._executor.submit(write)
        return None if saved["status"] == REFUSED else saved

    def _write_or_warn(self, info: dict, payload: memoryview) -> dict | None:
        manager = self.manager
        try:
            saved = manager.select_writer(payload).write(self.unit, manager.keep_last, info, payload)
        except TakenOverError as error:
            self._mark_taken_over(error)
            return None
        except (WorkspaceError, CheckpointError) as error:
            self._warn(error)
            return None
        self._warned = False
        return saved

    def _mark_taken_over(self, error: TakenOverError) -> None:
        """Make the next step end the work: another session continues it."""
        if self._taken_over is None:
            _log.warning("%s The work of this session ends at its next step; its saves stay.", error)
        self._taken_over = error

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            stop.listen()

    def _warn(self, error: Exception) -> None:
        """Log one warning until a save works again: a full Drive must not end a training, nor fill its log."""
        if not self._warned:
            _log.warning("Checkpoint of %s not saved, the run goes on: %s", self.name, error)
        self._warned = True


def _first_valid(copies: list[tuple]) -> list[dict]:
    """Return the info of the first of these copies, (pool, info), that verifies, in a list; [] for none."""
    for tier, info in copies:
        with suppress(CheckpointError, WorkspaceError):
            return [tier.verify(info["path"])]
    return []


def check_name(name: str, field: str) -> str:
    """Return the name if it is legal in a slot. Raises SettingsError with a legal one.

    field : what is named.
    """
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    proposal = re.sub(r"[^A-Za-z0-9._=-]+", "-", str(name)).lstrip("._=-")[:100] or "train"
    raise SettingsError(
        f"A {field}'s name is written into every slot",
        where=field,
        got=repr(name),
        wanted="letters, digits and . _ = - (100 at most)",
        next_step=f"use {proposal!r}",
    )


def _check_metric(key: str, value: object) -> object:
    """Return a metric as JSON can hold it; NumPy and torch scalars become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int | float | str):
        return redact(value) if isinstance(value, str) else value
    raise CheckpointError("A metric is a number or a text", where=key, got=type(value).__name__)


def _encode_metric(value: object) -> object:
    """Encode NaN and infinity (a score not yet measured), which JSON lacks, as {"float": text}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _with_metrics(info: dict) -> dict:
    """Return a container's info with its metrics decoded."""
    metrics = info.get("metrics") or {}
    read = {key: float(one["float"]) if isinstance(one, dict) else one for key, one in metrics.items()}
    return {**info, "metrics": read}
