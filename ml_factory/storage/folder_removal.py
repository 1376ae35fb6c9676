"""Deletion of a folder with everything in it: never through a symbolic link, never into another file system.

The folder is renamed to `.removed-...` first, so that it is gone in one step for every reader. What a killed process
left under such a name is removed by the next `clean`.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

REMOVED = ".removed-"  # prefix of a folder's name while it is deleted


def folder_bytes(path: Path, alive: Callable[[], None]) -> int:
    """Return the bytes of all files below a folder, links counted as themselves; 0 where there is no folder.

    alive : called once a folder.
    """
    found = 0
    for _, _, names, descriptor in os.fwalk(path, follow_symlinks=False) if path.is_dir() else ():
        alive()
        for name in names:
            with suppress(FileNotFoundError):
                found += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
    return found


def remove_folder_tree(path: Path, empty_files: bool, alive: Callable[[], None]) -> None:
    """Delete a folder. A link in it is deleted itself, and its target stays.

    Parameters
    ----------
    path : the folder. Raises NotADirectoryError where it is a link, FileNotFoundError where nothing is there.
    empty_files : truncate each file before it is deleted: Google Drive keeps what is deleted in the Trash for 30 days,
        with its size. A file that has another hard link is only unlinked. Not on a local disk, where another process
        may have mapped the file into memory.
    alive : called after each file.

    Raises OSError (EXDEV) before anything is deleted where another file system is mounted below it.
    """
    top = os.lstat(path)
    if not stat.S_ISDIR(top.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no folder, or a link", str(path))
    for _, folders, _, descriptor in os.fwalk(path, follow_symlinks=False, onerror=_raise):
        for name in folders:
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_dev != top.st_dev:
                raise OSError(errno.EXDEV, f"another file system is mounted at {name}", str(path))
        alive()
    if not path.name.startswith(REMOVED):
        path = path.rename(path.with_name(f"{REMOVED}{secrets.token_hex(4)}-{path.name}"[:255]))
    for _, folders, names, descriptor in os.fwalk(path, topdown=False, follow_symlinks=False, onerror=_raise):
        for name in names:
            if empty_files:
                _truncate(name, descriptor)
            os.unlink(name, dir_fd=descriptor)
            alive()
        for name in folders:  # a link to a folder is listed among the folders, and not walked
            try:
                os.rmdir(name, dir_fd=descriptor)
            except NotADirectoryError:
                os.unlink(name, dir_fd=descriptor)
    os.rmdir(path)


def _truncate(name: str, descriptor: int) -> None:
    """Empty a regular file of one name; a link, a device or a file that refuses is left as it is."""
    with suppress(OSError):
        file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode) and os.fstat(file).st_nlink == 1:
                os.ftruncate(file, 0)
        finally:
            os.close(file)


def _raise(error: OSError) -> NoReturn:
    raise error
