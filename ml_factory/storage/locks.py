"""File locks: one living process for each resource that must not have two writers.

A lock of the operating system (flock) ends with its process, so no lock is stale after SIGKILL. Where a file system has
no flock, the process id in the lock file decides, and also when a child of the dead owner still holds the lock. No lock
reaches another machine: flock on a mount is local, so the lock of a path on a mount is a file on the local disk, which
never hangs.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ml_factory.errors import CheckpointError
from ml_factory.process_identity import machine_id
from ml_factory.storage.files import disk_errors, files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json, parse_json

_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN})
# path -> (descriptor, owning process, number of nested acquisitions)
_held: dict[Path, tuple[int, int, int]] = {}


def acquire_lock_file(path: Path, what: str) -> None:
    """Own `path` (a lock file) for this process; nested calls are counted, and each needs its own `release`.

    Parameters
    ----------
    path : the lock file, on a local disk.
    what : the resource, for the message.

    Raises CheckpointError naming the other process when a living one owns the lock.
    """
    path = Path(os.path.abspath(path))
    descriptor, owner, count = _held.pop(path, (-1, 0, 0))
    if owner == os.getpid():
        _held[path] = (descriptor, owner, count + 1)
        return
    if descriptor >= 0:  # inherited through fork: close our copy, the parent keeps its lock
        os.close(descriptor)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _held[path] = (_acquire(path, what), os.getpid(), 1)


def release_lock_file(path: Path) -> None:
    """Undo one `acquire`; the last one frees the lock."""
    path = Path(os.path.abspath(path))
    descriptor, owner, count = _held.pop(path, (-1, 0, 0))
    if owner != os.getpid():
        return
    if count > 1:
        _held[path] = (descriptor, owner, count - 1)
        return
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock inside a `with`, waiting for the current holder; without locks on a file system that has none."""
    if files.is_remote(path):
        path = local_cache_folder("locks") / f"{fingerprint_json(os.path.abspath(path))[:16]}.lock"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    """Return a locked descriptor of the file that is at `path` now."""
    for _ in range(20):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = _try_lock(descriptor)
            other = _living_owner(descriptor)
            if locked is not True and other is not None:
                raise CheckpointError(
                    f"Another process is working on {what}",
                    where=path,
                    got=f"process {other}",
                    next_step="wait for it or stop it, or open a new run with FRESH",
                )
            if locked is False:  # held by a child of a dead owner: unlink the file and make a new one
                if _same_file(descriptor, path):
                    path.unlink(missing_ok=True)
            elif _same_file(descriptor, path):
                _sign(descriptor)
                held, descriptor = descriptor, -1
                return held
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(0.01)
    raise CheckpointError(f"The lock of {what} cannot be taken", where=path, next_step="run again")


def _try_lock(descriptor: int) -> bool | None:
    """Return True when locked, False when another process holds the lock, None when the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _living_owner(descriptor: int) -> int | None:
    """Return the id of the process that signed the lock file, if it lives on this machine and is not this one."""
    try:
        note = parse_json(os.pread(descriptor, 4096, 0) or b"{}")
        pid, host = note.get("pid"), note.get("host")
    except (ValueError, AttributeError):
        return None
    if type(pid) is not int or pid <= 0 or pid == os.getpid() or host != machine_id():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return pid
    return pid


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    note = json.dumps({"pid": os.getpid(), "host": machine_id(), "since": time.time()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note, 0)
