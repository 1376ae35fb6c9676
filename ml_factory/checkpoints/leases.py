"""Leases with fencing tokens for units of work shared by several machines.

    checkpoints/leases/{unit}.json     {"session", "fence", "lock", "boot", "host", "beat", "seen", "kept", "released"}

A lock of the operating system ends at the machine. A living session therefore renews its lease every minute; another
session that finds a lease watches it for a while, is refused when it is renewed, and takes over when it is not.

A session is a random id of its process; the host name is for messages. A lease needs no watching in three cases alone:
it was released; or the lock that its session held is now this session's (`lock`, see `storage.locks`), which proves
that it ended, and is the usual resume on one machine; or it is stale by two clocks that are both known to be right.

The age of a lease is computed from two clocks only where both are synchronized by NTP, as the kernel of each reports.
A lease renewed three minutes ago is then stale at once, which is the usual resume on another machine. Otherwise, and
always among the containers of one kernel (`boot`), whose clock reports say nothing about each other's processes, the
lease has to stay unchanged for three minutes of the local monotonic clock, whatever its recorded time. The mount has no
clock of its own: the time that Drive shows for a file comes from the machine that wrote it.

An unreadable lease may be a living session's, and is watched like one that was renewed just now; but not on the local
disk, where this session's lock shows that no other session of the machine has the unit.

A mount may show leases late or never: then two sessions may live for a time. Every checkpoint carries its session's
fence; a session that finds a higher fence than its own stops writing (Gray and Cheriton 1989; the fencing tokens of
Kleppmann 2016). At equal fences the one that has saved keeps the unit, and writes its lease over the other's; where
both have saved, their ids decide; where neither has, the one whose lease is there.
"""

import ctypes
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import read_small_file, write_small_file
from ml_factory.checkpoints.slot_description import check_lease_record
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotWriterId
from ml_factory.errors import CheckpointError, FactoryError, WorkspaceError
from ml_factory.process_identity import boot_id
from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import fingerprint_json, parse_json
from ml_factory.storage.locks import HeldLock
from ml_factory.storage.regular_files import refuse_linked_folder

RENEW_SECONDS, EXPIRY_SECONDS, POLL_SECONDS = 60.0, 180.0, 5.0
MAX_CLOCK_ERROR = 86400.0  # seconds; no clock is wrong by more, because TLS certificates would already fail
_TIMEX = struct.Struct("i4xqqqqi")  # modes, offset, freq, maxerror, esterror, status: the beginning of struct timex
_UNSYNCHRONISED = 0x40
UNREADABLE_LEASE: dict = {"unreadable": True}  # it has no fence: the checkpoints carry the fence too
T = TypeVar("T")
_log = logging.getLogger("ml_factory")


class LeaseTakenOverError(CheckpointError):
    """A later session works on this unit: the present session must not write any more."""


def read_lease_file(disk: Disk, folder: Path, unit: CheckpointUnit) -> dict:
    """Return the unit's lease; {} where there is none, or the disk does not even list its folder.

    UNREADABLE_LEASE : where it is there, and torn or refused.
    """
    path = _path(folder, unit)
    with suppress(WorkspaceError, ValueError):
        return check_lease_record(parse_json(read_small_file(disk, path)))
    with suppress(OSError):
        return UNREADABLE_LEASE if path.name in disk.names(path.parent) else {}
    return {}


def write_lease_file(disk: Disk, folder: Path, unit: CheckpointUnit, lease: dict) -> None:
    """Overwrite the unit's lease; an interrupted write may leave an unreadable one."""
    path = _path(folder, unit)
    with disk_errors(path):
        disk.make_folder(path.parent)
        refuse_linked_folder(path.parent)
    write_small_file(disk, path, json.dumps({"run": unit.run, "phase": unit.phase, **lease}).encode())


def check_fencing_token(unit: CheckpointUnit, writer: tuple[int, str], infos: Iterable[dict], lease: dict) -> None:
    """Raise LeaseTakenOverError when another session has the unit, by its checkpoints or its lease.

    Parameters
    ----------
    unit : the unit of work.
    writer : (fence, session), as of `lease_fence_order`.
    infos : descriptions of the unit's checkpoints.
    lease : the unit's lease, {} without one.
    """
    saved, holder = {lease_fence_order(info.get("lease")) for info in infos}, lease_fence_order(lease)
    if writer in saved:
        rivals = {other for other in saved if other > writer}
    else:
        rivals = {other for other in saved if other[0] >= writer[0] and other != writer}
        if holder[0] == writer[0] and holder != writer and not lease.get("released"):
            rivals.add(holder)
    if holder[0] > writer[0]:
        rivals.add(holder)
    if rivals:
        raise LeaseTakenOverError(
            "A later session has taken this work over; this session stops writing",
            where=f"run {unit.run}, phase {unit.phase}", got=f"fence {writer[0]}", wanted=f"{max(rivals)[0]}",
            next_step="stop this session, or open a run of its own with FRESH",
        )  # fmt: skip


def fencing_token_of(info: dict) -> int:
    """Return the fence in a checkpoint's description; 0 where it has none."""
    return lease_fence_order(info.get("lease"))[0]


def lease_fence_order(lease: object) -> tuple[int, str]:
    """Return (fence, session) of a lease; (0, "") where no session holds it."""
    record = lease if isinstance(lease, dict) else {}
    fence = record.get("fence")
    return (fence, str(record.get("session") or "")) if type(fence) is int and fence > 0 else (0, "")


def clock_is_synchronized() -> bool:
    """Return True when the kernel reports a synchronized clock (by NTP or the host); False where it reports nothing."""
    timex = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return False
    return 0 <= state < 5 and not _TIMEX.unpack_from(timex)[-1] & _UNSYNCHRONISED


class _LeaseTier(Protocol):
    """Slots of one disk, as a lease uses them."""

    @property
    def other_machines_write(self) -> bool: ...  # this machine's locks do not reach them
    def read_lease(self, unit: CheckpointUnit) -> dict: ...
    def renew(self, unit: CheckpointUnit, record: dict) -> None: ...
    def list_unverified(self, unit: CheckpointUnit) -> list[dict]: ...


class LeaseHolder:
    """Lease of this session on one unit of work.

    Parameters
    ----------
    unit : the unit of work.
    session : random id of this process.
    local, mount : the slots on the local disk, and those on a mount or None; one that does not answer is skipped.
    later : runs a job on the mount in the background.
    now, clock, sleep : seconds since 1970, monotonic seconds, and a wait; replaced in tests.
    """

    def __init__(
        self, unit: CheckpointUnit, session: str, local: _LeaseTier, mount: _LeaseTier | None = None,
        later: Callable[[Callable[[], None]], object] = lambda job: job(), *, now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        self.unit, self.lease, self._local, self._mount, self._later = unit, SlotWriterId(session), local, mount, later
        self._now, self._clock, self._sleep = now, clock, sleep
        self.held, self._beat = False, 0
        self._lock: HeldLock | None = None
        self._tiers: list[_LeaseTier] = []
        self._mount_checked = True
        self._known_records: list[dict] = []  # leases that were there when the watch began
        self._mount_watch: tuple[dict[str, dict], float] | None = None  # suspects, and when they are stale
        self._write_lock = threading.Lock()  # the heartbeat never writes after the release
        self._write_queued = False

    def acquire(self, query_mount: bool = True, lock: HeldLock | None = None) -> None:
        """Acquire the lease. Raises CheckpointError when a living session holds it; nothing was written then.

        query_mount : False in the middle of a training that never loaded, which must not wait; the mount's lease is
            then checked before the first copy, as that of a mount that did not answer (`mount_fence`).
        lock : the unit's lock file, which this process holds; None without one.
        """
        self._tiers = [self._local, *([self._mount] if query_mount and self._mount is not None else [])]
        self._lock, self._mount_checked, self._mount_watch = lock, query_mount, None
        found, saved = self._leases(), self._saved()
        self._known_records = found
        if suspects := self._suspects(found, saved):
            self._watch(suspects)
            found, saved = [*found, *self._leases()], self._saved()
        latest = max(_readable(found), key=_record_order, default={})
        fence = max([latest.get("fence", 0), *(fence for fence, _ in saved)])
        renewed = (fence, self.lease.session) == lease_fence_order(latest)
        self.lease = replace(self.lease, fence=fence if renewed else fence + 1)
        self.held, self._beat = True, max(self._beat, _beat_of(latest)) if renewed else self._beat
        self.renew()

    def renew(self, released: bool = False) -> None:
        """Write that this session lives, or that it has released the unit."""
        with self._write_lock:
            if not self.held:
                return
            self.held = not released
            self._beat += 1
            self._record = {**self.lease.to_dict(), "lock": self._lock.holder if self._lock is not None else ""}
            self._record |= {"boot": boot_id(), "host": socket.gethostname(), "beat": self._beat, "seen": self._now()}
            self._record |= {"kept": clock_is_synchronized(), "released": released}
            self._write(self._local, self._record)
        if self._mount is not None and not self._write_queued:
            self._write_queued = True
            self._later(self._write_mount)

    def _write_mount(self) -> None:
        """Write the latest record to the mount; while the mount hangs, records do not queue up."""
        self._write_queued = False
        with suppress(WorkspaceError, CheckpointError):  # the first copy reports it
            if self._mount is not None:
                self._check_mount(self._mount)
                self._write(self._mount, {**self._record, "fence": self.lease.fence})

    def mount_fence(self) -> int:
        """Return this session's fence for a copy to the mount, after checking the mount's lease if `acquire` did not.

        Raises WorkspaceError while another session's lease there is watched, LeaseTakenOverError when it is renewed.
        """
        if self._mount is not None and not self._mount_checked:
            self._check_mount(self._mount)
            self._write(self._mount, {**self._record, "fence": self.lease.fence})
        return self.lease.fence

    def _check_mount(self, mount: _LeaseTier) -> None:
        """Take the unit over on the mount, once no session there may be alive; as `mount_fence`."""
        if self._mount_checked:
            return
        lease, saved = mount.read_lease(self.unit), _sessions_that_saved(mount, self.unit)
        found = [lease] if lease else []
        if self._mount_watch is None:
            self._known_records = found
            suspects = self._suspects(found, saved)
            remaining = max(map(self._seconds_until_stale, suspects.values()), default=0.0)
            self._mount_watch = suspects, self._clock() + remaining
        suspects, until = self._mount_watch
        suspects = self._without_released(suspects, _readable(found), LeaseTakenOverError)
        if suspects and (remaining := until - self._clock()) > 0:
            raise WorkspaceError(
                f"Another session may still work on run {self.unit.run}, phase {self.unit.phase}",
                next_step=f"nothing is written there while its lease is watched, for {remaining:.0f} s more",
            )
        others = [fence for fence, session in (lease_fence_order(lease), *saved) if session != self.lease.session]
        self.lease = replace(self.lease, fence=max([self.lease.fence, *(fence + 1 for fence in others)]))
        self._mount_checked = True

    def _write(self, tier: _LeaseTier, record: dict) -> None:
        """Write the record over an earlier one; over another session's of the same fence where only this one saved.

        A session that misses this record finds the fence in the checkpoints.
        """
        with suppress(WorkspaceError):
            found, own = tier.read_lease(self.unit), lease_fence_order(record)
            fence = lease_fence_order(found)[0]
            of_rival = found and found.get("session") != self.lease.session and not found.get("released")
            if fence < own[0] or (
                fence == own[0] and (not of_rival or own in _sessions_that_saved(tier, self.unit))
            ):  # fmt: skip
                tier.renew(self.unit, record)

    def _leases(self) -> list[dict]:
        """List the leases of all tiers; an unreadable one on the local disk is left out under this session's lock."""
        leases = self._query(lambda tier: [(tier, tier.read_lease(self.unit))])
        locked = self._lock is not None and not self._local.other_machines_write
        return [
            lease for tier, lease in leases if lease and not (tier is self._local and locked and "fence" not in lease)
        ]  # fmt: skip

    def _saved(self) -> set[tuple[int, str]]:
        """Return (fence, session) of each session that has a checkpoint on a tier."""
        return set(self._query(lambda tier: _sessions_that_saved(tier, self.unit)))

    def _query(self, ask: Callable[[_LeaseTier], Iterable[T]]) -> list[T]:
        answers: list[T] = []
        for tier in self._tiers:
            try:
                answers += ask(tier)
            except WorkspaceError:
                self._mount_checked = self._mount_checked and tier is not self._mount
        return answers

    def _suspects(self, found: list[dict], saved: set[tuple[int, str]]) -> dict[str, dict]:
        """Return session -> its newest record, of the sessions that may be alive.

        A checkpoint with a higher fence than the leases shows that the mount lacks its session's lease. An unreadable
        lease counts as that session's, or as one of an unknown session "". A session that this one has taken over
        before, in another part of this process, is none.

        found : leases, unreadable ones too.
        """
        newest: dict[str, dict] = {}
        records = _readable(found)
        for record in sorted(records, key=_record_order):
            newest[str(record.get("session"))] = record
        fence, session = max(saved, default=(0, ""))
        highest = max((record["fence"] for record in records), default=0)
        if fence > highest and found:
            newest.setdefault(session, {"fence": fence, "session": session, "seen": self._now()})
        elif len(records) < len(found):
            newest[""] = {"fence": highest, "session": "", "seen": self._now()}
        own = newest.get(self.lease.session, {"fence": 0})["fence"]
        return {name: one for name, one in newest.items() if one["fence"] >= own and not self._has_ended(one)}

    def _has_ended(self, record: dict) -> bool:
        """Return True for a lease of this very session, a released one, and one whose lock proves its end."""
        own = record.get("session") == self.lease.session
        return own or bool(record.get("released")) or (
            self._lock is not None and self._lock.proves_end_of(record.get("lock"))
        )  # fmt: skip

    def _watch(self, suspects: dict[str, dict]) -> None:
        """Return when each of these leases is released or stale. Raises CheckpointError when one is renewed."""
        remaining = max(map(self._seconds_until_stale, suspects.values()))
        newest = max(suspects.values(), key=_record_order)
        if remaining > 0:
            _log.warning(
                "Another session, on %s, worked on %s %.0f s ago: waiting up to %.0f s to see whether it still runs",
                newest.get("host", "another machine"), self.unit.phase, self._now() - newest["seen"], remaining,
            )  # fmt: skip
        until = self._clock() + remaining
        while suspects and (remaining := until - self._clock()) > 0:
            self._sleep(min(POLL_SECONDS, remaining))
            suspects = self._without_released(suspects, _readable(self._leases()))

    def _without_released(
        self, suspects: dict[str, dict], records: list[dict], error: type[CheckpointError] = CheckpointError
    ) -> dict[str, dict]:
        """Return the suspects without those that these later records show as ended. Raises `error` for one that lives.

        records : none where the lease is unreadable, or the mount does not answer just now.
        """
        ended = set()
        for record in (one for one in records if suspects and one not in self._known_records):
            session = str(record.get("session"))
            before = suspects.get(session, None if "" in suspects else max(suspects.values(), key=_record_order))
            if before is not None and _record_order(record) <= _record_order(before):
                continue
            if not self._has_ended(record):
                raise error(
                    f"Another session is working on run {self.unit.run}, phase {self.unit.phase}",
                    where=f"on {record.get('host')}", got="a lease that is being renewed",
                    next_step="wait for it or stop it, or open a new run with FRESH",
                )  # fmt: skip
            ended |= {session, ""}
        return {session: record for session, record in suspects.items() if session not in ended}

    def _seconds_until_stale(self, lease: dict) -> float:
        """Return the seconds that a lease must stay unchanged; a clock that is ahead never extends EXPIRY_SECONDS."""
        age = self._now() - lease["seen"]
        if age >= MAX_CLOCK_ERROR:
            return 0.0
        clocks_agree = lease.get("kept") is True and clock_is_synchronized() and lease.get("boot") != boot_id()
        return EXPIRY_SECONDS - (max(age, 0.0) if clocks_agree else 0.0)


def _sessions_that_saved(tier: _LeaseTier, unit: CheckpointUnit) -> set[tuple[int, str]]:
    """Return (fence, session) of each session that has a checkpoint of the unit on this tier."""
    return {lease_fence_order(info.get("lease")) for info in tier.list_unverified(unit)}


def _readable(leases: Iterable[dict]) -> list[dict]:
    return [lease for lease in leases if "fence" in lease]


def _beat_of(record: dict) -> int:
    return record["beat"] if type(record.get("beat")) is int else 0


def _record_order(record: dict) -> tuple[int, int, float]:
    """Return a key that grows with each record of a session, also after its clock was set back."""
    return record["fence"], _beat_of(record), record["seen"]


class LeaseHeartbeat:
    """One daemon thread that renews the leases held by this process."""

    def __init__(self, held: Callable[[], Iterable[LeaseHolder]], seconds: float = RENEW_SECONDS):
        self._held, self._seconds, self._stop = held, seconds, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None or self._stop.is_set():
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._beat, args=(self._stop,), name="lease", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(self._seconds):
            for holder in list(self._held()):
                with suppress(FactoryError):
                    holder.renew()


def _path(folder: Path, unit: CheckpointUnit) -> Path:
    return folder / "leases" / f"{fingerprint_json([unit.run, unit.phase])[:16]}.json"
