"""The copy of a state in memory: one buffer, reused by every save, which a child process can read.

It is an anonymous file in memory, mapped here and there: what the child writes to disk never passes a pipe. Its pages
stay, so every save but the first is one copy at the speed of memory. States on a CUDA device are copied into the same
pages, pinned.
"""

import mmap
import os
import sys
import tempfile

import numpy as np

from ml_factory.runs.layout import Layout


class Staging:
    """The buffer of one CheckpointManager; one state at a time.

    file : descriptor of the memory, for a child process.  shared : whether the child can see what was copied last.
    """

    def __init__(self):
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        self._view, self._pinned, self.shared = memoryview(b""), False, True

    def copy(self, layout: Layout) -> memoryview:
        """The state's bytes, copied as they are now; valid until the next copy. Raises NonFiniteError."""
        if len(self._view) < layout.size:
            self._grow(layout.size)
        if layout.on_device and not self._pinned:
            self._pin()
        view = self._view[: layout.size]
        layout.fill(view)
        return view

    def close(self) -> None:
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
