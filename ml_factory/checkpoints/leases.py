"""Leases with fencing tokens for units of work shared by several machines.

    checkpoints/leases/{unit}.json     {"session", "fence", "host", "beat", "seen", "kept", "released"}

A lock of the operating system ends at the machine. A living session therefore renews its lease every minute; another
session that finds a lease watches it for a while, is refused when it is renewed, and takes over when it is not. A mount
may show leases late or never: then both sessions may live for a time. Every checkpoint carries its session's fence; a
session that finds a higher fence than its own stops writing (Gray and Cheriton 1989; the fencing tokens of Kleppmann
2016).

The age of a lease is computed from two clocks only where both are known to be right: synchronized by NTP, as the kernel
of each reports, or one and the same. A lease renewed three minutes ago is then stale at once, which is the usual
resume. Otherwise the lease has to stay unchanged for three minutes of the local monotonic clock, whatever its recorded
time. The mount has no clock of its own: the time that Drive shows for a file comes from the machine that wrote it.
"""

import ctypes
import json
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import read_small_file, write_small_file
from ml_factory.checkpoints.slot_description import check_lease_record
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotWriterId
from ml_factory.errors import CheckpointError, FactoryError, WorkspaceError
from ml_factory.process_identity import machine_id
from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import fingerprint_json, parse_json

RENEW_SECONDS, EXPIRY_SECONDS, POLL_SECONDS = 60.0, 180.0, 5.0
MAX_CLOCK_ERROR = 86400.0  # seconds; no clock is wrong by more, because TLS certificates would already fail
_TIMEX = struct.Struct("i4xqqqqi")  # modes, offset, freq, maxerror, esterror, status: the beginning of struct timex
_UNSYNCHRONISED = 0x40
_log = logging.getLogger("ml_factory")
_ids: dict[int, str] = {}


def lease_session_id() -> str:
    """Return the id of this process among all that share the workspace; a forked child has its own."""
    if os.getpid() not in _ids:
        _ids[os.getpid()] = secrets.token_hex(8)
    return _ids[os.getpid()]


class LeaseTakenOverError(CheckpointError):
    """A later session works on this unit: the present session must not write any more."""


def read_lease_file(disk: Disk, folder: Path, unit: CheckpointUnit) -> dict:
    """Return the unit's lease; {} where none can be read."""
    with suppress(WorkspaceError, ValueError):
        return check_lease_record(parse_json(read_small_file(disk, _path(folder, unit))))
    return {}


def write_lease_file(disk: Disk, folder: Path, unit: CheckpointUnit, lease: dict) -> None:
    """Overwrite the unit's lease; a torn lease counts as none, since the checkpoints carry the fence too."""
    path = _path(folder, unit)
    with disk_errors(path):
        disk.make_folder(path.parent)
    write_small_file(disk, path, json.dumps({"run": unit.run, "phase": unit.phase, **lease}).encode())


def check_fencing_token(unit: CheckpointUnit, writer: tuple[int, str], infos: Iterable[dict], lease: dict) -> None:
    """Raise TakenOverError when a checkpoint or the lease of this unit has a higher rank than the writer.

    Parameters
    ----------
    unit : the unit of work.
    writer : (fence, session), as of `lease_fence_order`.
    infos : descriptions of the unit's checkpoints.
    lease : the unit's lease, {} without one.
    """
    highest = max([lease_fence_order(info.get("lease")) for info in infos] + [lease_fence_order(lease)])
    if highest > writer:
        raise LeaseTakenOverError(
            "A later session has taken this work over; this session stops writing",
            where=f"run {unit.run}, phase {unit.phase}", got=f"fence {writer[0]}", wanted=f"{highest[0]}",
            next_step="stop this session, or open a run of its own with FRESH",
        )  # fmt: skip


def fencing_token_of(info: dict) -> int:
    """Return the fence in a checkpoint's description; 0 where it has none."""
    return lease_fence_order(info.get("lease"))[0]


def lease_fence_order(lease: object) -> tuple[int, str]:
    """Return (fence, session) of a lease; (0, "") where no session holds it.

    Two sessions that began before either saw the other have equal fences: the name decides which of them keeps writing.
    """
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

    def read_lease(self, unit: CheckpointUnit) -> dict: ...
    def renew(self, unit: CheckpointUnit, record: dict) -> None: ...
    def list_unverified(self, unit: CheckpointUnit) -> list[dict]: ...


class LeaseHolder:
    """Lease of this session on one unit of work.

    Parameters
    ----------
    unit : the unit of work.
    session : id of this process, as of `lease_session_id`.
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
        self._tiers: list[_LeaseTier] = []
        self._write_lock = threading.Lock()  # the heartbeat never writes after the release
        self._write_queued = False

    def acquire(self, query_mount: bool = True) -> None:
        """Acquire the lease. Raises CheckpointError when a living session on another machine holds it.

        query_mount : False in the middle of a training that never loaded, which must not wait; the mount's lease is
            then checked with the first copy.
        """
        self._tiers = [self._local, *([self._mount] if query_mount and self._mount is not None else [])]
        found = self._latest()
        renewed = found.get("session") == self.lease.session
        if found and not renewed and not found.get("released") and found.get("host") != machine_id():
            self._wait_until_stale(found)
        fence = max(
            [found.get("fence", 0), *map(fencing_token_of, self._query(lambda tier: tier.list_unverified(self.unit)))]
        )
        self.lease = replace(self.lease, fence=fence if renewed else fence + 1)
        self.held, self._beat = True, max(self._beat, _beat_of(found)) if renewed else self._beat
        self.renew()

    def renew(self, released: bool = False) -> None:
        """Write that this session lives, or that it has released the unit."""
        with self._write_lock:
            if not self.held:
                return
            self.held = not released
            self._beat += 1
            self._record = {**self.lease.to_dict(), "host": machine_id(), "beat": self._beat, "seen": self._now()}
            self._record |= {"kept": clock_is_synchronized(), "released": released}
            self._write(self._local, self._record)
        if self._mount is not None and not self._write_queued:
            self._write_queued = True
            self._later(self._write_mount)

    def _write_mount(self) -> None:
        """Write the latest record to the mount; while the mount hangs, records do not queue up."""
        self._write_queued = False
        if self._mount is not None:
            self._write(self._mount, self._record)

    def _write(self, tier: _LeaseTier, record: dict) -> None:
        with suppress(WorkspaceError):  # a session that misses this record finds the fence in the checkpoints
            if lease_fence_order(tier.read_lease(self.unit)) <= lease_fence_order(record):
                tier.renew(self.unit, record)

    def _latest(self) -> dict:
        leases = self._query(lambda tier: [tier.read_lease(self.unit)])
        return max(filter(None, leases), key=_record_order, default={})

    def _query(self, ask: Callable[[_LeaseTier], list[dict]]) -> list[dict]:
        answers = []
        for tier in self._tiers:
            with suppress(WorkspaceError):
                answers += ask(tier)
        return answers

    def _wait_until_stale(self, found: dict) -> None:
        """Return when the lease is stale. On the local disk the file lock already excludes a living local session."""
        age = self._now() - found["seen"]
        if age >= MAX_CLOCK_ERROR:
            return
        # A clock that is ahead of the local one never extends the wait beyond EXPIRY_SECONDS.
        remaining = EXPIRY_SECONDS - (max(age, 0.0) if _clocks_agree(found) else 0.0)
        if remaining > 0:
            _log.warning(
                "Another session, on %s, worked on %s %.0f s ago: waiting up to %.0f s to see whether it still runs",
                found.get("host"), self.unit.phase, age, remaining,
            )  # fmt: skip
        until = self._clock() + remaining
        while (remaining := until - self._clock()) > 0:
            self._sleep(min(POLL_SECONDS, remaining))
            later = self._latest()
            if not later or _record_order(later) <= _record_order(found):
                continue  # torn, or the mount does not answer just now: no new record
            if later.get("released"):
                return
            raise CheckpointError(
                f"Another session is working on run {self.unit.run}, phase {self.unit.phase}",
                where=f"on {later.get('host')}", got="a lease that is being renewed",
                next_step="wait for it or stop it, or open a new run with FRESH",
            )  # fmt: skip


def _clocks_agree(lease: dict) -> bool:
    """Return True when the lease's writer and this machine have the same time: both clocks are synchronized, or they
    are one.
    """
    local, remote = (str(host).rpartition(" ") for host in (machine_id(), lease.get("host")))
    return (lease.get("kept") is True and clock_is_synchronized()) or bool(local[0] and local[-1] == remote[-1])


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
