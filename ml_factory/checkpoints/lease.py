"""Lease with a fence: two machines never own one phase of a run.

    checkpoints/leases/{run and phase}.json     {"session", "fence", "beat", "lock", "host", "seen", "released"}

Within one machine the kernel's lock decides (`storage.locks`). A living session renews its lease each minute. Another
one takes over at once what was released, what is older than a quarter of an hour by the wall clock, and what belonged
to a process that held the very lock file (kernel, device, inode) that it holds now, which proves the end of that
process: the usual resume on one machine. Anything else is watched for three minutes of the monotonic clock: renewed
means refused.

A mount may show a lease late or never; then two sessions may live for a time. Each takeover raises the fence, every
checkpoint carries it, and a session that sees a higher one, or the same one of a session with a higher id, stops
writing (Gray and Cheriton 1989).
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import CheckpointError, FileError, WorkspaceError
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.locks import acquire_lock_file, release_lock_file
from ml_factory.storage.mirror import Mirror

RENEW_SECONDS, WATCH_SECONDS, POLL_SECONDS, STALE_SECONDS = 60.0, 180.0, 5.0, 900.0
_UNREADABLE: dict = {"session": "", "fence": 0, "beat": 0, "seen": 0.0, "lock": "", "host": "", "released": False}
_log = logging.getLogger("ml_factory")


class LeaseTakenOverError(CheckpointError):
    """A later session works on this phase: the present session must not write any more."""


class PhaseLease:
    """Lease of this session on one phase, and on this machine its lock file.

    Parameters
    ----------
    path, lock_file : of the lease and of the lock.
    what : run and phase, for messages.
    session : random id of this process.
    mirror : of the folder of leases, which other machines share; None: the local disk's.

    Attributes: `held`; `fence`; `taken_over`, the error where another session has taken the phase over.
    """

    def __init__(self, path: Path, lock_file: Path, what: str, session: str, mirror: Mirror | None = None):
        self.path, self.lock_file, self.what, self.session, self._mirror = path, lock_file, what, session, mirror
        self.fence, self.held, self._beat = 0, False, 0
        self._lock = ""  # identity of the lock file while it is held
        self.taken_over: LeaseTakenOverError | None = None
        self._guard = threading.RLock()  # the heartbeat never writes after the release

    def to_dict(self) -> dict:
        """Return what a checkpoint carries of it."""
        return {"session": self.session, "fence": self.fence}

    def acquire(self, saved_fence: Callable[[], int]) -> None:
        """Take lock and lease, unless they are held. Raises CheckpointError while another process holds the lock or
        another session renews the lease; nothing was written then, and nothing is kept.

        saved_fence : returns the highest fence among the phase's checkpoints.
        """
        if self.held:
            return
        try:
            self._lock = self._lock or acquire_lock_file(self.lock_file, self.what)
        except FileError as error:  # a disk that refuses the lock file must not stop the work
            _log.warning("Checkpoints of %s: the run continues. %s", self.what, error)
        try:
            record = self._wait_for_end()
            fence = max(record.get("fence", 0), saved_fence())
        except BaseException:
            self._unlock()
            raise
        renewed = (record.get("session"), record.get("fence")) == (self.session, fence)
        self.fence, self.held = fence if renewed else fence + 1, True
        self._write(released=False)

    def renew(self, released: bool = False) -> None:
        """Write that this session lives, or that it has released the phase. Raises LeaseTakenOverError."""
        with self._guard:
            if self.held:
                self.check()
                self._write(released)
                self.held = not released

    def release(self) -> None:
        """Release lease and lock; a lease that was taken over is the other session's."""
        with suppress(LeaseTakenOverError):
            self.renew(released=True)
        self.held = False
        self._unlock()

    def check(self) -> None:
        """Raise LeaseTakenOverError where another session has taken the phase over."""
        self.compare(self._read())

    def compare(self, other: dict) -> None:
        """Raise LeaseTakenOverError where `other`, a lease or the part of one in a checkpoint, is a later session's."""
        if (other.get("fence", 0), other.get("session", "")) > (self.fence, self.session):
            self.taken_over = LeaseTakenOverError(
                "A later session has taken this work over; this session stops writing", where=self.what,
                got=f"fence {self.fence}", wanted=other["fence"],
                next_step="stop this session, or open a run of its own with FRESH",
            )  # fmt: skip
            raise self.taken_over

    def _unlock(self) -> None:
        if self._lock:
            self._lock = ""
            release_lock_file(self.lock_file)

    def _has_ended(self, record: dict) -> bool:
        if not record or record["released"] or record["session"] == self.session:
            return True
        if record is _UNREADABLE:  # on this machine's disk the lock decides
            return bool(self._lock) and not self._mirror
        return self._lock == record["lock"] != "" or time.time() - record["seen"] > STALE_SECONDS

    def _wait_for_end(self) -> dict:
        """Return the newest record when its session has ended. Raises CheckpointError when it is renewed."""
        first = record = self._read()
        until = time.monotonic() + WATCH_SECONDS
        if not self._has_ended(first):
            _log.warning(
                "Another session, on %s, worked on %s: waiting up to %.0f s to see whether it still runs",
                first["host"] or "another machine", self.what, WATCH_SECONDS,
            )  # fmt: skip
        while not self._has_ended(record) and (remaining := until - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, remaining))
            latest = self._read()
            record = latest if latest and latest is not _UNREADABLE else first
            renewed = any(record[name] != first[name] for name in ("session", "fence", "beat"))
            if renewed and not self._has_ended(record):
                raise CheckpointError(
                    f"Another session is working on {self.what}", where=f"on {record['host']}",
                    got="a lease that is being renewed",
                    next_step="wait for it or stop it, or open a new run with FRESH",
                )  # fmt: skip
        return record

    def _read(self) -> dict:
        """Return the record; {} where there is none, _UNREADABLE for a torn one. Where the remote does not answer, the
        leases of this machine count: opening the workspace has logged that.
        """
        if self._mirror is not None:
            with suppress(WorkspaceError):
                self._mirror.pull()
        if not files.is_file(self.path):
            return {}
        try:
            record = {**_UNREADABLE, **parse_json(files.read(self.path, 1 << 16))}
            typed = all(type(record[name]) is type(value) for name, value in _UNREADABLE.items())
        except (FileError, ValueError, TypeError):
            return _UNREADABLE
        return record if typed else _UNREADABLE

    def _write(self, released: bool) -> None:
        self._beat += 1
        record = {
            **self.to_dict(), "beat": self._beat, "lock": self._lock, "host": socket.gethostname(), "seen": time.time(),
            "released": released,
        }  # fmt: skip
        try:
            files.write(self.path, json.dumps(record).encode())
        except FileError as error:  # a full disk: the fences of the checkpoints decide
            _log.warning("The lease of %s is not written: %s", self.what, error)
        if self._mirror is not None:
            self._mirror.push_in_background()
