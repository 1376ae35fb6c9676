"""A new file takes its place in one step: written aside in the folder it will live in, flushed to the disk, renamed."""

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

# What a file system answers that has no fsync (some network mounts); the write itself went through.
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_LEFTOVER_SECONDS = 3600


def temp_path(path: Path) -> Path:
    """Where `path` is written before it takes its place."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def commit_rename(aside: Path, path: Path, flush: bool = True) -> None:
    """Rename a file that was written aside to its place; with `flush` it lasts through a power cut."""
    if flush:
        with open(aside, "r+b") as file:
            flush_to_disk(file.fileno())
    os.replace(aside, path)
    if flush:
        _flush_folder(path.parent)


def sweep_leftovers(path: Path) -> None:
    """Remove what a process killed in the middle of writing this very file left behind."""
    with suppress(OSError):
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink(missing_ok=True)


def flush_to_disk(descriptor: int) -> None:
    """fsync, except on file systems that have none."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _flush_folder(folder: Path) -> None:
    """Make a rename last through a power cut; a system that cannot open folders does it by itself."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
