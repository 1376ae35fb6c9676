"""Private folders on this machine for files that hold code: compiled kernels and programs.

Numba, TorchInductor, Triton and XLA run what they find in their caches. Such a folder is therefore never in a
workspace, which may be a shared Drive: it is on a local disk, belongs to this user, and has mode 0700.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ml_factory.storage.mounts import mount_of


def private_folder(name: str) -> Path:
    """Return this user's private folder of this name, made where it is missing.

    It is below the user's cache folder; where that is on a mount, cannot be written, or is another user's, below the
    temporary folder, where later processes of this user find it again.
    """
    with suppress(OSError, RuntimeError):  # a RuntimeError where there is no home at all
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if mount_of(cache) is None:
            cache.mkdir(parents=True, exist_ok=True)
            folder = cache / f"ml_factory-{name}"
            folder.mkdir(0o700, exist_ok=True)
            if _is_own(folder):
                folder.chmod(0o700)
                return folder
    prefix = f"ml_factory-{name}-"
    found = [path for path in Path(tempfile.gettempdir()).glob(f"{prefix}*") if _is_own(path)]
    return min(found) if found else Path(tempfile.mkdtemp(prefix=prefix))


def _is_own(folder: Path) -> bool:
    """Return True for a real folder of this user that no other can write to."""
    facts = folder.lstat()
    return folder.is_dir() and not folder.is_symlink() and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
