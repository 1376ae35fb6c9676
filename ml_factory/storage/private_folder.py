"""Private folders on this machine for files that hold code: compiled kernels and programs.

Numba, TorchInductor, Triton and XLA run what they find in their caches. Such a folder is therefore never in a
workspace, which may be a shared Drive, nor under a name that another user can occupy: it is on a local disk, belongs to
this user, and has mode 0700, below folders in which no other user can rename it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ml_factory.storage.mounts import mount_of

_PRIVATE, _WRITABLE_BY_OTHERS = 0o700, 0o022
_held: dict[Path, int] = {}  # folders that this process uses, and their descriptors


def private_folder(name: str) -> Path:
    """Return this user's private folder of this name, made where it is missing.

    It is below the user's cache folder; where that is on a mount, cannot be written, or is open to others, below the
    temporary folder under a random name, which later processes of this user find again.
    """
    with suppress(OSError, RuntimeError):  # a RuntimeError where there is no home at all
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache.resolve() / f"ml_factory-{name}"
        if mount_of(folder) is None and _make_private(folder):
            return folder
    return temporary_private_folder(name)


def hold_folder(folder: Path) -> None:
    """Mark a folder as in use until this process and its children end, however they end."""
    if folder in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _held[folder] = descriptor


def is_folder_held(folder: Path) -> bool:
    """Return whether a process uses the folder; also True where the file system has no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _make_private(folder: Path) -> bool:
    """Make the folder, or the existing one, private; return False where another user could exchange it."""
    with suppress(FileExistsError):
        folder.mkdir(_PRIVATE)
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        return False
    if not all(_is_protected(parent) for parent in folder.parents):
        return False
    os.chmod(folder, _PRIVATE)
    if facts.st_mode & _WRITABLE_BY_OTHERS:  # its content may be another user's
        for path in list(folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return _is_private(folder)


def _is_protected(folder: Path) -> bool:
    """Return True where no other user, except root, can rename what is in the folder and is not theirs."""
    facts = os.lstat(folder)
    closed = not facts.st_mode & _WRITABLE_BY_OTHERS or facts.st_mode & stat.S_ISVTX
    return facts.st_uid in (0, os.geteuid()) and bool(closed)


def _is_private(folder: Path) -> bool:
    """Return True for a real folder of this user with mode 0700."""
    facts = os.lstat(folder)
    own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return own and stat.S_IMODE(facts.st_mode) == _PRIVATE and os.access(folder, os.W_OK)


def temporary_private_folder(name: str) -> Path:
    """Return a private folder below the temporary folder: that of an earlier process of this user, or a new one."""
    place, prefix = Path(tempfile.gettempdir()), f"ml_factory-{name}-"
    if mount_of(place) is None:  # a mount may show any owner
        for folder in sorted(place.glob(f"{prefix}*")):
            with suppress(OSError):
                if _is_private(folder):
                    return folder
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
