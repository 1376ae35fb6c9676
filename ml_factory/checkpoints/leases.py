"""Who works on a unit of work, told to sessions on other machines, and a number that grows with each takeover.

    checkpoints/leases/{unit}.json     {"session", "fence", "host", "beat", "seen", "kept", "released"}

A lock of the operating system ends at the machine. So a living session renews its lease every minute; another one that
finds a lease watches it for a while, is refused when it is renewed, and takes over when it is not. A mount may show
leases late or never: then both may live for a time. Every checkpoint carries its session's fence; who finds a higher
one beside its own writes no more (Gray and Cheriton 1989; the fencing tokens of Kleppmann 2016).

How long a lease has been silent is told by two clocks only where both are known to be right: kept by NTP, as either
kernel says of its own, or one and the same. A lease of three minutes ago is then stale at once, which is the usual
resume. Otherwise it has to stay as it is for three minutes of our own monotonic clock, whatever its time says. The
mount itself has no time to share: what Drive shows as a file's time comes from the machine that wrote it.
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

from ml_factory.checkpoints.file_format import read_small, write_small
from ml_factory.checkpoints.slot_pool import Unit, WriterId
from ml_factory.errors import CheckpointError, FactoryError, WorkspaceError
from ml_factory.storage.atomic_files import Disk, disk_errors, fingerprint
from ml_factory.storage.locks import machine_id

RENEW_SECONDS, EXPIRY_SECONDS, POLL_SECONDS = 60.0, 180.0, 5.0
MAX_CLOCK_ERROR = 86400.0  # seconds no clock is wrong by: certificates would have stopped all else before
_TIMEX = struct.Struct("i4xqqqqi")  # modes, offset, freq, maxerror, esterror, status: the beginning of struct timex
_UNSYNCHRONISED = 0x40
_log = logging.getLogger("ml_factory")
_ids: dict[int, str] = {}


def session_id() -> str:
    """The name of this process among all that share the workspace; a child made by fork has its own."""
    if os.getpid() not in _ids:
        _ids[os.getpid()] = secrets.token_hex(8)
    return _ids[os.getpid()]


class TakenOverError(CheckpointError):
    """A later session works on this unit: this one must write no more."""


def read_lease(disk: Disk, folder: Path, unit: Unit) -> dict:
    """What the unit's lease says; {} where there is none that can be read."""
    with suppress(WorkspaceError, ValueError, RecursionError):
        told = json.loads(read_small(disk, _path(folder, unit)))
        if isinstance(told, dict) and type(told.get("fence")) is int and isinstance(told.get("seen"), int | float):
            return told
    return {}


def write_lease(disk: Disk, folder: Path, unit: Unit, told: dict) -> None:
    """Write it over; a torn one counts as none, since fences stand in the checkpoints too."""
    path = _path(folder, unit)
    with disk_errors(path):
        disk.make_folder(path.parent)
    write_small(disk, path, json.dumps({"run": unit.run, "phase": unit.phase, **told}).encode())


def check_fence(unit: Unit, writer: tuple[int, str], told: Iterable[dict], lease: dict) -> None:
    """Raise TakenOverError when a checkpoint or the lease of this unit ranks above the writer (`rank_of`)."""
    highest = max([writer_rank(one.get("lease")) for one in told] + [writer_rank(lease)])
    if highest > writer:
        raise TakenOverError(
            "A later session has taken this work over; this one writes no more",
            where=f"run {unit.run}, phase {unit.phase}", got=f"fence {writer[0]}", wanted=f"{highest[0]}",
            next_step="stop this session, or open a run of its own with FRESH",
        )  # fmt: skip


def fence_of(info: dict) -> int:
    """The fence that a checkpoint's description carries; 0 where it carries none."""
    return writer_rank(info.get("lease"))[0]


def writer_rank(lease: object) -> tuple[int, str]:
    """(fence, session) of a lease. Two sessions that began before either saw the other have one fence: the name
    decides which of them writes on. (0, "") where nobody holds anything."""
    fence = lease.get("fence") if isinstance(lease, dict) else 0
    return (fence, str(lease.get("session") or "")) if type(fence) is int and fence > 0 else (0, "")


def clock_is_synchronized() -> bool:
    """Whether somebody keeps this machine's clock right (NTP or its host), as the kernel tells; False where it does
    not."""
    told = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None).adjtimex(told)
    except (OSError, AttributeError):
        return False
    return 0 <= state < 5 and not _TIMEX.unpack_from(told)[-1] & _UNSYNCHRONISED


class LeaseHolder:
    """This session's hold on one unit of work.

    here, mount : whoever answers `lease_of`, `renew` and `told` for the unit: the pool on this disk, and one on a mount
    or None; one that does not answer is passed over.  later : does a job on the mount without anybody waiting.
    now, clock, sleep : seconds since 1970, seconds that never go back, and a wait; for tests.
    """

    def __init__(
        self, unit: Unit, session: str, local, mount=None, later: Callable | None = None, *,
        now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        self.unit, self.lease, self._local, self._mount, self._later = unit, WriterId(session), local, mount, later
        self._now, self._clock, self._sleep = now, clock, sleep
        self.held, self._tiers, self._beat = False, [], 0
        self._write_lock = threading.Lock()  # the heartbeat's word never comes after that of who lets go
        self._write_queued = False

    def acquire(self, query_mount: bool = True) -> None:
        """Hold the unit from here on. Raises CheckpointError when a session on another machine does.

        ask_mount : False for who must not wait, in the middle of a training that never loaded: the mount's word then
        comes with the first copy.
        """
        self._tiers = [self._local, *([self._mount] if query_mount and self._mount is not None else [])]
        found = self._latest()
        mine = found.get("session") == self.lease.session
        if found and not mine and not found.get("released") and found.get("host") != machine_id():
            self._wait_until_stale(found)
        fence = max([found.get("fence", 0), *(fence_of(one) for one in self._query("list_unverified"))])
        self.lease = replace(self.lease, fence=fence if mine else fence + 1)
        self.held, self._beat = True, max(self._beat, _beat(found)) if mine else self._beat
        self.renew()

    def renew(self, released: bool = False) -> None:
        """Tell the others that this session lives, or that it has let go."""
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
        """The last word, when the mount's turn comes: while it hangs, they do not pile up before it."""
        self._write_queued = False
        self._write(self._mount, self._record)

    def _write(self, tier, told: dict) -> None:
        with suppress(WorkspaceError):  # who cannot be told finds the fence in the checkpoints
            if writer_rank(tier.read_lease(self.unit)) <= writer_rank(told):
                tier.renew(self.unit, told)

    def _latest(self) -> dict:
        return max(self._query("read_lease"), key=_record_age, default={})

    def _query(self, method: str) -> list[dict]:
        answers = []
        for tier in self._tiers:
            with suppress(WorkspaceError):
                answer = getattr(tier, method)(self.unit)
                answers += answer if isinstance(answer, list) else [answer] if answer else []
        return answers

    def _wait_until_stale(self, found: dict) -> None:
        """Return when the lease is stale. On this machine's disk the lock has told already that nobody lives here."""
        age = self._now() - found["seen"]
        if age >= MAX_CLOCK_ERROR:
            return
        # A clock that is ahead of ours makes nobody wait for longer than the silence itself.
        left = EXPIRY_SECONDS - (max(age, 0.0) if _clocks_agree(found) else 0.0)
        if left > 0:
            _log.warning(
                "Another session, on %s, was seen at %s %.0f s ago: waiting up to %.0f s to see whether it lives",
                found.get("host"), self.unit.phase, age, left,
            )  # fmt: skip
        until = self._clock() + left
        while (left := until - self._clock()) > 0:
            self._sleep(min(POLL_SECONDS, left))
            later = self._latest()
            if not later or _record_age(later) <= _record_age(found):
                continue  # torn, or a mount that does not answer just now: nobody said anything new
            if later.get("released"):
                return
            raise CheckpointError(
                f"Another session is working on run {self.unit.run}, phase {self.unit.phase}",
                where=f"on {later.get('host')}", got="a lease that is being renewed",
                next_step="wait for it or stop it, or open a new run beside it with FRESH",
            )  # fmt: skip


def _clocks_agree(found: dict) -> bool:
    """Whether who wrote this lease and this machine have the same time: both clocks are kept, or they are one."""
    local, there = (str(host).rpartition(" ") for host in (machine_id(), found.get("host")))
    return (found.get("kept") is True and clock_is_synchronized()) or bool(local[0] and local[-1] == there[-1])


def _beat(told: dict) -> int:
    return told["beat"] if type(told.get("beat")) is int else 0


def _record_age(told: dict) -> tuple[int, int, float]:
    """What a session says later is greater, also after its clock was put back."""
    return told["fence"], _beat(told), told["seen"]


class Heartbeat:
    """One daemon thread that renews what this process holds."""

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


def _path(folder: Path, unit: Unit) -> Path:
    return folder / "leases" / f"{fingerprint([unit.run, unit.phase])[:16]}.json"
