"""Staging buffer: the in-memory copy of a state, reused by every save, which a child process can read.

The buffer is an anonymous file in memory, mapped by both processes: states never pass a pipe. Its pages stay, so
every save is one copy at the speed of memory; the pages of the first save are allocated beforehand, in the background.
States on a CUDA device are copied into the same pages, pinned.
"""

import mmap
import os
import sys
import tempfile
import threading
from contextlib import suppress

import numpy as np

from ml_factory.process_identity import process_id
from ml_factory.storage.safetensors_layout import SafetensorsLayout

_INLINE_BYTES = 1 << 24  # bytes; pages for less are allocated by the copy itself
_PAGE = 4096


class StagingBuffer:
    """The buffer of one CheckpointManager; one state at a time, which its caller ensures.

    Attributes
    ----------
    file : descriptor of the memory, for a child process.
    shared : True when a child can see the last copy.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        self._view, self._pinned, self.shared = memoryview(b""), False, True
        self._process = process_id()
        self._grow_lock, self._requested_bytes = threading.Lock(), _INLINE_BYTES
        self._allocator: threading.Thread | None = None

    def copy(self, layout: SafetensorsLayout) -> memoryview:
        """Copy the state's present bytes; the view is valid until the next copy. Raises NonFiniteError."""
        with self._grow_lock:
            if len(self._view) < layout.size:
                self._grow(layout.size)
        if layout.is_on_device and not self._pinned:
            self._pin()
        view = self._view[: layout.size]
        layout.fill(view)
        return view

    def prepare(self, size: int) -> None:
        """Allocate pages for a state of `size` bytes in the background; no effect for a small one."""
        if size > max(len(self._view), self._requested_bytes) and not self.is_allocating:
            self._requested_bytes = size
            self._allocator = threading.Thread(target=self._allocate_pages, args=(size,), name="staging", daemon=True)
            self._allocator.start()

    @property
    def is_allocating(self) -> bool:
        """True while pages are being allocated: a copy would wait for them."""
        return self._allocator is not None and self._allocator.is_alive()

    def _allocate_pages(self, size: int) -> None:
        with self._grow_lock, suppress(MemoryError):  # then the save itself raises
            if self.file >= 0 and len(self._view) < size:
                self._grow(size)
                np.frombuffer(self._view, np.uint8)[::_PAGE] = 0  # NumPy lets the other threads run meanwhile

    def close(self) -> None:
        if self._allocator is not None and self._process == process_id():
            self._allocator.join()
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
        except OSError:  # a limit on file sizes applies to anonymous files, too
            self._view, self.shared = memoryview(bytearray(size)), False

    def _pin(self) -> None:
        """Register the pages with CUDA, so that device copies are direct."""
        address = np.frombuffer(self._view, np.uint8).ctypes.data
        self._pinned = not sys.modules["torch"].cuda.cudart().cudaHostRegister(address, len(self._view), 0).value

    def _unpin(self) -> None:
        if self._pinned:
            address = np.frombuffer(self._view, np.uint8).ctypes.data
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(address)
            self._pinned = False
