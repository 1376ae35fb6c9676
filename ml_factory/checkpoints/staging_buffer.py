"""The copy of a state in memory: one buffer, reused by every save, which a child process can read.

It is an anonymous file in memory, mapped here and there: what the child writes to disk never passes a pipe. Its pages
stay, so every save is one copy at the speed of memory; those of the first are made beforehand, beside the training.
States on a CUDA device are copied into the same pages, pinned.
"""

import mmap
import os
import sys
import tempfile
import threading
from contextlib import suppress

import numpy as np

from ml_factory.storage.safetensors_layout import Layout

_AT_ONCE = 1 << 24  # bytes whose pages nobody waits for
_PAGE = 4096


class StagingBuffer:
    """The buffer of one CheckpointManager; one state at a time, which its caller sees to.

    file : descriptor of the memory, for a child process.  shared : whether the child can see what was copied last.
    """

    def __init__(self):
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        self._view, self._pinned, self.shared = memoryview(b""), False, True
        self._process = os.getpid()
        self._one_growth, self._grower, self._tried = threading.Lock(), None, _AT_ONCE

    def copy(self, layout: Layout) -> memoryview:
        """The state's bytes, copied as they are now; valid until the next copy. Raises NonFiniteError."""
        with self._one_growth:
            if len(self._view) < layout.size:
                self._grow(layout.size)
        if layout.on_device and not self._pinned:
            self._pin()
        view = self._view[: layout.size]
        layout.fill(view)
        return view

    def prepare(self, size: int) -> None:
        """Have pages for a state of so many bytes soon, without waiting for them; nothing to do for a small one."""
        if size > max(len(self._view), self._tried) and not self.preparing:
            self._tried = size
            self._grower = threading.Thread(target=self._make_pages, args=(size,), name="staging", daemon=True)
            self._grower.start()

    @property
    def preparing(self) -> bool:
        """Whether pages are being made now: a copy would wait for them."""
        return self._grower is not None and self._grower.is_alive()

    def _make_pages(self, size: int) -> None:
        with self._one_growth, suppress(MemoryError):  # then the save itself will tell
            if self.file >= 0 and len(self._view) < size:
                self._grow(size)
                np.frombuffer(self._view, np.uint8)[::_PAGE] = 0  # NumPy lets the other threads run meanwhile

    def close(self) -> None:
        if self._grower is not None and self._process == os.getpid():
            self._grower.join()
        self._unpin()
        self._view = memoryview(b"")
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    __del__ = close

    def _grow(self, size: int) -> None:
        self._unpin()
        size += size >> 4  # a state that grows a little, as a history does, keeps its pages
        self._view = memoryview(b"")
        try:
            os.ftruncate(self.file, size)
            self._view, self.shared = memoryview(mmap.mmap(self.file, size)), True
        except OSError:  # a limit on the size of files counts for this one, too
            self._view, self.shared = memoryview(bytearray(size)), False

    def _pin(self) -> None:
        """Tell CUDA that these pages stay, so that it copies into them without a detour."""
        address = np.frombuffer(self._view, np.uint8).ctypes.data
        self._pinned = not sys.modules["torch"].cuda.cudart().cudaHostRegister(address, len(self._view), 0).value

    def _unpin(self) -> None:
        if self._pinned:
            address = np.frombuffer(self._view, np.uint8).ctypes.data
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(address)
            self._pinned = False
