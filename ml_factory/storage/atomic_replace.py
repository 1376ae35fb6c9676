"""Atomic rename: a temporary file in the target's folder, flushed to the disk, replaces the target in one step."""

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

# Errors of file systems without fsync (some network mounts); the write itself succeeded.
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_LEFTOVER_SECONDS = 3600


def temporary_path(path: Path) -> Path:
    """Return the temporary path that `path` is written to before the rename."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


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
        _flush_folder(path.parent)


def sweep_temporary_files(path: Path) -> None:
    """Delete temporary files of `path` that a killed process left behind more than an hour ago."""
    with suppress(OSError):
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink(missing_ok=True)


def flush_to_disk(descriptor: int) -> None:
    """Call fsync, except on file systems that have none."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut; systems that cannot open folders do this themselves."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
