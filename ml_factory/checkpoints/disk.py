"""File operations of checkpoint slots, one method each, so that a test can make each of them fail."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from ml_factory.storage.atomic_replace import flush_folder, flush_to_disk
from ml_factory.storage.files import files
from ml_factory.storage.regular_files import open_regular_file

# File systems that sync no folder: some network and FUSE mounts.
_NO_FOLDER_SYNC = frozenset({errno.EBADF, errno.EPERM, errno.EACCES})


class Disk:
    """Every file operation that saving, rotating and loading checkpoints uses, one method each.

    Tests replace this class to make a disk fail: `StorageTiers(disk=...)` takes a subclass that refuses, hangs, tears
    or drops operations (tests/faults), and does all work in this process. No method deletes or renames. Paths are
    pathlib's, offsets are bytes; each method raises OSError as the operating system does.
    """

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, folder: Path, parents: bool = False) -> None:
        """Make the names of new files in the folder survive a power cut.

        parents : the folder may be new: its own name, and those of the folders above it, too.
        """
        try:
            flush_folder(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        for one in folder.parents if parents else ():
            with suppress(OSError):  # a file system that this user does not own
                flush_folder(one)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the folder's entries, sorted; none when the folder does not exist."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def free(self, folder: Path) -> int:
        """Return the free bytes of the disk that holds this folder."""
        return files.free_bytes(folder)

    def open(self, path: Path, write: bool = False) -> int:
        """Open a regular file, never through a symbolic link; with `write` it is created if it does not exist, and
        never truncated.
        """
        return open_regular_file(path, os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY))

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer from `offset` on; return the number of bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, [buffer], offset)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write the data at `offset`; return the number of bytes written."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        flush_to_disk(descriptor)

    def drop_cached_pages(self, descriptor: int) -> None:
        """Drop the file's pages from the page cache, so that the next read reads the disk itself."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)
