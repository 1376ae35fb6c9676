"""Files of a workspace, wherever it is: on a disk of this machine directly, on a mount through a child process.

A mount that hangs stops whoever asks it for as little as a file's size, and keeps the process from ending. So each
operation below on a path that is on a mount is done by a child (`children`), and one that says nothing for half a
minute raises MountTimeout, an OSError. From then on the mount is given two seconds a question, until it answers again:
twenty questions to a dead mount do not take twenty times half a minute.
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
from ml_factory.storage.atomic_rename import commit_rename, sweep_leftovers, temp_path
from ml_factory.storage.mount_table import mount_of
from ml_factory.storage.worker_process import ParentConnection, WorkerProcess, WorkerUnavailable

DEADLINE, AGAIN = 30.0, 2.0  # seconds of silence: of a mount that has answered so far, of one that has not
YOUNG_SECONDS = 5.0  # that a file of a compiler's lies untouched before it is taken for whole
_PIECE = 1 << 18  # a sign of life at least every 5 s at 50 kB/s


class MountTimeout(TimeoutError):
    """A mount that does not answer, as the operating system would tell it; `strerror` says why it is thought so."""


class UnresponsiveMountError(WorkspaceError):
    """The same for the user: nothing is known of the file, and nothing was lost."""


# ---------------------------------------------------------------------- the operations

_OPERATIONS: dict[str, Callable] = {}
_alive: Callable[[], None] = bool  # in a child: says that the last piece came back; here there is nobody to tell
_direct = False


def run_in_process(alive: Callable[[], None] = bool) -> None:
    """For a process that may hang: from now on the operations are done by itself, wherever the path is."""
    global _alive, _direct
    _alive, _direct = alive, True


def remote_call(operation: Callable) -> Callable:
    """The operation as it is for a disk of this machine; by a child where its path is on a mount."""
    _OPERATIONS[operation.__name__] = operation

    @functools.wraps(operation)
    def call(path: str | os.PathLike, *args):
        top = None if _direct else mount_of(path)
        return operation(Path(path), *args) if top is None else _mount(top).call(operation.__name__, path, args)

    return call


@remote_call
def read(path: Path) -> bytes:
    """The whole file. Raises OSError, as all of these do."""
    pieces = []
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            _alive()
    return b"".join(pieces)


@remote_call
def sha256(path: Path, remembered: bool = True) -> str:
    """Of the file's content, 64 hex digits.  remembered : whether what the system still has in memory will do."""
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
    """What is in the folder, sorted; nothing where there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


@remote_call
def kind(path: Path) -> str:
    """What is there: "file", "folder", or "" for nothing. Unlike pathlib's tests it raises where the disk refuses."""
    try:
        found = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "folder" if found & 0o170000 == 0o040000 else "file"


@remote_call
def is_mount_point(path: Path) -> bool:
    """Whether something is mounted there, that answers."""
    try:
        os.stat(path)  # ismount itself takes every refusal for a no
    except FileNotFoundError:
        return False
    return os.path.ismount(path)


@remote_call
def size(path: Path) -> int:
    """Of a file, in bytes."""
    return os.stat(path).st_size


@remote_call
def sizes(path: Path) -> list[int]:
    """Bytes of the file there, or of each file in the folder and below it; nothing where nothing is."""
    found = [os.stat(path).st_size] if path.is_file() else []
    for folder, _, files in os.walk(path):
        _alive()
        found += [os.stat(os.path.join(folder, name)).st_size for name in sorted(files)]
    return found


@remote_call
def same_file(path: Path, other: str) -> bool:
    """Whether both paths lead to one file."""
    return os.path.samefile(path, other)


@remote_call
def remove(path: Path) -> None:
    """The file; one that is not there is fine."""
    path.unlink(missing_ok=True)


@remote_call
def writable(path: Path) -> bool:
    """Whether this user may write there."""
    return os.access(path, os.W_OK)


@remote_call
def free_bytes(path: Path) -> int:
    """Bytes free on the disk that holds `path`, or that would hold it."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@remote_call
def make_folder(path: Path) -> None:
    """With those above it; one that is there is fine."""
    path.mkdir(parents=True, exist_ok=True)


@remote_call
def upload(path: Path, source: str) -> None:
    """Put a copy of a local file in the place of `path` in one step: written aside in its folder, flushed, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(path)
    aside = temp_path(path)
    try:
        with open(source, "rb") as file, open(aside, "wb") as copy:
            while piece := file.read(_PIECE):
                copy.write(piece)
                _alive()
        commit_rename(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@remote_call
def download(path: Path, target: str) -> None:
    """Copy the file to a path on the local disk, over what is there."""
    with open(path, "rb") as file, open(target, "wb") as copy:
        while piece := file.read(_PIECE):
            copy.write(piece)
            _alive()


@remote_call
def download_missing(path: Path, target: str) -> None:
    """Copy what is in the folder and below it, and is not in the local folder `target`, there; nothing of no folder."""
    _copy_new(path, Path(target), _is_absent)


@remote_call
def upload_changed(path: Path, source: str) -> None:
    """Copy what is in the local folder `source` and below it, and is not in the folder or of another size, there; what
    was written in the last YOUNG_SECONDS may be half of a file, and waits for the next time."""
    _copy_new(Path(source), path, _is_settled)


def _copy_new(source: Path, target: Path, wanted: Callable[[Path, Path], bool]) -> None:
    for folder, _, files in os.walk(source):
        for name in files:
            file = Path(folder) / name
            there = target / file.relative_to(source)
            if not name.endswith(".tmp") and wanted(file, there):
                upload.__wrapped__(there, str(file))
            _alive()


def _is_absent(file: Path, there: Path) -> bool:
    return not there.is_file()


def _is_settled(file: Path, there: Path) -> bool:
    """Whether the file is there to stay, and its copy is not or is half of it."""
    about = file.stat()
    return time.time() - about.st_mtime >= YOUNG_SECONDS and sizes.__wrapped__(there) != [about.st_size]


# ---------------------------------------------------------------------- asking a child


class _Mount:
    """One mount, as this process asks it: each thread by a child of its own."""

    def __init__(self, top: str):
        self._top, self._idle, self.silent = top, [], False

    def call(self, name: str, path: str | os.PathLike, args: tuple):
        request = {"do": name, "path": os.path.abspath(path), "words": args}
        seconds = min(AGAIN, DEADLINE) if self.silent else DEADLINE
        try:
            child = self._idle.pop()
        except IndexError:
            child = WorkerProcess(__name__, [], self._top, seconds)
        try:
            answer, content = child.call(request, seconds)
        except WorkerUnavailable as error:
            self.silent = True
            raise MountTimeout(errno.ETIMEDOUT, str(error), str(path)) from error
        self.silent = False
        self._idle.append(child)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], str(path))
        return content if answer["raw"] else answer["result"]


@functools.lru_cache(maxsize=64)
def _mount_for(top: str, process: int) -> _Mount:
    """A process made by fork asks by children of its own."""
    return _Mount(top)


def _mount(top: str) -> _Mount:
    return _mount_for(top, os.getpid())


def mark_unresponsive(path: str | os.PathLike) -> None:
    """Somebody else's question to the mount of this path found no answer: ours need not wait as long for theirs."""
    if (top := mount_of(path)) is not None:
        _mount(top).silent = True


def is_unresponsive(path: str | os.PathLike) -> bool:
    """Whether the last question to the mount of this path found no answer."""
    return (top := mount_of(path)) is not None and _mount(top).silent


# ---------------------------------------------------------------------- in the child


def serve(channel: str, parent: str) -> None:
    """Do what the parent asks until it is gone."""
    link = ParentConnection(channel, parent)
    run_in_process(link.alive)
    link.answer_with(_done)


def _done(request: dict) -> tuple[dict, bytes]:
    try:
        result = _OPERATIONS[request["do"]](Path(request["path"]), *request["words"])
    except OSError as error:
        return {"errno": error.errno or errno.EIO, "strerror": error.strerror or str(error)}, b""
    if isinstance(result, bytes):
        return {"raw": True}, result
    return {"raw": False, "result": result}, b""
