"""File locks: one living process for each resource that must not have two writers.

A lock is the kernel's (flock). It ends with its process, so none is stale after SIGKILL, and it excludes every process
of this kernel, in whatever container: a lock that is held is held, whatever its file holds, and is never broken.

The file's text serves two purposes. Each line is one holder, "id process host": the last one names the holder in a
message, and all of them together prove an end: the process that now holds the lock knows that every earlier holder
has ended or released it. A lease that names such a holder needs no watching (`checkpoints.leases`). An id is random;
the proof counts for this very file alone (kernel, device and inode), since a copied disk has the same text.

On a file system without locks nothing is excluded and nothing is proven: `acquire_lock_file` returns None, and the
lease alone decides, after it was watched. No lock reaches another machine: flock on a mount is local, so the lock of a
path on a mount is a file on the local disk, which never hangs.
"""

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ml_factory.errors import CheckpointError
from ml_factory.process_identity import boot_id, process_id
from ml_factory.storage.files import disk_errors, files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.regular_files import open_regular_file, refuse_linked_folder

_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN})
_PATIENCE_SECONDS = 0.3  # another process may look at the lock, or a child of its last holder be about to start
_LARGEST_TEXT, _LARGEST_LINE, _KEPT_LINES = 1 << 14, 400, 32  # bytes, bytes, lines


@dataclass(frozen=True)
class HeldLock:
    """A lock file that this process holds.

    Parameters
    ----------
    holder : id of this process as the holder of this very file; "" where the file could not be written.
    ended : ids of its earlier holders, each of which has ended or released it.
    """

    holder: str
    ended: frozenset[str] = frozenset()

    def proves_end_of(self, holder: object) -> bool:
        """Return True when the process with this holder's id has ended or released the file, or is this one."""
        return bool(holder) and holder in {self.holder, *self.ended}


class _LockFile:
    """An open lock file. A forked child closes its copy at once, so that the lock ends with the process that took it.

    write : create the file if it does not exist.
    """

    open_files: set["_LockFile"] = set()  # noqa: RUF012 - of the process
    guard = threading.RLock()  # no fork between the opening of a file and its entry in `open_files`

    def __init__(self, path: Path, write: bool = True):
        refuse_linked_folder(path.parent)
        with self.guard:
            try:
                flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
                self.descriptor = open_regular_file(path, flags | os.O_NOFOLLOW)
            except PermissionError:  # of another user: it can be locked, and not signed
                self.descriptor = open_regular_file(path, os.O_RDONLY | os.O_NOFOLLOW)
            self.open_files.add(self)

    def try_lock(self, how: int = fcntl.LOCK_EX) -> bool | None:
        """Return True when locked, False when another process holds it, None when the file system has no locks."""
        try:
            fcntl.flock(self.descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            return False if error.errno in _BUSY else None
        return True

    def is_at(self, path: Path) -> bool:
        """Return True when this is the file at `path`, which may have been deleted and made again."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def lines(self) -> list[list[str]]:
        text = os.pread(self.descriptor, _LARGEST_TEXT, 0).decode(errors="replace")
        return [line.split() for line in text.splitlines() if line]

    def sign(self) -> HeldLock:
        """Add this process to the holders. A disk that refuses that costs the next process the proof, not the lock."""
        file = lock_file_identity(self.descriptor)
        ended = frozenset(f"{file} {words[0]}" for words in self.lines() if words)
        line = f"{process_id()} {os.getpid()} {socket.gethostname()}\n".encode()
        try:
            self._append(line)
        except OSError:
            return HeldLock("", ended)
        return HeldLock(f"{file} {process_id()}", ended)

    def _append(self, line: bytes) -> None:
        text = os.pread(self.descriptor, 2 * _LARGEST_TEXT, 0)
        if len(text) + len(line) > _LARGEST_TEXT:
            newest = [one for one in text.splitlines() if len(one) < _LARGEST_LINE][-_KEPT_LINES:]
            kept = b"\n".join([*newest, line])
            os.pwrite(self.descriptor, kept, 0)
            os.ftruncate(self.descriptor, len(kept))
        else:
            os.pwrite(self.descriptor, line if not text or text.endswith(b"\n") else b"\n" + line, len(text))

    def close(self) -> None:
        """Unlock and close, unless a fork already closed this copy."""
        with self.guard, suppress(OSError):
            if self in self.open_files:
                self.open_files.discard(self)
                with suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for copies that no fork hook of Python closed
                os.close(self.descriptor)


@dataclass
class _Acquired:
    """A lock file of this process and the number of its acquisitions."""

    file: _LockFile
    lock: HeldLock
    count: int = 1


_held: dict[Path, _Acquired] = {}


def acquire_lock_file(path: Path, what: str) -> HeldLock | None:
    """Own `path` (a lock file) for this process; nested calls are counted, and each needs its own `release_lock_file`.

    Parameters
    ----------
    path : the lock file, on a local disk.
    what : the resource, for the message.

    Returns None where the file system has no locks. Raises CheckpointError naming the other process when one holds it.
    """
    path = Path(os.path.abspath(path))
    with _LockFile.guard:
        if path in _held:
            _held[path].count += 1
            return _held[path].lock
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _lock(path, what)
            if file is None:
                return None
            try:
                _held[path] = _Acquired(file, file.sign())
            except BaseException:
                file.close()
                raise
        return _held[path].lock


def release_lock_file(path: Path) -> None:
    """Undo one `acquire_lock_file`; the last one frees the lock."""
    path = Path(os.path.abspath(path))
    with _LockFile.guard:
        if path in _held:
            _held[path].count -= 1
            if not _held[path].count:
                _held.pop(path).file.close()


def check_lock_file_free(path: Path, what: str) -> None:
    """Raise CheckpointError when another process holds the lock file; nothing is written, and no lock is kept."""
    path = Path(os.path.abspath(path))
    if path in _held or not path.is_file():
        return
    with disk_errors(path), suppress(FileNotFoundError):
        file = _lock(path, what, fcntl.LOCK_SH, write=False)
        if file is not None:
            file.close()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock inside a `with`, waiting for the current holder; without locks on a file system that has none."""
    path = local_lock_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LockFile(path)
    try:
        with suppress(OSError):
            fcntl.flock(file.descriptor, fcntl.LOCK_EX)
        yield
    finally:
        file.close()


def local_lock_path(path: Path) -> Path:
    """Return the file that `file_lock` locks: that of a path on a mount is on the local disk."""
    if not files.is_remote(path):
        return path
    return local_cache_folder("locks") / f"{fingerprint_json(os.path.abspath(path))[:16]}.lock"


def lock_file_identity(file: int | Path) -> str:
    """Return the name of one lock file among all machines and disks: kernel, device and inode; "" where there is none.

    Processes that see the same identity exclude each other by this lock.
    """
    try:
        facts = os.stat(file)
    except OSError:
        return ""
    return f"{boot_id()} {facts.st_dev:x}:{facts.st_ino:x}"


def _lock(path: Path, what: str, how: int = fcntl.LOCK_EX, write: bool = True) -> _LockFile | None:
    """Return the locked file that is at `path` now; None where the file system has no locks.

    Raises CheckpointError when another process holds it.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        file = _LockFile(path, write)
        try:
            locked = file.try_lock(how)
            if locked is None:
                return None
            if locked and file.is_at(path):
                kept, file = file, None
                return kept
            if time.monotonic() > until:
                raise CheckpointError(
                    f"Another process is working on {what}", where=path, got=_describe_holder(file.lines()),
                    next_step="wait for it or stop it, or open a new run with FRESH",
                )  # fmt: skip
        finally:
            if file is not None:
                file.close()
        time.sleep(0.02)


def _describe_holder(lines: list[list[str]]) -> str:
    """Return "process 12 on host" of a lock file's last line; its number counts in that process's container."""
    last = lines[-1] if lines else []
    return f"process {last[1]} on {last[2]}" if len(last) == 3 else "a lock that is held"


def _close_copies() -> None:
    """Close the lock files that a fork has copied; they stay locked by the parent."""
    for file in _LockFile.open_files:
        with suppress(OSError):
            os.close(file.descriptor)
    _LockFile.open_files.clear()
    _held.clear()
    _LockFile.guard.release()


os.register_at_fork(
    before=_LockFile.guard.acquire, after_in_parent=_LockFile.guard.release, after_in_child=_close_copies
)
