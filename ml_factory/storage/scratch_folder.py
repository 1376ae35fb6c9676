"""Temporary folders that do not outlive their process: what a killed one left is removed when the next one is made.

Each folder is locked by the process that made it. The kernel's lock ends with the process, however it ends, so an
unlocked folder has no owner.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ml_factory.storage.private_folder import temporary_private_folder


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder in this user's private temporary folder; it is removed at the end.

    prefix : of its name, which names its use.
    """
    parent = temporary_private_folder("scratch")
    with ExitStack() as held:
        with ExitStack() as making:  # no other process removes the new folder before it is locked
            with suppress(OSError):  # a file system without locks, where no folder is ever found abandoned
                making.enter_context(_locked(parent, fcntl.LOCK_EX))
            _remove_abandoned(parent)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with suppress(OSError):
                held.enter_context(_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders that no process has locked."""
    for folder in list(parent.iterdir()):
        with suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):  # BlockingIOError: it is in use
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold the kernel's lock of a folder. Raises OSError where it cannot be had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
