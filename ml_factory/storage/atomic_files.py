"""Files that are there whole or not at all.

A new file is written aside in the folder it will live in (a temporary file elsewhere could not be renamed across
file systems), flushed to the disk and renamed over the old one. A slot that is reused for ever is overwritten in
place instead, because on Google Drive every deletion and every rename fills the Trash, which counts against the quota.
What is on a mount is asked through `mounts`, so that nothing here hangs with it.
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
from ml_factory.secrets import redact
from ml_factory.storage import file_access
from ml_factory.storage.atomic_rename import commit_rename, flush_to_disk, sweep_leftovers, temp_path
from ml_factory.storage.file_access import MountTimeout, UnresponsiveMountError, free_bytes
from ml_factory.storage.mount_table import on_mount

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def replace_file(
    path: str | os.PathLike, writer: Callable[[Path], object], size: int | None = None, *, flush: bool = True
) -> None:
    """Let `writer` fill a temporary path, then put it in the place of `path` in one step.

    Until that step the old file is untouched; whatever the writer raises, nothing half-written stays behind.
    size : bytes it will write, if known, for the message on a full disk.
    flush : wait for the disk; False for what is verified by its hash and can be made again after a power cut.
    Raises WorkspaceError when the disk is full or refuses.
    """
    path = Path(path)
    if on_mount(path):
        _replace_there(path, writer, size)
        return
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(path)
    aside = temp_path(path)
    try:
        with disk_errors(path, lambda: size or (aside.stat().st_size if aside.exists() else None)):
            writer(aside)
            commit_rename(aside, path, flush)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _replace_there(path: Path, writer: Callable[[Path], object], size: int | None) -> None:
    """As `replace_file`, on a mount: written on this machine first, and taken there by a child."""
    waiting = cache_folder("outgoing")
    with disk_errors(waiting):
        waiting.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=waiting) as folder:
        here = Path(folder) / path.name
        with disk_errors(here, lambda: size):
            writer(here)
        with disk_errors(path, lambda: here.stat().st_size):
            file_access.upload(path, str(here))


def write_bytes_atomic(path: str | os.PathLike, data: bytes) -> None:
    """Put these bytes in the place of `path` in one step. Raises WorkspaceError when the disk is full or refuses."""
    replace_file(path, lambda aside: aside.write_bytes(data), len(data))


def write_json(path: str | os.PathLike, obj: object) -> None:
    """Write `obj` as indented JSON in one step, without any key of this machine; NaN and infinity are refused because
    JSON has no word for them."""
    text = redact(json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False))
    write_bytes_atomic(path, (text + "\n").encode())


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
    """What the JSON file holds; None where there is none, or where it is torn: whoever made it makes it again.

    Raises UnresponsiveMountError: what a mount does not tell is not lost.
    """
    try:
        return read_json(path)
    except UnresponsiveMountError:
        raise
    except WorkspaceError:
        return None


@contextmanager
def local_copy(path: str | os.PathLike) -> Iterator[Path]:
    """The file where it is on a disk of this machine; else a copy of it there, which is gone afterwards.

    Raises WorkspaceError when the disk refuses, or the mount does not answer.
    """
    path = Path(path)
    if not on_mount(path):
        yield path
        return
    waiting = cache_folder("incoming")
    with disk_errors(waiting):
        waiting.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=waiting) as folder:
        here = Path(folder) / path.name
        with disk_errors(path):
            file_access.download(path, str(here))
        yield here


class Disk:
    """Every operation on files that saving, rotating and loading checkpoints makes, one method each, and no other.

    The seam where a disk can fail: `CheckpointManager(folder, disk=..., background=False)` takes a Disk derived from
    this one that refuses, hangs, tears or drops what it is asked (tests/faults), and does everything in this process.
    Nothing is deleted or renamed. Paths are pathlib's, offsets bytes; each method raises OSError as the operating
    system does.
    """

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Names of what is in the folder, sorted; none when it does not exist."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def free(self, folder: Path) -> int:
        """Bytes free for the files of this folder."""
        return free_bytes(folder)

    def open(self, path: Path, write: bool = False) -> int:
        """A descriptor; with `write` the file is made if it is not there, and never cut."""
        return os.open(path, (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0), 0o666)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer from there on; returns how many bytes came, 0 at the end."""
        return os.preadv(descriptor, [buffer], offset)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Returns how many bytes went."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        flush_to_disk(descriptor)

    def forget(self, descriptor: int) -> None:
        """Drop what the page cache holds of it, so that the next read asks the disk itself."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


def file_hash(path: str | os.PathLike, remembered: bool = True) -> str:
    """SHA-256 of the file's content, 64 hex digits.  remembered : False for what the disk itself holds."""
    with disk_errors(Path(path)):
        return file_access.sha256(path, remembered)


def read_file(path: str | os.PathLike) -> bytes:
    """The whole file. Raises WorkspaceError when it is not there or the disk refuses."""
    with disk_errors(Path(path)):
        return file_access.read(path)


def is_file(path: str | os.PathLike) -> bool:
    """Whether there is a file. Raises WorkspaceError when the disk refuses to tell."""
    with disk_errors(Path(path)):
        return file_access.kind(path) == "file"


def is_folder(path: str | os.PathLike) -> bool:
    """Whether there is a folder. Raises WorkspaceError when the disk refuses to tell."""
    with disk_errors(Path(path)):
        return file_access.kind(path) == "folder"


def names_in(folder: str | os.PathLike) -> list[str]:
    """What is in the folder, sorted; nothing where it does not exist. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(folder)):
        return file_access.names(folder)


def remove_file(path: str | os.PathLike) -> None:
    """One that is not there is fine. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(path)):
        file_access.remove(path)


def make_folder(path: str | os.PathLike) -> None:
    """With those above it. Raises WorkspaceError when the disk refuses."""
    with disk_errors(Path(path)):
        file_access.make_folder(path)


def fingerprint(obj: object) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of `obj`: the same for equal content, whatever the key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json_value(obj: object) -> Any:
    """`obj` as strict JSON can hold it: NumPy numbers as Python's, NaN and infinity as None, tuples as lists, paths
    as texts. Raises TypeError for anything else."""
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
    """Where this library keeps copies of that kind on the local disk."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ml_factory" / name


def check_space(folder: Path, needed: int, what: str) -> None:
    """WorkspaceError where the disk of `folder`, or that of copies on their way to a mount, lacks `needed` bytes."""
    for place in (folder, cache_folder("outgoing")) if on_mount(folder) else (folder,):
        with disk_errors(place):
            free = free_bytes(place)
        if free < needed:
            raise WorkspaceError(
                f"There is no room for {what}", where=place, got=f"{free / 1e6:,.1f} MB free",
                wanted=f"about {needed / 1e6:,.1f} MB", next_step="free space, or use another --workspace",
            )  # fmt: skip


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn what the operating system says about `path` into a WorkspaceError; `needed` counts the bytes wanted."""
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
                got=_free_in_words(path),
                wanted="room for the file" if size is None else f"at least {size:,} bytes",
                next_step="free some space (on Google Drive empty the Trash too) and run again",
            ) from error
        raise WorkspaceError(
            "The disk refused this file",
            where=path,
            got=error.strerror or error,
            next_step="check that the folder exists, can be written and is still mounted",
        ) from error


def unresponsive_mount_error(path: Path, error: MountTimeout) -> UnresponsiveMountError:
    """What the user is told of a mount that does not answer."""
    return UnresponsiveMountError(
        "The mount does not answer; nothing there was changed", where=path, got=error.strerror,
        next_step="mount it again (on Colab: run the setup cell), then run this again",
    )  # fmt: skip


def _free_in_words(path: Path) -> str:
    try:
        return f"{free_bytes(path):,} bytes free"
    except OSError as error:
        return f"a disk that does not tell how much is free ({error.strerror})"
