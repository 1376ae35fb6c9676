"""Google Drive's behaviour without a file system: a cache, and a cloud that lags behind.

Writes go to the cache and are queued; the cloud receives versions late, in any order, some while they are being
written. A machine that dies leaves what the cloud had received by then, and nothing else. Deleted files and files
overwritten by a rename go to the Trash, which counts against the quota; truncation frees its bytes. Rules (rules.py)
define further faults.

The same model stands behind a mount (daemon.py) and behind the `Disk` interface of the checkpoints (disk.py).
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from ml_factory.seeding import seeded_generator
from tests.faults.cloud import Cloud
from tests.faults.rules import Faults

_COPY_CHUNK = 1 << 16
_PLENTY = 15 * 10**9


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    changed: float = 0.0
    writers: int = 0  # open handles that have written since they were opened


@dataclass
class Handle:
    path: str
    file: File
    wrote: bool = False


class Drive:
    """One machine's view of the cloud.

    cloud : the files that have arrived; a second Drive over the same cloud is a fresh machine.
    seed : draws which versions are uploaded when.
    uploads : chance that a call is followed by an upload.
    quota : bytes for files and Trash together, None for plenty.
    honest : `free` respects the quota.
    """

    def __init__(
        self, cloud: Cloud, seed: int = 0, uploads: float = 0.0, quota: int | None = None, honest: bool = True
    ):
        self.cloud, self.uploads, self.quota, self.honest = cloud, uploads, quota, honest
        self.luck: np.random.Generator = seeded_generator("drive", seed)
        self.files = {path: File(bytearray(data)) for path, data in cloud.files.items()}
        self.folders = {"/", *(str(parent) for path in self.files for parent in PurePosixPath(path).parents)}
        self.handles: dict[int, Handle] = {}
        self.faults = Faults()
        self.trash = self.peak = self._versions = 0
        self.calls: list[str] = []  # every call in order, as "op path"
        self._queue: list[tuple[int, str, bytes | None]] = []  # version, path, content (None: deleted)
        self._arrived: dict[str, int] = {}
        self._numbers = iter(range(1, 1 << 60))
        self.lock = threading.RLock()

    def enter(self, op: str, path: str, size: int = 0) -> set[str]:
        """Pass every call through the rules: it may hang, be slow, fail or be the last; other faults are returned to
        it.
        """
        with self.lock:
            self.calls.append(f"{op} {path}")
            if self.uploads and self.luck.random() < self.uploads:
                self.upload_one()
        return self.faults.strike(op, path, size)

    # ---- the cloud

    def upload_one(self) -> bool:
        """One version arrives, or a file as it is in the middle of being written; False when nothing waits."""
        with self.lock:
            open_now = sorted(path for path, file in self.files.items() if file.writers)
            choice = int(self.luck.integers(len(self._queue) + len(open_now))) if self._queue or open_now else -1
            if choice < 0:
                return False
            if choice < len(self._queue):
                self._arrive(*self._queue.pop(choice))
            else:
                path = open_now[choice - len(self._queue)]
                self._arrive(self._version(), path, bytes(self.files[path].data))
            return True

    def upload_all(self) -> None:
        """Everything that is closed arrives, in any order."""
        with self.lock:
            while self._queue:
                self._arrive(*self._queue.pop(int(self.luck.integers(len(self._queue)))))

    def _arrive(self, version: int, path: str, data: bytes | None) -> None:
        faults = self.faults.strike("upload", path)
        if "drop" in faults or version <= self._arrived.get(path, 0):
            return
        self._arrived[path] = version
        if "torn" in faults and data:
            data = data[: len(data) // 2]
        self.cloud.put(path, data, duplicate="duplicate" in faults)

    def _version(self) -> int:
        self._versions += 1
        return self._versions

    def _changed(self, path: str) -> None:
        """The file, or that it is gone, waits to be uploaded."""
        file = self.files.get(path)
        self._queue.append((self._version(), path, None if file is None else bytes(file.data)))

    # ---- room

    def used(self) -> int:
        return sum(len(file.data) for file in self.files.values()) + self.trash

    def free(self, path: str = "/") -> int:
        self.enter("free", path)
        if self.quota is None or not self.honest:
            return _PLENTY
        return max(0, self.quota - self.used())

    def _resize(self, file: File, size: int) -> None:
        grown = size - len(file.data)
        if grown > 0 and self.quota is not None and self.used() + grown > self.quota:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        if grown > 0:
            file.data.extend(bytes(grown))
        else:
            del file.data[size:]
        self.peak = max(self.peak, self.used())

    # ---- names

    def stat(self, path: str) -> tuple[bool, int, float]:
        """(whether it is a folder, bytes, time of the last change)."""
        faults = self.enter("stat", path)
        with self.lock:
            observed = float(self.luck.integers(2**31)) if "scramble" in faults else None
            if path in self.folders:
                return True, 0, observed or 0.0
            file = self._file(path)
            return False, len(file.data), observed or file.changed

    def names(self, folder: str) -> list[str]:
        self.enter("names", folder)
        with self.lock:
            if folder not in self.folders:
                raise _error(errno.ENOENT, folder)
            inside = {path for path in {*self.files, *self.folders} if path != "/" and _parent(path) == folder}
            return sorted(PurePosixPath(path).name for path in inside)

    def make_folder(self, path: str) -> None:
        self.enter("make_folder", path)
        with self.lock:
            if path in self.folders or path in self.files:
                raise _error(errno.EEXIST, path)
            self._need_parent(path)
            self.folders.add(path)

    def remove_folder(self, path: str) -> None:
        self.enter("remove", path)
        with self.lock:
            if any(_parent(other) == path for other in {*self.files, *self.folders} - {"/"}):
                raise _error(errno.ENOTEMPTY, path)
            self.folders.discard(path)

    def remove(self, path: str) -> None:
        self.enter("remove", path)
        with self.lock:
            self.trash += len(self._file(path).data)
            del self.files[path]
            self._changed(path)

    def rename(self, old: str, new: str) -> None:
        faults = self.enter("rename", old)
        with self.lock:
            source = self._file(old)
            self._need_parent(new)
            if new in self.files and new != old:
                self.trash += len(self.files[new].data)
        if "copy" not in faults:
            with self.lock:
                self.files[new] = self.files.pop(old)
                self._changed(old)
                self._changed(new)
            return
        target = File(changed=time.time(), writers=1)
        with self.lock:
            self.files[new] = target
        for start in range(0, len(source.data), _COPY_CHUNK):
            self.enter("copy", new)
            with self.lock:
                piece = source.data[start : start + _COPY_CHUNK]
                self._resize(target, start + len(piece))
                target.data[start:] = piece
        target.writers = 0
        with self.lock:
            self._changed(new)
        self.remove(old)

    # ---- content

    def open(self, path: str, create: bool = False, cut: bool = False) -> int:
        self.enter("open", path)
        with self.lock:
            if create and path not in self.files:
                self._need_parent(path)
                self.files[path] = File(changed=time.time())
                self._changed(path)
            number = next(self._numbers)
            self.handles[number] = Handle(path, self._file(path))
        if cut:
            self.truncate(number, 0)
        return number

    def size(self, number: int) -> int:
        self.enter("stat", self.handles[number].path)
        return len(self.handles[number].file.data)

    def read(self, number: int, size: int, offset: int) -> bytes:
        handle = self.handles[number]
        faults = self.enter("read", handle.path, min(size, max(0, len(handle.file.data) - offset)))
        size = max(1, size // 2) if "short" in faults else size
        with self.lock:
            return bytes(handle.file.data[offset : offset + size])

    def write(self, number: int, data: bytes, offset: int) -> int:
        handle = self.handles[number]
        faults = self.enter("write", handle.path, len(data))
        data = data[: max(1, len(data) // 2)] if "short" in faults else data
        kept = b"" if "drop" in faults else data[: len(data) // 2] if "torn" in faults else data

        def change(file: File) -> None:
            self._resize(file, max(len(file.data), offset + len(kept)))
            file.data[offset : offset + len(kept)] = kept

        self._write(handle, change)
        return len(data)

    def truncate(self, number: int, size: int) -> None:
        handle = self.handles[number]
        faults = self.enter("truncate", handle.path)
        self._write(handle, lambda file: None if "drop" in faults else self._resize(file, size))

    def _write(self, handle: Handle, change: Callable[[File], None]) -> None:
        with self.lock:
            change(handle.file)
            handle.file.changed = time.time()
            if not handle.wrote:
                handle.wrote, handle.file.writers = True, handle.file.writers + 1

    def sync(self, number: int) -> None:
        """Report success long before the cloud has the file."""
        self.enter("sync", self.handles[number].path)

    def close(self, number: int) -> None:
        """Queue the new version without waiting for its upload."""
        self.enter("close", self.handles[number].path)
        self._done(self.handles[number])

    def forget(self, number: int) -> None:
        """The last user of the handle is gone, whether or not it was closed."""
        self._done(self.handles.pop(number))

    def _done(self, handle: Handle) -> None:
        with self.lock:
            if handle.wrote:
                handle.wrote, handle.file.writers = False, handle.file.writers - 1
                if self.files.get(handle.path) is handle.file:
                    self._changed(handle.path)

    def _file(self, path: str) -> File:
        if path in self.folders:
            raise _error(errno.EISDIR, path)
        if path not in self.files:
            raise _error(errno.ENOENT, path)
        return self.files[path]

    def _need_parent(self, path: str) -> None:
        if _parent(path) not in self.folders:
            raise _error(errno.ENOENT, path)


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
