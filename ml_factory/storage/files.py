"""Access to all files, on local disks and on mounts: reads, writes in one step, listings, copies.

`files` is the one object through which the library reaches the user's files. On a local disk its methods work directly;
on a mount each runs in a child process with a deadline (`mounts`), so that no call hangs with the mount. Failures are
WorkspaceErrors: FileError for a file that is missing, damaged or refused, UnresponsiveMountError for a mount that does
not answer.

A new file is written to a temporary name in its own folder (a temporary file elsewhere could not be renamed across file
systems), flushed to the disk and renamed over the old file. Checkpoint slots are overwritten in place instead, because
on Google Drive each deletion and each rename fills the Trash, which counts against the quota.
"""

import errno
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ml_factory.errors import FileError, WorkspaceError
from ml_factory.process_identity import process_id
from ml_factory.redaction import redact_values
from ml_factory.storage.atomic_replace import (
    commit_atomic_replace,
    flush_to_disk,
    open_temporary_file,
    sweep_temporary_files,
    temporary_path,
)
from ml_factory.storage.folder_removal import folder_bytes, remove_folder_tree
from ml_factory.storage.json_values import LARGEST_JSON, parse_json
from ml_factory.storage.mirror_removals import note_removal
from ml_factory.storage.mounts import Mount, mount_at, mount_of
from ml_factory.storage.regular_files import check_file_size, open_regular_file
from ml_factory.storage.worker_process import WorkerParentConnection

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PIECE = 1 << 18  # bytes between two signs of life: at most 5 s at 50 kB/s
_OPERATIONS: dict[str, Callable] = {}


def _operation(body: Callable) -> Callable:
    """Make a method of its body, which raises OSError: run here on a local path, in a child on a mount."""
    _OPERATIONS[body.__name__] = body

    @functools.wraps(body)
    def method(self: "Files", path: str | os.PathLike, *args: Any) -> Any:
        with disk_errors(Path(path)):
            return self._run(body, path, *args)

    return method


class Files:
    """Files of any disk; one object per process, which remembers what mounts do not answer."""

    def __init__(self) -> None:
        self._direct = False
        self._alive: Callable[[], None] = bool  # reports progress in a child; here it does nothing

    @_operation
    def read(self, path: Path, largest: int | None = None) -> bytes:
        """Read the whole file. Raises FileError for one of more than `largest` bytes, by default half the memory."""
        pieces = []
        with open(open_regular_file(path), "rb") as file:
            check_file_size(file.fileno(), largest)
            while piece := file.read(_PIECE):
                pieces.append(piece)
                self._alive()
        return b"".join(pieces)

    def read_json(self, path: str | os.PathLike) -> Any:
        """Read a JSON file. Raises FileError naming the file, and the line where it stops being JSON."""
        content = self.read(path, LARGEST_JSON)
        try:
            return parse_json(content)
        except ValueError as error:
            raise FileError("This file is not JSON", where=path, got=error, next_step="restore or delete it") from error

    def read_json_or_none(self, path: str | os.PathLike) -> Any | None:
        """Read a JSON file; None where it is missing or torn, so that the caller makes it again.

        Raises UnresponsiveMountError: a file on a mount that does not answer is not lost.
        """
        with suppress(FileError):
            return self.read_json(path)
        return None

    @_operation
    def sha256(self, path: Path, cached: bool = True) -> str:
        """Hash the file's content, 64 hex digits.

        cached : accept pages of the page cache; False reads the disk itself.
        """
        seen, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
        with open(open_regular_file(path), "rb", buffering=0) as file:
            if not cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while count := file.readinto(buffer):
                seen.update(buffer[:count])
                self._alive()
        return seen.hexdigest()

    @contextmanager
    def local_copy(self, path: str | os.PathLike) -> Iterator[Path]:
        """Yield the file itself where it is on a local disk, else a temporary local copy of it."""
        if not self.is_remote(path):
            yield Path(path)
            return
        with _staged("incoming", Path(path)) as local:
            self.download(path, str(local))
            yield local

    # ------------------------------------------------------------------ facts

    @_operation
    def names(self, path: Path) -> list[str]:
        """List the folder's entries, sorted; none where it does not exist."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @_operation
    def kind(self, path: Path) -> str:
        """Return "file", "folder", or "" for nothing. Unlike pathlib's tests it raises where the disk refuses."""
        try:
            found = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return "folder" if found & 0o170000 == 0o040000 else "file"

    def is_file(self, path: str | os.PathLike) -> bool:
        """Return True for an existing file."""
        return self.kind(path) == "file"

    def is_folder(self, path: str | os.PathLike) -> bool:
        """Return True for an existing folder."""
        return self.kind(path) == "folder"

    @_operation
    def first_link(self, path: Path, folder: str) -> str:
        """Return the first symbolic link on the way from `folder`, which does not count, to `path`; "" for none."""
        below = path.relative_to(folder)
        for part in [*reversed(below.parents), below][1:]:
            if os.path.islink(os.path.join(folder, part)):
                return os.path.join(folder, part)
        return ""

    @_operation
    def is_mount_point(self, path: Path) -> bool:
        """Return True for a mount point that answers."""
        try:
            os.stat(path)  # ismount itself returns False for every error
        except FileNotFoundError:
            return False
        return os.path.ismount(path)

    @_operation
    def size(self, path: Path) -> int:
        """Return the file's size in bytes."""
        return os.stat(path).st_size

    @_operation
    def sizes(self, path: Path) -> list[int]:
        """Return the bytes of the file, or of each file in the folder and below it; [] where nothing exists."""
        found = [os.stat(path).st_size] if path.is_file() else []
        for folder, _, names in os.walk(path):
            self._alive()
            found += [os.stat(os.path.join(folder, name)).st_size for name in sorted(names)]
        return found

    @_operation
    def size_and_time(self, path: Path) -> list[int]:
        """Return the file's bytes and its time in nanoseconds."""
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns]

    @_operation
    def tree(self, path: Path) -> dict[str, list[int]]:
        """Return the name below the folder -> `size_and_time`, of all files in it but links; {} where it does not
        exist.
        """

        def refuse(error: OSError) -> None:
            raise error

        found: dict[str, list[int]] = {}
        for folder, _, names in os.walk(path, onerror=refuse) if os.path.lexists(path) else ():
            for one in (os.path.join(folder, name) for name in names):
                self._alive()
                with suppress(FileNotFoundError):
                    facts = os.lstat(one)
                    if facts.st_mode & 0o170000 == 0o100000:
                        found[os.path.relpath(one, path)] = [facts.st_size, facts.st_mtime_ns]
        return found

    def is_same(self, path: str | os.PathLike, other: str | os.PathLike) -> bool:
        """Return True when both paths lead to one file; files on different mounts are not compared."""
        return mount_of(path) == mount_of(other) and self._have_one_file(path, os.path.abspath(other))

    @_operation
    def _have_one_file(self, path: Path, other: str) -> bool:
        return os.path.samefile(path, other)

    @_operation
    def is_writable(self, path: Path) -> bool:
        """Return True where this user may write."""
        return os.access(path, os.W_OK)

    @_operation
    def free_bytes(self, path: Path) -> int:
        """Return the free bytes of the disk that holds `path`, or that would hold it."""
        folder = path.absolute()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def require_space(self, folder: Path, needed: int, what: str) -> None:
        """Raise FileError when the disk of `folder`, or the local disk that stages uploads, lacks `needed` bytes."""
        for disk in (folder, local_cache_folder("outgoing")) if self.is_remote(folder) else (folder,):
            free = self.free_bytes(disk)
            if free < needed:
                raise FileError(
                    f"Not enough space for {what}", where=disk, got=f"{free / 1e6:,.1f} MB free",
                    wanted=f"about {needed / 1e6:,.1f} MB", next_step="free space, or use another --workspace"
                )  # fmt: skip

    def is_remote(self, path: str | os.PathLike) -> bool:
        """Return True when the path is on a mount: slow, and gone when the connection is. Never touches the mount."""
        return mount_of(path) is not None

    def is_unresponsive(self, path: str | os.PathLike) -> bool:
        """Return True when the last operation on the mount of this path timed out."""
        return (top := mount_of(path)) is not None and _mount(top).unresponsive

    def mark_unresponsive(self, path: str | os.PathLike) -> None:
        """Mark the mount of this path as unresponsive, so that later calls use the short timeout."""
        if (top := mount_of(path)) is not None:
            _mount(top).unresponsive = True

    # ------------------------------------------------------------------ writing

    def replace(
        self, path: str | os.PathLike, writer: Callable[[Path], object], size: int | None = None, *, flush: bool = True
    ) -> None:
        """Let `writer` fill a temporary path, then rename it to `path` in one step.

        Until that step the old file is untouched; when the writer raises, no partial file stays behind. For a file on
        a mount the temporary path is on the local disk, and a child process uploads it.

        Parameters
        ----------
        path : the file to replace; its folders are made.
        writer : called with the temporary path.
        size : bytes that will be written, if known, for the message on a full disk.
        flush : wait for the disk; False for content that is verified by its hash and can be made again after a power
            cut.
        """
        path = Path(path)
        if self.is_remote(path):
            with _staged("outgoing", path) as local:
                with disk_errors(local, lambda: size):
                    writer(local)
                with disk_errors(path, lambda: local.stat().st_size):
                    self._run(_OPERATIONS["upload"], path, str(local))
            return
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporary_files(path)
        temporary = temporary_path(path)
        try:
            with disk_errors(path, lambda: size or (temporary.stat().st_size if temporary.exists() else 0) or None):
                os.close(open_temporary_file(temporary))
                writer(temporary)
                commit_atomic_replace(temporary, path, flush)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def write(self, path: str | os.PathLike, data: bytes) -> None:
        """Replace the file in one step."""
        self.replace(path, lambda temporary: temporary.write_bytes(data), len(data))

    def write_json(self, path: str | os.PathLike, obj: object) -> None:
        """Write `obj` as indented JSON in one step, with every secret of this machine removed.

        NaN and infinity are refused because JSON cannot represent them.
        """
        data = (json.dumps(redact_values(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self.replace(path, lambda temporary: temporary.write_bytes(data), len(data))

    @_operation
    def make_folder(self, path: Path) -> None:
        """Make the folder and its parents if they do not exist."""
        path.mkdir(parents=True, exist_ok=True)

    @_operation
    def remove(self, path: Path) -> None:
        """Delete the file if it exists."""
        note_removal(path)
        path.unlink(missing_ok=True)

    @_operation
    def folder_bytes(self, path: Path) -> int:
        """Return the bytes of all files below the folder, links not followed; 0 where nothing exists."""
        return folder_bytes(path, self._alive)

    @_operation
    def remove_folder(self, path: Path) -> None:
        """Delete the folder with everything in it, links themselves and never their targets (`folder_removal`)."""
        note_removal(path)
        remove_folder_tree(path, mount_of(path) is not None, self._alive)

    @_operation
    def download(self, path: Path, target: str) -> None:
        """Copy the file to a local path, over what is there."""
        with open(open_regular_file(path), "rb") as source, open(target, "wb") as copy:
            self._copy(source, copy)

    @_operation
    def upload(self, path: Path, source: str) -> None:
        """Replace `path` with a copy of a local file in one step: temporary file in its folder, flushed, renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporary_files(path)
        temporary = temporary_path(path)
        try:
            with open(source, "rb") as file, open(open_temporary_file(temporary), "wb") as copy:
                self._copy(file, copy)
            commit_atomic_replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    @_operation
    def overwrite(self, path: Path, source: str) -> None:
        """Write a local file's content over `path` in place, and flush it; an interrupted write leaves a torn file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_nlink > 1:  # under its other name it stays as it is
            path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(source, "rb") as file, open(descriptor, "wb") as copy:
            self._copy(file, copy)
            copy.truncate()
            copy.flush()
            flush_to_disk(copy.fileno())

    def _copy(self, source: Any, target: Any) -> None:
        while piece := source.read(_PIECE):
            target.write(piece)
            self._alive()

    # ------------------------------------------------------------------ this process, or a child

    def _run(self, body: Callable, path: str | os.PathLike, *args: Any) -> Any:
        """Run the body of an operation. Raises OSError where the disk refuses, UnresponsiveMountError."""
        top = None if self._direct else mount_of(path)
        return body(self, Path(path), *args) if top is None else _mount(top).call(body.__name__, path, args)

    def run_in_process(self, alive: Callable[[], None] = bool) -> None:
        """Run all operations in this process from now on, on mounts too; for a process that may hang.

        alive : called after each piece of a long operation.
        """
        self._alive, self._direct = alive, True


files = Files()


def _mount(top: str) -> Mount:
    return mount_at(top, __name__, process_id())


def local_cache_folder(name: str) -> Path:
    """Return the folder of the local disk that caches files of this kind."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ml_factory" / name


@contextmanager
def _staged(kind: str, path: Path) -> Iterator[Path]:
    """Yield a temporary path on the local disk for a file on its way to or from a mount."""
    folder = local_cache_folder(kind)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        yield Path(temporary) / path.name


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn an OSError about `path` into a FileError; `needed` returns the bytes wanted, for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            size = needed()
            raise FileError(
                "No space left on the disk; what was there before is untouched", where=path,
                got=_describe_free_space(path),
                wanted="space for the file" if size is None else f"at least {size:,} bytes",
                next_step="free some space (on Google Drive empty the Trash too) and run again"
            ) from error  # fmt: skip
        raise FileError(
            "The disk refused this file", where=path, got=error.strerror or error,
            next_step=f"check that the folder {'is still mounted' if mount_of(path) else 'exists'} and can be written"
        ) from error  # fmt: skip


def _describe_free_space(path: Path) -> str:
    try:
        return f"{files.free_bytes(path):,} bytes free"
    except WorkspaceError as error:
        return f"a disk that does not report its free space ({error.got})"


# ---------------------------------------------------------------------- the child's side


def serve(channel: str, parent: str) -> None:
    """Run the parent's operations until the parent is gone."""
    link = WorkerParentConnection(channel, parent)
    files.run_in_process(link.alive)
    link.answer_requests(_answer)


def _answer(request: dict) -> tuple[dict, bytes]:
    try:
        result = _OPERATIONS[request["do"]](files, Path(request["path"]), *request["args"])
    except Exception as error:  # noqa: BLE001 - a NUL in the path, memory: without an answer the mount would seem dead
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
        return {"errno": number or errno.EIO, "strerror": text or str(error) or type(error).__name__}, b""
    return ({"raw": True}, result) if isinstance(result, bytes) else ({"raw": False, "result": result}, b"")
