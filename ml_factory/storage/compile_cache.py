"""What compilers have made for a GPU or a TPU, kept with the workspace for the next session.

A compiler reads and writes its files itself, in the middle of a training. So those of a workspace on a mount are a copy
on this machine's disk: brought once, and what is new is taken to the mount beside the training.
"""

import logging
import os
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage import file_access
from ml_factory.storage.atomic_files import cache_folder, disk_errors, fingerprint
from ml_factory.storage.mount_table import on_mount

FOLDER = "compiled"
_log = logging.getLogger("ml_factory")
_carriers: dict[Path, threading.Thread] = {}


def compile_cache_folder(there: Path) -> Path:
    """Where a compiler may work, on a disk of this machine: the folder itself, or a copy of one on a mount.

    A mount that does not answer costs its deadline once in a process, and a line: everything is compiled anew.
    """
    return _copy_of(Path(there), os.getpid()) if on_mount(there) else Path(there)


@lru_cache(maxsize=8)
def _copy_of(there: Path, process: int) -> Path:
    here = _here(there)
    try:
        with disk_errors(there):
            here.mkdir(parents=True, exist_ok=True)
            file_access.download_missing(there, str(here))
    except WorkspaceError as error:
        _log.warning("Compiled programs are not taken from the workspace: %s", error)
    return here


def upload_compile_cache(root: Path) -> None:
    """Take what is new to the mount, in a thread that nobody waits for; one that hangs is not joined by others."""
    there = Path(root) / FOLDER
    carrier = _carriers.get(there)
    if not on_mount(there) or not any(_here(there).glob("*")) or (carrier is not None and carrier.is_alive()):
        return
    _carriers[there] = threading.Thread(target=_carry, args=(there,), name="programs", daemon=True)
    _carriers[there].start()


def _carry(there: Path) -> None:
    with suppress(OSError):  # the next save tries again, and what never arrives is compiled anew
        file_access.upload_changed(there, str(_here(there)))


def _here(there: Path) -> Path:
    return cache_folder(FOLDER) / fingerprint(os.path.abspath(there))[:12]
