"""Opening of files whose content is stored: no pipe, device or folder, and no sparse file, which would never end."""

import errno
import os
import stat
from pathlib import Path

from ml_factory.errors import CheckpointError

_SPARSE_BYTES, _SPARSE_SHARE = 1 << 28, 100  # a file above this size is sparse where less than 1/share of it is stored
_BLOCK = 512  # bytes that one of st_blocks stands for, on every file system


class RefusedFileError(OSError):
    """A path that is never read: it is no regular file, or nearly nothing of it is stored."""


def open_regular_file(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of the regular file at `path`; a pipe without a writer does not make the caller wait.

    flags : as of os.open; with O_NOFOLLOW a symbolic link at `path` is refused.

    Raises RefusedFileError for another kind of file, and for a sparse one that is opened for reading; OSError as
    os.open does.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise RefusedFileError(errno.ELOOP, "it is a symbolic link") from error
        if not isinstance(error, BlockingIOError):
            raise
        # Another program holds a lease on it, which only a regular file has: wait for it.
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        facts = os.fstat(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            raise RefusedFileError(errno.EISDIR, "it is a folder")
        if not stat.S_ISREG(facts.st_mode):
            raise RefusedFileError(errno.EINVAL, "it is a pipe, a device or a socket, not a regular file")
        stored = facts.st_blocks * _BLOCK  # 0 on mounts that do not tell
        if flags & os.O_ACCMODE == os.O_RDONLY and facts.st_size > _SPARSE_BYTES and (
            0 < stored < facts.st_size // _SPARSE_SHARE and _has_hole(descriptor, facts.st_size)
        ):  # fmt: skip
            raise RefusedFileError(errno.EINVAL, f"it is sparse: {stored:,} of {facts.st_size:,} bytes are stored")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_linked_folder(folder: Path) -> None:
    """Raise CheckpointError where the folder itself is a symbolic link: locks and leases in it would lie elsewhere, and
    without them two processes own one run.
    """
    if folder.is_symlink():
        raise CheckpointError(
            "Locks and leases are not kept in a folder that is a symbolic link", where=folder,
            next_step="replace the link by a folder",
        )  # fmt: skip


def _has_hole(descriptor: int, size: int) -> bool:
    """Return True when the file system knows of a hole: ZFS counts the blocks of a new file seconds later."""
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:
        return True
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < size


def read_regular_file(path: str | os.PathLike, largest: int | None = None) -> bytes:
    """Read the file at `path`. Raises OSError as `open_regular_file` and `check_file_size` do."""
    with open(open_regular_file(path), "rb") as file:
        check_file_size(file.fileno(), largest)
        return file.read()


def check_file_size(descriptor: int, largest: int | None = None) -> None:
    """Raise RefusedFileError for a file of more than `largest` bytes, by default half of this machine's memory."""
    largest = half_of_memory() if largest is None else largest
    if (size := os.fstat(descriptor).st_size) > largest:
        raise RefusedFileError(errno.EOVERFLOW, f"it has {size:,} bytes, more than {largest:,}")


def half_of_memory() -> int:
    """Return half of this machine's memory, bytes: a file that is read whole is smaller."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def check_regular_file(path: Path) -> None:
    """Raise RefusedFileError where `open_regular_file` does; for a file that a library opens by its path."""
    os.close(open_regular_file(path))
