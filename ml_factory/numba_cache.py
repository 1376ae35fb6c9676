"""Cache folder of compiled numba kernels: one folder for each state of the sources.

Numba keeps a compiled function until its own file changes, and does not notice changes of functions in other files that
it calls: after an update it would use the old code. So the folder's name is a hash of every file that compiles
something. Numba unpickles what it finds there, so the folder is private (`storage.private_folder`).
"""

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

from ml_factory.storage.private_folder import private_folder

KEEP = 3
# A process may still write to a folder of other sources, such as a second checkout.
_LIVELY_SECONDS = 24 * 3600
_PACKAGE = Path(__file__).parent


def numba_source_files(package: Path = _PACKAGE) -> dict[Path, bytes]:
    """Return paths and contents of the files below `package` that compile something, sorted by path."""
    contents = {path: path.read_bytes() for path in sorted(package.rglob("*.py"))}
    return {path: content for path, content in contents.items() if b"njit" in content}


def numba_sources_hash(package: Path = _PACKAGE) -> str:
    """Return the hash of names and contents of the files below `package` that compile something."""
    digest = hashlib.sha256()
    for path, content in numba_source_files(package).items():
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def list_unused_kernel_folders(keep: int = 0) -> list[Path]:
    """List the folders of kernels of other sources, without the `keep` newest, that no process used for a day."""
    if "NUMBA_CACHE_DIR" in os.environ and not _is_own_cache(Path(os.environ["NUMBA_CACHE_DIR"])):
        return []
    folder = private_folder("kernels")
    found = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)[keep:]
    old = [one for one in found if time.time() - one.lstat().st_mtime > _LIVELY_SECONDS]
    return [one for one in old if one.name != numba_sources_hash()]


def _is_own_cache(folder: Path) -> bool:
    return folder.parent == private_folder("kernels")


def set_numba_cache_folder() -> None:
    """Set NUMBA_CACHE_DIR to this state's folder, unless it is set; delete folders unused for a day beyond the
    newest.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = private_folder("kernels") / numba_sources_hash()
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for old in list_unused_kernel_folders(KEEP):
        shutil.rmtree(old, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:  # its settings are read already
        sys.modules["numba"].config.CACHE_DIR = str(folder)
