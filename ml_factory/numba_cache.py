"""Private folders on this machine for files that hold code: compiled programs, and one for the numba kernels of each
state of the sources.

Numba, TorchInductor, Triton and XLA run what they find in their caches. Such a folder is therefore never in a
workspace, which may be a shared Drive: it is on a local disk, belongs to this user, and has mode 0700.

Numba keeps a compiled function until its own file changes, and does not notice changes of functions in other files that
it calls: after an update it would use the old code. So the folder's name is a hash of every file that compiles
something.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ml_factory.storage.files import local_cache_folder, mount_of

KEEP = 3
# A process may still write to a folder of other sources, such as a second checkout.
_LIVELY_SECONDS = 24 * 3600
_PACKAGE = Path(__file__).parent


def numba_sources_hash(package: Path = _PACKAGE) -> str:
    """Return the hash of names and contents of the files below `package` that compile something."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if b"njit" in (content := path.read_bytes()):
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def set_numba_cache_folder() -> None:
    """Set NUMBA_CACHE_DIR to this state's folder, unless it is set; delete folders unused for a day beyond the
    newest.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = private_folder("kernels") / numba_sources_hash()
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    for old in sorted(folder.parent.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)[KEEP:]:
        if time.time() - old.lstat().st_mtime > _LIVELY_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:  # its settings are read already
        sys.modules["numba"].config.CACHE_DIR = str(folder)


def private_folder(name: str) -> Path:
    """Return this user's private folder of this name, made where it is missing.

    It is below the user's cache folder; where that is on a mount, cannot be written, or is another user's, below the
    temporary folder, where later processes of this user find it again.
    """
    with suppress(OSError, RuntimeError):  # a RuntimeError where there is no home at all
        folder = local_cache_folder().with_name(f"ml_factory-{name}")
        if mount_of(folder) is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
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
