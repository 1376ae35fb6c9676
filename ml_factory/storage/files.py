"""Files of the local disk: reads, writes in one step, listings, removals; which paths are a mount's; safe names.

`files` is the one object through which the library reaches files, and the local disk is all it reaches: a workspace on
a mount or in a bucket has a local working copy (`mirror`). Failures are FileErrors, which name the file.

A new file is written to a temporary name in its own folder (a temporary file elsewhere could not be renamed across file
systems), flushed to the disk and renamed over the old file. What a killed writer has left is deleted by a write of the
same file an hour later.

Deletions in a mirrored workspace are noted, and made on the remote by the next push: a file that is only missing stays
there.

Mounted file systems of other machines are found in the mount table without touching them: one that hangs blocks
even a question for a file's size. Names that stand in a file, a bucket or a service, which every user of a shared
workspace can choose, become paths by `stored_path` alone: never outside their folder, never through a link.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ml_factory.errors import FileError
from ml_factory.redaction import redact_values
from ml_factory.storage.json_values import parse_json

REMOVED = ".removed-"  # prefix of a folder's name while it is deleted
LEDGER, REMOVALS = ".mirror.json", ".mirror-removals"  # in the folder of a mirror (`mirror`)
MOUNTS = Path("/proc/self/mounts")
_REMOTE = ("fuse", "nfs", "cifs", "smb", "9p", "ceph", "davfs")
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fusectl")
_MOST_LINKS = 40
LONGEST_NAME = 255  # bytes, of most file systems
# Separators and drives of any system, control characters, halves of surrogate pairs.
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]|^[A-Za-z]:")
LARGEST_JSON = 1 << 24  # bytes of a file
_LEFT_SECONDS = 3600.0  # since the last write to a temporary file whose writer was killed
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})  # of file systems without fsync


class Files:
    """Files of the local disk. A method that has no other words about it raises FileError where the disk refuses."""

    def read(self, path: str | os.PathLike, largest: int = sys.maxsize) -> bytes:
        """Read the whole file. Raises FileError for one of more than `largest` bytes."""
        with disk_errors(Path(path)), open_regular_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > largest:
                raise OSError(errno.EOVERFLOW, f"it has {size:,} bytes, more than {largest:,}")
            return file.read()

    def read_json(self, path: str | os.PathLike) -> Any:
        """Read a JSON file. Raises FileError naming the file, and the line where it stops being JSON."""
        content = self.read(path, LARGEST_JSON)
        try:
            return parse_json(content)
        except ValueError as error:
            raise FileError("This file is not JSON", where=path, got=error, next_step="restore or delete it") from error

    def read_json_or_none(self, path: str | os.PathLike) -> Any | None:
        """Read a JSON file; None where it is missing or torn, so that the caller makes it again."""
        with suppress(FileError):
            return self.read_json(path)
        return None

    def sha256(self, path: str | os.PathLike) -> str:
        """Hash the file's content, 64 hex digits."""
        with disk_errors(Path(path)), open_regular_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # ------------------------------------------------------------------ facts

    def names(self, path: str | os.PathLike) -> list[str]:
        """List the folder's entries, sorted; none where it does not exist."""
        with disk_errors(Path(path)), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(path))
        return []

    def is_file(self, path: str | os.PathLike) -> bool:
        """Return True for an existing file. Unlike pathlib's test it raises where the disk refuses."""
        with disk_errors(Path(path)), suppress(FileNotFoundError, NotADirectoryError):
            return not stat.S_ISDIR(os.stat(path).st_mode)
        return False

    def is_folder(self, path: str | os.PathLike) -> bool:
        """Return True for an existing folder, as `is_file`."""
        with disk_errors(Path(path)), suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISDIR(os.stat(path).st_mode)
        return False

    def size(self, path: str | os.PathLike) -> int:
        """Return the file's size in bytes."""
        with disk_errors(Path(path)):
            return os.stat(path).st_size

    def folder_bytes(self, path: str | os.PathLike) -> int:
        """Return the bytes of all files below the folder, links counted as themselves; 0 where nothing exists."""
        found = 0
        with disk_errors(Path(path)):
            for folder, _, names in os.walk(path):
                for name in names:
                    with suppress(FileNotFoundError):
                        found += os.lstat(os.path.join(folder, name)).st_size
        return found

    def free_bytes(self, path: str | os.PathLike) -> int:
        """Return the free bytes of the disk that holds `path`, or that would hold it."""
        folder = Path(path).absolute()
        with disk_errors(folder):
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            return shutil.disk_usage(folder).free

    def require_space(self, folder: Path, needed: int, what: str) -> None:
        """Raise FileError when the disk of `folder` lacks `needed` bytes."""
        free = self.free_bytes(folder)
        if free < needed:
            raise FileError(
                f"Not enough space for {what}", where=folder, got=f"{free / 1e6:,.1f} MB free",
                wanted=f"about {needed / 1e6:,.1f} MB", next_step="free space, or use another --workspace"
            )  # fmt: skip

    # ------------------------------------------------------------------ writing

    def replace(
        self, path: str | os.PathLike, writer: Callable[[Path], object], size: int | None = None, *, flush: bool = True
    ) -> None:
        """Let `writer` fill a temporary path, then rename it to `path` in one step.

        Until that step the old file is untouched; when the writer raises, no partial file stays behind.

        Parameters
        ----------
        path : the file to replace; its folders are made.
        writer : called with the temporary path.
        size : bytes that will be written, if known, for the message on a full disk.
        flush : wait for the disk; False for content that is verified by its hash and can be made again after a power
            cut.
        """
        path = Path(path)
        temporary = temporary_path(path)
        with disk_errors(path, lambda: size or (temporary.stat().st_size if temporary.exists() else 0) or None):
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep_temporary_files(path)
            temporary.unlink(missing_ok=True)  # a link there is never followed
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            try:
                writer(temporary)
                if flush:
                    _flush(temporary)
                os.replace(temporary, path)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
        if flush:
            with suppress(OSError):  # the file itself is replaced; systems that open no folders keep the name too
                _flush(path.parent)

    def write(self, path: str | os.PathLike, *parts: bytes | memoryview) -> None:
        """Replace the file in one step by these bytes, one after the other."""

        def fill(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                file.writelines(parts)

        self.replace(path, fill, sum(map(len, parts)))

    def write_json(self, path: str | os.PathLike, obj: object) -> None:
        """Write `obj` as indented JSON in one step, with every secret of this machine removed.

        NaN and infinity are refused because JSON cannot represent them.
        """
        text = json.dumps(redact_values(obj), indent=2, ensure_ascii=False, allow_nan=False)
        self.write(path, f"{text}\n".encode())

    def make_folder(self, path: str | os.PathLike) -> None:
        """Make the folder and its parents if they do not exist."""
        with disk_errors(Path(path)):
            os.makedirs(path, exist_ok=True)

    def remove(self, path: str | os.PathLike) -> None:
        """Delete the file if it exists."""
        with disk_errors(Path(path)):
            _note_removal(Path(path))
            Path(path).unlink(missing_ok=True)

    def remove_folder(self, path: str | os.PathLike) -> None:
        """Delete the folder with everything in it, links themselves and never their targets.

        It is renamed to `.removed-...` first, so that it is gone in one step for every reader; what a killed process
        left under such a name is removed by the next `clean`. Raises FileError, before anything is deleted, where it is
        a link, or another file system is mounted below it.
        """
        path = Path(path)
        with disk_errors(path):
            top = os.lstat(path)
            if not stat.S_ISDIR(top.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "no folder, or a link")
            for folder, _, _ in os.walk(path, onerror=raise_error):
                if os.lstat(folder).st_dev != top.st_dev:
                    raise OSError(errno.EXDEV, f"another file system is mounted at {folder}")
            _note_removal(path)
            if not path.name.startswith(REMOVED):
                path = path.rename(path.with_name(f"{REMOVED}{secrets.token_hex(4)}-{path.name}"[:255]))
            shutil.rmtree(path)


files = Files()


def local_cache_folder(name: str = "") -> Path:
    """Return the folder of the local disk that caches files of this kind; without a name the one above them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ml_factory" / name


def open_regular_file(path: str | os.PathLike) -> Any:
    """Open a regular file for reading. Raises OSError for a pipe, which would never end, and for a device or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a folder, a pipe, a device or a socket, not a regular file")
    return open(descriptor, "rb")


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn an OSError about `path` into a FileError; `needed` returns the bytes wanted, for a full disk."""
    try:
        yield
    except BrokenPipeError:  # of who reads the output, not of a file
        raise
    except OSError as error:
        if error.errno in _FULL:
            size, free = needed(), "a disk that does not report its free space"
            with suppress(FileError):
                free = f"{files.free_bytes(path):,} bytes free"
            raise FileError(
                "No space left on the disk; what was there before is untouched", where=path, got=free,
                wanted="space for the file" if size is None else f"at least {size:,} bytes",
                next_step="free some space (on Google Drive empty the Trash too) and run again"
            ) from error  # fmt: skip
        raise FileError(
            "The disk refused this file", where=path, got=error.strerror or error,
            next_step="check that the folder exists and can be written"
        ) from error  # fmt: skip


# ---------------------------------------------------------------------- replacing in one step


def temporary_path(path: Path) -> Path:
    """Return the temporary path that `path` is written to before the rename."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def _flush(path: Path) -> None:
    """Call fsync on a file or folder; a link fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


def _sweep_temporary_files(path: Path) -> None:
    """Delete temporary files of `path` without a write for an hour: their writers were killed."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            if time.time() - leftover.lstat().st_mtime > _LEFT_SECONDS:
                leftover.unlink()


def _note_removal(path: Path) -> None:
    """Note the objects at or below this path, with their versions in the mirror's ledger; elsewhere do nothing."""
    path = path.absolute()
    mirror = next((folder for folder in path.parents if (folder / LEDGER).is_file()), None)
    if mirror is None:
        return
    name, ledger = path.relative_to(mirror).as_posix(), files.read_json_or_none(mirror / LEDGER) or {}
    with open(mirror / REMOVALS, "a", encoding="utf-8") as file:
        for one, facts in ledger.items():
            if one == name or one.startswith(f"{name}/"):
                file.write(json.dumps([one, facts["version"]]) + "\n")


def flush_to_disk(descriptor: int) -> None:
    """Call fsync, except on file systems that have none."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def raise_error(error: OSError) -> None:
    """Raise what `os.walk` would pass over."""
    raise error


# ---------------------------------------------------------------------- paths


def mount_of(path: str | os.PathLike) -> str | None:
    """Return the mount point that holds `path`, None on a local disk. Never touches the mount itself.

    A mount is another machine's file system in the mount table (Colab's Drive is FUSE), or a folder in
    $ML_FACTORY_MOUNTS (separated by `:`). The root file system never counts: where it hangs, no program runs.
    """
    listed = os.environ.get("ML_FACTORY_MOUNTS", "").split(os.pathsep)
    return _mount_of(os.path.abspath(path), _remote_mounts() | {os.path.abspath(folder) for folder in listed if folder})


def remote_address(given: str | os.PathLike) -> str | None:
    """Return the address of what is in a bucket (gs://…) or on a mount (an absolute path); None on a local disk."""
    address = os.fspath(given)
    if "://" in address:
        return address
    address = os.path.abspath(os.path.expanduser(address))
    return address if mount_of(address) else None


def _mount_of(path: str, tops: set[str], links: int = 0) -> str | None:
    """Return the one of `tops` that the path leads into; links on the way are followed, those inside a mount not."""
    names = path.split("/")
    for end in range(2, len(names) + 1):
        place = "/".join(names[:end])
        if place in tops:
            return place
        with suppress(OSError):  # not a link, or absent
            target = os.path.join(os.path.dirname(place), os.readlink(place), *names[end:])
            return _mount_of(os.path.normpath(target), tops, links + 1) if links < _MOST_LINKS else None
    return None


def _remote_mounts() -> set[str]:
    """Return the mount points at which another machine's file system is mounted last."""
    try:
        lines = os.fsdecode(MOUNTS.read_bytes()).splitlines()
    except OSError:
        return set()
    kinds = {folder.replace("\\040", " "): kind for _, folder, kind, *_ in (line.split(" ") for line in lines)}
    return {folder for folder, kind in kinds.items() if kind.startswith(_REMOTE) and kind not in _LOCAL_FUSE}


def stored_path(folder: str | os.PathLike, *names: object, inside: str | os.PathLike | None = None) -> Path:
    """Return the path of these names, one below the other, in a folder.

    Parameters
    ----------
    folder : not checked itself.
    names : each one plain name of a file or folder.
    inside : a folder above; what is between it and `folder` must not be a link either.

    Raises FileError for a name that is not plain, and for a symbolic link on the way or at the end.
    """
    for name in names:
        if not is_plain_name(name):
            raise FileError(
                "This name cannot be a file's", where=folder, got=repr(name)[:80], wanted="one plain name",
                next_step="restore the file that holds this name, or delete it",
            )  # fmt: skip
    path = Path(folder, *map(str, names))
    below = path.absolute().relative_to(Path(inside or folder).absolute())
    ways = [Path(inside or folder) / way for way in [*reversed(below.parents), below][1:]]
    if link := next(filter(os.path.islink, ways), None):
        raise FileError(
            "A symbolic link is in the place of a file or folder of the workspace", where=link,
            next_step="remove the link",
        )  # fmt: skip
    return path


def is_plain_name(name: object) -> bool:
    """Return True for a name that is one file's or folder's on every system."""
    if not isinstance(name, str) or name in ("", ".", "..") or name != name.rstrip(". ") or _FORBIDDEN.search(name):
        return False
    return len(name.encode()) <= LONGEST_NAME
