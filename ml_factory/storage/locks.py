"""File locks: one living process for each resource that must not have two writers.

A lock is the kernel's (flock). It ends with its process, so none is stale after SIGKILL, and it excludes every process
of this kernel, in whatever container. The holder of a lock file knows that every earlier holder of that very file
(kernel, device, inode) has ended or released it: a lease that names the same file needs no watching
(`checkpoints.lease`). On a file system without locks nothing is excluded, and nothing proven: the lease alone decides.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ml_factory.errors import CheckpointError
from ml_factory.process_identity import boot_id
from ml_factory.storage.files import disk_errors

_PATIENCE_SECONDS = 0.3  # another process may look at the lock, or a child of its last holder be about to start
_guard = threading.RLock()  # no fork between the opening of a file and its entry in `_held`
_held: dict[Path, list[int]] = {}  # lock file -> [its descriptor, number of its acquisitions]


def acquire_lock_file(path: Path, what: str) -> str:
    """Own `path` (a lock file) for this process; nested calls are counted, and each needs its own `release_lock_file`.

    what : the resource, for the message.

    Returns the identity of the file among all machines and disks, "" where the file system has no locks. Raises
    CheckpointError naming the other process when one holds it, FileError where the disk refuses the file.
    """
    with _guard, disk_errors(path):
        if path not in _held:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = _lock(path)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"Another process is working on {what}", where=path,
                    got=path.read_text(errors="replace")[:400] or None,
                    next_step="wait for it or stop it, or open a new run with FRESH",
                ) from error  # fmt: skip
            if descriptor is None:
                return ""
            with suppress(OSError):  # the text only names the holder in messages
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            _held[path] = [descriptor, 0]
        _held[path][1] += 1
        facts = os.fstat(_held[path][0])
        return f"{boot_id()} {facts.st_dev:x}:{facts.st_ino:x}"


def release_lock_file(path: Path) -> None:
    """Undo one `acquire_lock_file`; the last one frees the lock."""
    with _guard:
        if path in _held:
            _held[path][1] -= 1
            if not _held[path][1]:
                _unlock(_held.pop(path)[0])


def is_lock_file_held(path: Path) -> bool:
    """Return True where this or another process holds the lock file; nothing is written, and no lock is kept."""
    if path not in _held and path.is_file():
        try:
            descriptor = _lock(path, os.O_RDONLY, fcntl.LOCK_SH)
        except BlockingIOError:
            return True
        if descriptor is not None:
            _unlock(descriptor)
    return path in _held


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock inside a `with`, waiting for the current holder; none on a file system without locks."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(path)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(descriptor)


def _open(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _lock(path: Path, flags: int = os.O_RDWR | os.O_CREAT, how: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor of the locked file; None where the file system has no locks. Raises BlockingIOError when
    another process holds it.
    """
    descriptor, until = _open(path, flags), time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise
            time.sleep(0.02)
        except OSError:
            os.close(descriptor)
            return None


def _unlock(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for copies that no fork hook of Python closed
    os.close(descriptor)


def _close_copies() -> None:
    """Close the lock files that a fork has copied; they stay locked by the parent."""
    while _held:
        os.close(_held.popitem()[1][0])
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_copies)
