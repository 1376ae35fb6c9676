"""Atomic rename: a temporary file in the target's folder, flushed to the disk, replaces the target in one step.

A temporary file of another writer is removed on evidence only: its name states the process that writes it, and that
process of this machine has ended; or, of a process that cannot be seen from here, it is an hour older than a file that
is made there now. A wall clock that is ahead removes nothing.
"""

import errno
import hashlib
import os
import re
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ml_factory.process_identity import boot_id, process_id

# Errors of file systems without fsync (some network mounts); the write itself succeeded.
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_LEFTOVER_SECONDS = 3600
# End of a temporary name: processes seen from here, process id, its start, thread.
_WRITER = re.compile(r"\.([0-9a-f]{8})-(\d+)-(\d*)-\d+\.tmp$")


def temporary_path(path: Path) -> Path:
    """Return the temporary path that `path` is written to before the rename."""
    pid = os.getpid()
    return path.with_name(f".{path.name}.{_process_scope()}-{pid}-{_start_time(pid)}-{threading.get_ident()}.tmp")


def open_temporary_file(temporary: Path) -> int:
    """Make the file at a temporary path and return its descriptor; what is there, such as a link, is removed, and never
    opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(temporary, flags, 0o666)
    except FileExistsError:
        temporary.unlink()
        return os.open(temporary, flags, 0o666)


def commit_atomic_replace(temporary: Path, path: Path, flush: bool = True) -> None:
    """Rename a finished temporary file to `path`; with `flush` the rename survives a power cut."""
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # a link fails here
    try:
        if flush:
            flush_to_disk(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    if flush:
        with suppress(OSError):  # the file itself is replaced and flushed
            flush_folder(path.parent)


def sweep_temporary_files(path: Path) -> None:
    """Delete temporary files of `path` that killed processes left behind."""
    with suppress(OSError):
        leftovers = [(file, _writer_lives(file.name)) for file in path.parent.glob(f".{path.name}.*.tmp")]
        unseen = [file for file, lives in leftovers if lives is None]
        oldest = _file_system_time(path) - _LEFTOVER_SECONDS if unseen else 0.0
        for file, lives in leftovers:
            if lives is False or (lives is None and file.stat().st_mtime < oldest):
                file.unlink(missing_ok=True)


def _file_system_time(path: Path) -> float:
    """Return the time that the file system gives a file written now, in the folder of `path`."""
    probe = temporary_path(path)
    try:
        os.close(open_temporary_file(probe))
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _writer_lives(name: str) -> bool | None:
    """Return whether the process that made this temporary file lives; None when it cannot be seen from here."""
    found = _WRITER.search(name)
    if found is None or found[1] != _process_scope():
        return None
    try:
        os.kill(int(found[2]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return _start_time(int(found[2])) in (found[3], "")  # another start: the id was given to another process


@lru_cache(maxsize=1)
def _process_scope() -> str:
    """Return a name for the set of processes that this one can see: kernel and namespace of process ids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{boot_id() or process_id()} {namespace}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> str:
    """Return when the process started, in ticks since the boot; "" where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def flush_to_disk(descriptor: int) -> None:
    """Call fsync, except on file systems that have none."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def flush_folder(folder: Path) -> None:
    """Make new names in the folder survive a power cut; systems that cannot open folders do this themselves."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)
