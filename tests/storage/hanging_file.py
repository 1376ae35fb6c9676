"""A file whose opening hangs, as on a mount that does not answer."""

import fcntl
import os
import signal
from pathlib import Path


def make_hanging_file(path: Path) -> None:
    """Make a file that no other process can open for 45 s: this one holds a lease on it (fcntl, F_SETLEASE).

    Removing the file ends that for its name. The descriptor stays open: closing it would end the lease.
    """
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel's request to give the lease back
    fcntl.fcntl(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), fcntl.F_SETLEASE, fcntl.F_WRLCK)
