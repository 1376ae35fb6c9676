"""Where compiled kernels are kept between runs: a folder of their own for each state of the sources.

Numba keeps a compiled function until its own file changes, and does not see that a function it calls, in another file,
has changed: after an update it would go on with the old one. So the folder's name is a hash of every file that compiles
something.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

KEEP = 3
# A process may still be writing to a folder of other sources, two checkouts side by side for one.
_LIVELY_SECONDS = 24 * 3600
_PACKAGE = Path(__file__).parent


def sources_hash(package: Path = _PACKAGE) -> str:
    """Hex digest of the names and contents of the files below `package` that compile something."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        if b"njit" in content:
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def keep_kernels() -> None:
    """Point numba to this state's folder, unless NUMBA_CACHE_DIR says otherwise; folders of older states go
    when nobody has used them for a day."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = _root() / sources_hash()
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[KEEP:]:
        if time.time() - old.stat().st_mtime > _LIVELY_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:  # it has read its settings already
        sys.modules["numba"].config.CACHE_DIR = str(folder)


def _root() -> Path:
    """The user's cache folder, or one below the temporary folder where that cannot be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ml_factory-kernels"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"ml_factory-kernels-{owner}"
