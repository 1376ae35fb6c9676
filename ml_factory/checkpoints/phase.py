"""The checkpoints of one phase: when one is due, what a save hands over, which one is the newest."""

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
from ml_factory.secrets import redact
from ml_factory.storage.locks import acquire, release
from ml_factory.storage.safetensors_layout import Layout
from ml_factory.storage.state import decode_state, plan_layout

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_PATIENCE = 1.0  # seconds a save that is not forced waits for the one before, and the end of a unit for the mount
_LAST_COPY = 10.0  # seconds a process that was told to end waits for the mount
# What can be said of the last save when the work ends.
_REACHED = {
    SAVED: "the work was saved and stopped here",
    COPIED: "the work was saved and stopped here; that the mount's copy was uploaded is not confirmed",
    LOCAL: "the work was saved on this machine's disk alone, the mount has not taken it in time",
    IN_MEMORY: "the last save is still being written, only the one before it is sure",
    REFUSED: "the last save was refused, only the one before it stands",
}
_log = logging.getLogger("ml_factory")


class PhaseCheckpoints:
    """The checkpoints of one phase of a run; made by `CheckpointManager.phase`, handed to what trains."""

    def __init__(self, manager, name: str, run: str = ""):
        """run : whose they are, to be read alone; those of the manager's own run without it."""
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
        """Whether a save that is not forced would happen now. Cheap: to be asked at every step boundary."""
        if self.manager.uploader is not None:
            self.manager.uploader.retry_if_due()
        if self._taken_over is not None or self.stopping():
            return True
        return not self.manager.staging.preparing and self._timer.due()

    def due_in(self) -> float:
        """Seconds until a save that is not forced would happen, if nothing ends the session before."""
        return 0.0 if self._taken_over is not None or self.stopping() else self._timer.due_in()

    def stopping(self) -> bool:
        """Whether a signal came, or the session is about to end: save at this step, whatever the timer says."""
        return stop.requested is not None or self.manager.ending(self.manager.durations.seconds)

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> dict | None:
        """As `CheckpointManager.save_checkpoint`."""
        self.manager.check_process()
        if not force and not self.due():
            return None
        if self._taken_over is not None:
            raise self._taken_over
        metrics = {key: _plain(key, value) for key, value in (metrics or {}).items()}
        layout = plan_layout(state, finite=True)
        self.acquire(wait=False)
        must = force or self.stopping()
        if not must:
            self.manager.staging.prepare(layout.size)
            if self.manager.staging.preparing:  # for the first time: a later step copies without waiting for pages
                self._passed_over = True
                return None
        with self.manager.staging_lock(self.manager.deadline if must else _PATIENCE) as mine:
            if not mine:
                self._warn(WorkspaceError("The save before it is still being written", where=self.manager.home_folder))
                self._passed_over = True
                return None  # still due: the next step asks again
            info = {"saved_at": datetime.now(UTC).isoformat(), "metrics": metrics}
            saved = self._hand_over(layout, {**info, "lease": self.lease_holder.lease.to_dict()})
        if self._taken_over is not None:
            raise self._taken_over
        self._timer.record_save()
        if self.stopping():
            self._end_work()
        return saved

    def _end_work(self) -> None:
        """Wait until the save is where it belongs, no longer than the end leaves time for; then the signal acts, or
        SessionOver ends the work."""
        manager = self.manager
        manager._wait_home(manager.deadline)
        manager.wait(_LAST_COPY if stop.requested is not None else reserved_seconds(manager.durations.seconds))
        reached = _REACHED[self.last_save.where]
        if stop.requested is not None:
            _log.warning("Stopped: %s (%s)", reached, self.last_save)
            stop.resend_if_requested()
        raise SessionOver(
            f"This session is about to end: {reached}", where=self.name, got=self.last_save,
            next_step="run again in a new session: it goes on from the newest save that is there",
        )  # fmt: skip

    def load(self) -> dict | None:
        """As `CheckpointManager.load_latest_checkpoint`, for the process that goes on with the work: it owns the phase
        from here on, and hears SIGTERM and SIGINT until `done`. Raises CheckpointError when another living process
        owns it. Who was taken over may come back with this, when the other session is gone."""
        if self._taken_over is not None:
            self._taken_over, self.lease_holder.held = None, False
        self.acquire()
        self._listen()
        found = self.latest()
        if found is not None:
            self.manager.staging.prepare(found["bytes"])
        return found

    def acquire(self, wait: bool = True) -> None:
        """Own this phase until `done`, `CheckpointManager.close` or the end of the process. Raises CheckpointError when
        another living process does, here or on another machine; without `wait` a mount is not asked."""
        self.manager.check_process()
        if not self._locked:
            try:
                acquire(self._lock, f"run {self.unit.run}, phase {self.name}")
                self._locked = True
            except WorkspaceError as error:  # a disk that refuses the lock does not stop the work either
                self._warn(error)
        if not self.lease_holder.held:
            self.lease_holder.acquire(query_mount=wait)
            self.manager.heartbeat.start()

    def check_unlocked_by_others(self) -> None:
        """Raises CheckpointError when another living process of this machine owns this phase; nothing is claimed."""
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
        """Let go of this phase. The checkpoints stay. A process made by fork has nothing to let go of."""
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
        """Whether what `save` was given last is on the disk, after waiting for it. It is not where that save was passed
        over, since the one before was still being written or its pages were being made."""
        self.manager._wait_home()
        return not self._passed_over and self.last_save is not None and self.last_save.where not in (IN_MEMORY, REFUSED)

    def wait_uploaded(self) -> None:
        """Wait for the last save, for a mount no longer than a moment. Raises TakenOverError when it was refused since
        another session works on the unit: what this one made is then not to be registered."""
        self.manager._wait_home()
        if self.manager.uploader is not None:
            self.manager.uploader.wait(_PATIENCE)
        if self._taken_over is not None:
            raise self._taken_over

    def release_slots(self) -> None:
        """The unit has left its artifact: its slots go back to the pool, where they keep what they hold until another
        unit writes over it. Raises TakenOverError when another session works on the unit: then they are that one's."""
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
        """The newest verified checkpoint, without owning the phase.

        Raises WorkspaceError when the mount does not answer and nothing is on the local disk: to start anew then
        would lose what the mount holds.
        """
        self.manager.check_process()
        self.manager._wait_neighbours()
        home = self.manager.home
        info, state, skipped = home.latest_valid(self.unit, decode_state)
        passed = self._download_newer(info)
        if passed is not None:
            info, state, again = home.latest_valid(self.unit, decode_state)
            skipped = list(dict.fromkeys([*passed, *skipped, *again]))
        if info is not None:
            return {"state": state, **_shown(info), "skipped": skipped}
        if skipped:
            _log.warning("No checkpoint of %s can be used: %s", self.name, "; ".join(skipped))
        return None

    def list(self, verify: bool = True) -> list[dict]:
        """The checkpoints, oldest first, at most `keep_last`: those that verify, or without `verify` what they say of
        themselves. What lies here as well is not read on a mount."""
        manager, found = self.manager, []
        manager._wait_neighbours()
        here: list[dict] = []
        with suppress(WorkspaceError):
            here = manager.home.list_unverified(self.unit)
        there = manager._ask_mount(lambda mount: mount.list_unverified(self.unit)) or []
        places: dict[str, list[tuple]] = {}
        for tier, told in ((manager.home, here), (manager.mount, there)):
            for info in told:
                places.setdefault(info["hash"], []).append((tier, info))
        for copies in sorted(places.values(), key=lambda copies: recency(copies[0][1]), reverse=True):
            if len(found) < manager.keep_last:
                found += _first_whole(copies) if verify else [copies[0][1]]
        return [_shown(info) for info in reversed(found)]

    def latest_info(self) -> dict | None:
        """What the newest checkpoint says of itself, None without one: not read through, so not verified. Cheap on a
        mount. Raises UnresponsiveMountError when the mount does not answer and nothing is on the local disk."""
        manager = self.manager
        manager.check_process()
        manager._wait_neighbours()
        told: list[dict] = []
        with suppress(WorkspaceError):
            told = manager.home.list_unverified(self.unit)
        told = [*told, *(manager._ask_mount(lambda mount: mount.list_unverified(self.unit), needed=not told) or [])]
        return _shown(max(told, key=recency)) if told else None

    def _download_newer(self, here: dict | None) -> "list[str] | None":
        """Bring what only the mount has to the local disk; which slots there were passed over, None if nothing came.

        here : the newest that verified on the local disk. One that is torn here may be whole there.
        """
        manager = self.manager
        if manager.mount is None:
            return None
        try:
            there = manager.mount.list_unverified(self.unit)
            if there and (here is None or recency(there[0]) > recency(here)):
                return manager.mount.copy_out(self.unit, manager.keep_last, str(manager.home_folder))
            if here is not None and here["hash"] not in {info["hash"] for info in there}:
                # an earlier session ended before it could
                manager.uploader.enqueue_upload(self.unit, fence=self.lease_holder.lease.fence)
        except WorkspaceError as error:
            if here is None:
                raise
            _log.warning("Going on from the local disk: %s", error)
        return None

    def _hand_over(self, layout: Layout, info: dict) -> dict | None:
        """Copy now; write now, or let the clerk write while training goes on. NonFiniteError leaves all as it was."""
        manager, began = self.manager, time.perf_counter()
        payload = manager.staging.copy(layout)
        blocking = time.perf_counter() - began
        saved = {"run": self.unit.run, "phase": self.name, **info, "status": IN_MEMORY}
        self.last_save, self._passed_over = SaveStatus(self.name, at=time.time()), False
        state = self.last_save
        publish_status(state)
        told = {**info, "metrics": {key: _spelled(value) for key, value in info["metrics"].items()}}

        def write() -> None:
            done = self._write_or_warn(told, payload)
            state.at = time.time()
            if done is None:
                state.where = saved["status"] = REFUSED
                return
            manager.durations.written = time.perf_counter() - began
            self._timer.record_cost(blocking, manager.durations.seconds - blocking)
            state.sequence = done["sequence"]
            state.where = SAVED if manager.uploader is None else LOCAL
            saved.update(_shown(done), status=state.where)
            if manager.uploader is not None:
                manager.uploader.enqueue_upload(self.unit, copied, self._mark_taken_over, self.lease_holder.lease.fence)
            manager.on_saved()

        def copied() -> None:
            state.where, state.at, saved["status"] = COPIED, time.time(), COPIED
            if not manager.uploader.unresponsive:  # what waited for a mount that was away tells nothing of the next
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
        """The next step ends the work: another session does it now."""
        if self._taken_over is None:
            _log.warning("%s The work here ends at its next step; what was saved here stays.", error)
        self._taken_over = error

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            stop.listen()

    def _warn(self, error: Exception) -> None:
        """One line until a save works again: a full Drive must not end a training, nor fill its log."""
        if not self._warned:
            _log.warning("Checkpoint of %s not saved, the run goes on: %s", self.name, error)
        self._warned = True


def _first_whole(copies: list[tuple]) -> list[dict]:
    """The info of the first of these copies, (pool, info), that is whole when it is read; [] for none."""
    for tier, info in copies:
        with suppress(CheckpointError, WorkspaceError):
            return [tier.verify(info["path"])]
    return []


def check_name(name: str, field: str) -> str:
    """The name, if it can stand in a slot. Raises SettingsError with one that can.  field : what is named."""
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


def _plain(key: str, value: object) -> object:
    """A metric as JSON can keep it; NumPy and torch scalars become Python numbers."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | int | float | str):
        return redact(value) if isinstance(value, str) else value
    raise CheckpointError("A metric is a number or a text", where=key, got=type(value).__name__)


def _spelled(value: object) -> object:
    """JSON has no word for NaN and infinity (a score not yet measured): they are spelled out."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _shown(info: dict) -> dict:
    """A container's info with its metrics as they were given."""
    metrics = info.get("metrics") or {}
    read = {key: float(one["float"]) if isinstance(one, dict) else one for key, one in metrics.items()}
    return {**info, "metrics": read}
