"""Atomic writes and checked reads: a file is complete or it does not exist.

A new file is written to a temporary name in its own folder (a temporary file elsewhere could not be renamed across file
systems), flushed to the disk and renamed over the old file. Checkpoint slots are overwritten in place instead, because
on Google Drive each deletion and each rename fills the Trash, which counts against the quota. Files on a mount are
reached through `file_access`, so that no call here hangs with the mount.
"""

import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ml_factory.errors import WorkspaceError
from ml_factory.redaction import redact
from ml_factory.storage import file_access
from ml_factory.storage.atomic_replace import commit_rename, flush_to_disk, sweep_leftovers, temp_path
from ml_factory.storage.file_access import MountTimeout, UnresponsiveMountError, free_bytes
from ml_factory.storage.mount_table import on_mount

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def replace_file(
    path: str | os.PathLike, writer: Callable[[Path], object], size: int | None = None, *, flush: bool = True
) -> None:
    """Let `writer` fill a temporary path, then rename it to `path` in one step.

    Until that step the old file is untouched; when the writer raises, no partial file stays behind.

    Parameters
    ----------
    path : the file to replace; its folders are made.
    writer : called with the temporary path.
    size : bytes that will be written, if known, for the message on a full disk.
    flush : wait for the disk; False for content that is verified by its hash and can be made again after a power cut.

    Raises WorkspaceError when the disk is full or refuses the write.
    """
    path = Path(path)
    if on_mount(path):
        _replace_on_mount(path, writer, size)
        return
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(path)
    temporary = temp_path(path)
    try:
        with disk_errors(path, lambda: size or (temporary.stat().st_size if temporary.exists() else None)):
            writer(temporary)
            commit_rename(temporary, path, flush)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _replace_on_mount(path: Path, writer: Callable[[Path], object], size: int | None) -> None:
    """Replace a file on a mount: write it on the local disk, then upload it in a child process."""
    outgoing = cache_folder("outgoing")
    with disk_errors(outgoing):
        outgoing.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=outgoing) as folder:
        local = Path(folder) / path.name
        with disk_errors(local, lambda: size):
            writer(local)
        with disk_errors(path, lambda: local.stat().st_size):
            file_access.upload(path, str(local))


def write_bytes_atomic(path: str | os.PathLike, data: bytes) -> None:
    """Replace the content of `path` in one step. Raises WorkspaceError when the disk is full or refuses the write."""
    replace_file(path, lambda temporary: temporary.write_bytes(data), len(data))


def write_json(path: str | os.PathLike, obj: object) -> None:
    """Write `obj` as indented JSON in one step, with every secret of this machine removed.

    NaN and infinity are refused because JSON cannot represent them.
    """
    data = (redact(json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)) + "\n").encode()
    replace_file(path, lambda temporary: temporary.write_bytes(data), len(data))


def read_json(path: str | os.PathLike) -> object:
    """Read a JSON file. Raises WorkspaceError naming the file, and the line where it stops being JSON."""
    path = Path(path)
    try:
        return json.loads(file_access.read(path))
    except MountTimeout as error:
        raise unresponsive_mount_error(path, error) from error
    except OSError as error:
        raise WorkspaceError("This file cannot be read", where=path, got=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise WorkspaceError(
            "This file is not JSON", where=path, got=error, next_step="restore or delete it"
        ) from error


def json_or_none(path: str | os.PathLike) -> object | None:
    """Return the content of the JSON file; None where it is missing or torn, so that the caller makes it again.

    Raises UnresponsiveMountError: a file on a mount that does not answer is not lost.
    """
    try:
        return read_json(path)
    except UnresponsiveMountError:
        raise
    except WorkspaceError:
        return None


@contextmanager
def local_copy(path: str | os.PathLike) -> Iterator[Path]:
    """Yield the file itself where it is on a local disk, else a temporary local copy of it.

    Raises WorkspaceError when the disk refuses, or when the mount does not answer.
    """
    path = Path(path)
    if not on_mount(path):
        yield path
        return
    incoming = cache_folder("incoming")
    with disk_errors(incoming):
        incoming.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=incoming) as folder:
        local = Path(folder) / path.name
        with disk_errors(path):
            file_access.download(path, str(local))
        yield local


class Disk:
    """Every file operation that saving, rotating and loading checkpoints uses, one method each.

    Tests replace this class to make a disk fail: `StorageTiers(disk=...)` takes a
    subclass that refuses, hangs, tears or drops operations (tests/faults), and does all work in this process. No method
    deletes or renames. Paths are pathlib's, offsets are bytes; each method raises OSError as the operating system does.
    """

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the folder's entries, sorted; none when the folder does not exist."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def free(self, folder: Path) -> int:
        """Return the free bytes of the disk that holds this folder."""
        return free_bytes(folder)

    def open(self, path: Path, write: bool = False) -> int:
        """Open a descriptor; with `write` the file is created if it does not exist, and never truncated."""
        return os.open(path, (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0), 0o666)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer from `offset` on; return the number of bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, [buffer], offset)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write the data at `offset`; return the number of bytes written."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        flush_to_disk(descriptor)

    def forget(self, descriptor: int) -> None:
        """Drop the file's pages from the page cache, so that the next read reads the disk itself."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


def file_hash(path: str | os.PathLike, remembered: bool = True) -> str:
    """Return the SHA-256 of the file's content, 64 hex digits.

    remembered : accept pages of the page cache; False reads the disk itself.
    """
    with disk_errors(Path(path)):
        return file_access.sha256(path, remembered)


def read_file(path: str | os.PathLike) -> bytes:
    """Read the whole file. Raises WorkspaceError when it does not exist or the disk refuses."""
    with disk_errors(Path(path)):
        return file_access.read(path)


def is_file(path: str | os.PathLike) -> bool:
    """Return True for an existing file. Raises WorkspaceError when the disk refuses to answer."""
    with disk_errors(Path(path)):
        return file_access.kind(path) == "file"


def is_folder(path: str | os.PathLike) -> bool:
    """Return True for an existing folder. Raises WorkspaceError when the disk refuses to answer."""
    with disk_errors(Path(path)):
        return file_access.kind(path) == "folder"


def names_in(folder: str | os.PathLike) -> list[str]:
    """List the folder's entries, sorted; none where it does not exist. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(folder)):
        return file_access.names(folder)


def remove_file(path: str | os.PathLike) -> None:
    """Delete the file if it exists. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(path)):
        file_access.remove(path)


def make_folder(path: str | os.PathLike) -> None:
    """Make the folder and its parents. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(path)):
        file_access.make_folder(path)


def fingerprint(obj: object) -> str:
    """Return the SHA-256 (64 hex digits) of the canonical JSON of `obj`, independent of key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json_value(obj: object) -> Any:
    """Convert `obj` to strict JSON values: NumPy numbers to Python's, NaN and infinity to None, tuples to lists,
    paths to strings. Raises TypeError for any other type.
    """
    if hasattr(obj, "item") and not hasattr(obj, "__len__"):
        obj = obj.item()
    if isinstance(obj, dict):
        return {str(key): to_json_value(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_json_value(value) for value in obj]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    raise TypeError(f"JSON cannot hold a {type(obj).__name__}: {obj!r}")


def cache_folder(name: str) -> Path:
    """Return the folder of the local disk that caches files of this kind."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ml_factory" / name


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise WorkspaceError when the disk of `folder`, or the local disk that stages uploads, lacks `needed` bytes."""
    for disk in (folder, cache_folder("outgoing")) if on_mount(folder) else (folder,):
        with disk_errors(disk):
            free = free_bytes(disk)
        if free < needed:
            raise WorkspaceError(
                f"Not enough space for {what}", where=disk, got=f"{free / 1e6:,.1f} MB free",
                wanted=f"about {needed / 1e6:,.1f} MB", next_step="free space, or use another --workspace",
            )  # fmt: skip


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn an OSError about `path` into a WorkspaceError; `needed` returns the bytes wanted, for a full disk."""
    try:
        yield
    except MountTimeout as error:
        raise unresponsive_mount_error(path, error) from error
    except OSError as error:
        if error.errno in FULL:
            size = needed()
            raise WorkspaceError(
                "No space left on the disk; what was there before is untouched",
                where=path,
                got=_describe_free_space(path),
                wanted="space for the file" if size is None else f"at least {size:,} bytes",
                next_step="free some space (on Google Drive empty the Trash too) and run again",
            ) from error
        raise WorkspaceError(
            "The disk refused this file",
            where=path,
            got=error.strerror or error,
            next_step="check that the folder exists, can be written and is still mounted",
        ) from error


def unresponsive_mount_error(path: Path, error: MountTimeout) -> UnresponsiveMountError:
    """Build the user's error for a mount that does not answer."""
    return UnresponsiveMountError(
        "The mount does not answer; nothing there was changed", where=path, got=error.strerror,
        next_step="mount it again (on Colab: run the setup cell), then run this again",
    )  # fmt: skip


def _describe_free_space(path: Path) -> str:
    try:
        return f"{free_bytes(path):,} bytes free"
    except OSError as error:
        return f"a disk that does not report its free space ({error.strerror})"
