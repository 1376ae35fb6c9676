"""Keep memory that a step frees in the process until the training ends.

A step allocates the same blocks as the one before. glibc returns blocks of more than 32 MB to the system each time, and
the top of its heap when much is free; the next step then needs new pages, and each costs more than writing it.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# mallopt(3): trim threshold, mmap threshold, largest number of mmapped blocks.
_TRIM, _LARGE, _MOST = -1, -3, -4
_KEEP = {_TRIM: 2**31 - 1, _MOST: 0}
# Thresholds that glibc adapts to after such blocks were freed, and its default number of mmapped blocks.
_USUAL = {_TRIM: 64 << 20, _LARGE: 32 << 20, _MOST: 65_536}

_lock, _inside = Lock(), 0


def _libc() -> ctypes.CDLL | None:
    """Return the C library; None where malloc is another's, or tuned by the environment."""
    chosen = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    return None if chosen or platform.libc_ver()[0] != "glibc" else ctypes.CDLL(None)


@contextmanager
def keep_freed_malloc_memory() -> Iterator[None]:
    """Keep freed memory for the next allocation; at the end of the outermost block all free memory is returned."""
    libc = _libc()
    _enter_or_leave(libc, 1)
    try:
        yield
    finally:
        _enter_or_leave(libc, -1)


def _enter_or_leave(libc: ctypes.CDLL | None, change: int) -> None:
    global _inside
    with _lock:
        before, _inside = _inside, _inside + change
        if libc is None or (before and _inside):
            return
        for name, value in (_KEEP if _inside else _USUAL).items():
            libc.mallopt(name, value)
        if not _inside:
            libc.malloc_trim(0)
