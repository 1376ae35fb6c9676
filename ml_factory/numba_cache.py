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
