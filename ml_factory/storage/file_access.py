"""File operations on any path: direct on a local disk, in a child process on a mount.

A mount that hangs blocks any process that asks as little as a file's size, and keeps that process from ending. Each
operation below on a path of a mount therefore runs in a child (`worker_process`), and a child that sends nothing for
half a minute raises MountTimeout, an OSError. From then on the mount gets two seconds per operation until it answers
again: twenty operations on a dead mount do not take twenty times half a minute.
"""

import errno
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.atomic_replace import commit_rename, sweep_leftovers, temp_path
from ml_factory.storage.mount_table import mount_of
from ml_factory.storage.worker_process import ParentConnection, WorkerProcess, WorkerUnavailable

DEADLINE, RETRY_DEADLINE = (
    30.0,
    2.0,
)  # seconds without a reply: of a mount that has answered so far, of one that has not
SETTLE_SECONDS = 5.0  # a compiler's file that was not written for so long counts as complete
_PIECE = 1 << 18  # bytes between two signs of life: at most 5 s at 50 kB/s


class MountTimeout(TimeoutError):
    """A mount that does not answer, as an OSError; `strerror` holds the reason."""


class UnresponsiveMountError(WorkspaceError):
    """A mount that does not answer, as the user's error: the file's state is unknown, and nothing was lost."""


# ---------------------------------------------------------------------- the operations

_OPERATIONS: dict[str, Callable] = {}
_alive: Callable[[], None] = bool  # a child reports progress with it; in this process it does nothing
_direct = False


def run_in_process(alive: Callable[[], None] = bool) -> None:
    """Run all operations in this process from now on, on mounts too; for a process that may hang.

    alive : called after each piece of a long operation.
    """
    global _alive, _direct
    _alive, _direct = alive, True


def remote_call(operation: Callable) -> Callable:
    """Wrap an operation: run it directly on a local path, in a child where its path is on a mount."""
    _OPERATIONS[operation.__name__] = operation

    @functools.wraps(operation)
    def call(path: str | os.PathLike, *args):
        top = None if _direct else mount_of(path)
        return operation(Path(path), *args) if top is None else _mount(top).call(operation.__name__, path, args)

    return call


@remote_call
def read(path: Path) -> bytes:
    """Read the whole file. Raises OSError, as all of these operations do."""
    pieces = []
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            _alive()
    return b"".join(pieces)


@remote_call
def sha256(path: Path, remembered: bool = True) -> str:
    """Hash the file's content, 64 hex digits.

    remembered : accept pages of the page cache; False reads the disk itself.
    """
    seen, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        if not remembered and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            seen.update(buffer[:count])
            _alive()
    return seen.hexdigest()


@remote_call
def names(path: Path) -> list[str]:
    """List the folder's entries, sorted; none where it does not exist."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


@remote_call
def kind(path: Path) -> str:
    """Return "file", "folder", or "" for nothing. Unlike pathlib's tests it raises where the disk refuses."""
    try:
        found = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "folder" if found & 0o170000 == 0o040000 else "file"


@remote_call
def is_mount_point(path: Path) -> bool:
    """Return True for a mount point that answers."""
    try:
        os.stat(path)  # ismount itself returns False for every error
    except FileNotFoundError:
        return False
    return os.path.ismount(path)


@remote_call
def size(path: Path) -> int:
    """Return the file's size in bytes."""
    return os.stat(path).st_size


@remote_call
def sizes(path: Path) -> list[int]:
    """Return the bytes of the file, or of each file in the folder and below it; [] where nothing exists."""
    found = [os.stat(path).st_size] if path.is_file() else []
    for folder, _, files in os.walk(path):
        _alive()
        found += [os.stat(os.path.join(folder, name)).st_size for name in sorted(files)]
    return found


@remote_call
def same_file(path: Path, other: str) -> bool:
    """Return True when both paths lead to one file."""
    return os.path.samefile(path, other)


@remote_call
def remove(path: Path) -> None:
    """Delete the file if it exists."""
    path.unlink(missing_ok=True)


@remote_call
def writable(path: Path) -> bool:
    """Return True where this user may write."""
    return os.access(path, os.W_OK)


@remote_call
def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or that would hold it."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@remote_call
def make_folder(path: Path) -> None:
    """Make the folder and its parents if they do not exist."""
    path.mkdir(parents=True, exist_ok=True)


@remote_call
def upload(path: Path, source: str) -> None:
    """Replace `path` with a copy of a local file in one step: temporary file in its folder, flushed, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(path)
    temporary = temp_path(path)
    try:
        with open(source, "rb") as file, open(temporary, "wb") as copy:
            while piece := file.read(_PIECE):
                copy.write(piece)
                _alive()
        commit_rename(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@remote_call
def download(path: Path, target: str) -> None:
    """Copy the file to a local path, over what is there."""
    with open(path, "rb") as file, open(target, "wb") as copy:
        while piece := file.read(_PIECE):
            copy.write(piece)
            _alive()


@remote_call
def download_missing(path: Path, target: str) -> None:
    """Copy the files in and below the folder that the local folder `target` lacks; none where the folder does not
    exist.
    """
    _copy_files(path, Path(target), _is_absent)


@remote_call
def upload_changed(path: Path, source: str) -> None:
    """Copy the files in and below the local folder `source` that `path` lacks or has with another size.

    A file written in the last SETTLE_SECONDS may be incomplete and waits for the next call.
    """
    _copy_files(Path(source), path, _needs_upload)


def _copy_files(source: Path, target: Path, wanted: Callable[[Path, Path], bool]) -> None:
    for folder, _, files in os.walk(source):
        for name in files:
            file = Path(folder) / name
            copy = target / file.relative_to(source)
            if not name.endswith(".tmp") and wanted(file, copy):
                upload.__wrapped__(copy, str(file))
            _alive()


def _is_absent(file: Path, copy: Path) -> bool:
    return not copy.is_file()


def _needs_upload(file: Path, copy: Path) -> bool:
    """Return True for a complete file whose copy is missing or of another size."""
    status = file.stat()
    return time.time() - status.st_mtime >= SETTLE_SECONDS and sizes.__wrapped__(copy) != [status.st_size]


# ---------------------------------------------------------------------- the parent's side


class _Mount:
    """One mount as this process reaches it: each thread has a child of its own."""

    def __init__(self, top: str):
        self._top, self._idle, self.unresponsive = top, [], False

    def call(self, name: str, path: str | os.PathLike, args: tuple):
        request = {"do": name, "path": os.path.abspath(path), "words": args}
        seconds = min(RETRY_DEADLINE, DEADLINE) if self.unresponsive else DEADLINE
        try:
            child = self._idle.pop()
        except IndexError:
            child = WorkerProcess(__name__, [], self._top, seconds)
        try:
            answer, content = child.call(request, seconds)
        except WorkerUnavailable as error:
            self.unresponsive = True
            raise MountTimeout(errno.ETIMEDOUT, str(error), str(path)) from error
        self.unresponsive = False
        self._idle.append(child)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], str(path))
        return content if answer["raw"] else answer["result"]


@functools.lru_cache(maxsize=64)
def _mount_for(top: str, process: int) -> _Mount:
    """Create the mount's children; a forked process has its own."""
    return _Mount(top)


def _mount(top: str) -> _Mount:
    return _mount_for(top, os.getpid())


def mark_unresponsive(path: str | os.PathLike) -> None:
    """Mark the mount of this path as unresponsive, so that later calls use the short timeout."""
    if (top := mount_of(path)) is not None:
        _mount(top).unresponsive = True


def is_unresponsive(path: str | os.PathLike) -> bool:
    """Return True when the last operation on the mount of this path timed out."""
    return (top := mount_of(path)) is not None and _mount(top).unresponsive


# ---------------------------------------------------------------------- the child's side


def serve(channel: str, parent: str) -> None:
    """Run the parent's requests until the parent is gone."""
    link = ParentConnection(channel, parent)
    run_in_process(link.alive)
    link.answer_with(_run_operation)


def _run_operation(request: dict) -> tuple[dict, bytes]:
    try:
        result = _OPERATIONS[request["do"]](Path(request["path"]), *request["words"])
    except OSError as error:
        return {"errno": error.errno or errno.EIO, "strerror": error.strerror or str(error)}, b""
    if isinstance(result, bytes):
        return {"raw": True}, result
    return {"raw": False, "result": result}, b""
