"""The drive behind the seam of the checkpoints' own code: every fault at every file operation, in one process."""

import errno
import threading
from contextlib import suppress
from pathlib import Path

from ml_factory.checkpoints.disk import Disk
from tests.faults.drive import Drive


class Killed(BaseException):
    """The process that did this operation is gone; nothing may catch it but the test."""


class DriveDisk(Disk):
    """`root` is the drive's top; operations are counted by the drive (`drive.calls`) and struck by its rules.

    A death raises Killed. A hang ends as the deadline of the product ends it: the caller hears ETIMEDOUT, the disk
    answers nothing more before it is healed, and what hung may still be carried out, late (`late`).
    """

    def __init__(self, drive: Drive, root: Path):
        self.drive, self.root = drive, root
        self.late: list = []
        self._silent = False
        drive.faults.die, drive.faults.hang = self._die, self._hang

    def make_folder(self, folder: Path) -> None:
        place = self._place(folder)
        for path in [*reversed(Path(place).parents), Path(place)]:
            if str(path) not in self.drive.folders:
                self._call(self.drive.make_folder, str(path))

    def sync_folder(self, folder: Path, parents: bool = False) -> None:
        self._call(self.drive.enter, "sync", self._place(folder))

    def names(self, folder: Path) -> list[str]:
        try:
            return self._call(self.drive.names, self._place(folder))
        except FileNotFoundError:
            return []

    def free(self, folder: Path) -> int:
        return self._call(self.drive.free, self._place(folder))

    def open(self, path: Path, write: bool = False) -> int:
        return self._call(self.drive.open, self._place(path), write)

    def size(self, descriptor: int) -> int:
        return self._call(self.drive.size, descriptor)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        data = self._call(self.drive.read, descriptor, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        return self._call(self.drive.write, descriptor, bytes(data), offset)

    def truncate(self, descriptor: int, size: int) -> None:
        self._call(self.drive.truncate, descriptor, size)

    def fsync(self, descriptor: int) -> None:
        self._call(self.drive.sync, descriptor)

    def drop_cached_pages(self, descriptor: int) -> None:
        self._call(self.drive.enter, "drop_cached_pages", self.drive.handles[descriptor].path)

    def close(self, descriptor: int) -> None:
        try:
            self._call(self.drive.close, descriptor)
        finally:
            self.drive.forget(descriptor)

    def heal(self) -> None:
        self.drive.faults.heal()
        self._silent = False

    def wake(self) -> None:
        """Carry out the operation that hung."""
        late, self.late = self.late, []
        for call, args, handle in late:
            with suppress(OSError):
                if handle is None:
                    call(*args)
                    continue
                number = max(self.drive.handles, default=0) + 1_000_000  # who called has closed its own
                self.drive.handles[number] = handle
                call(number, *args[1:])
                self.drive.forget(number)

    def _call(self, call, *args):
        if self._silent:
            raise TimeoutError(errno.ETIMEDOUT, "the mount does not answer")
        try:
            return call(*args)
        except _Hangs:
            self._silent = True
            self.late.append((call, args, self.drive.handles.get(args[0])))
            raise TimeoutError(errno.ETIMEDOUT, "the mount does not answer") from None

    def _place(self, path: Path) -> str:
        return f"/{Path(path).relative_to(self.root).as_posix()}".removesuffix("/.")

    def _die(self) -> None:
        raise Killed

    def _hang(self, release: threading.Event) -> None:
        raise _Hangs


class _Hangs(BaseException):
    pass
