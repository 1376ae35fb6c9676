"""Compiled GPU and TPU programs, cached in the workspace for the next session.

A compiler reads and writes its cache files itself, in the middle of a training. The cache of a workspace on a mount is
therefore a copy on the local disk: downloaded once, and new files are uploaded in the background.
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
_uploads: dict[Path, threading.Thread] = {}


def compile_cache_folder(remote: Path) -> Path:
    """Return a compiler's cache folder on a local disk: the folder itself, or a copy of one on a mount.

    A mount that does not answer costs its deadline once per process and a warning: everything is compiled again.
    """
    return _downloaded(Path(remote), os.getpid()) if on_mount(remote) else Path(remote)


@lru_cache(maxsize=8)
def _downloaded(remote: Path, process: int) -> Path:
    local = _local_folder(remote)
    try:
        with disk_errors(remote):
            local.mkdir(parents=True, exist_ok=True)
            file_access.download_missing(remote, str(local))
    except WorkspaceError as error:
        _log.warning("Compiled programs are not downloaded from the workspace: %s", error)
    return local


def upload_compile_cache(root: Path) -> None:
    """Upload new compiled programs to the mount in a daemon thread; a thread that hangs is not joined by a second
    one.
    """
    remote = Path(root) / FOLDER
    upload = _uploads.get(remote)
    if not on_mount(remote) or not any(_local_folder(remote).glob("*")) or (upload is not None and upload.is_alive()):
        return
    _uploads[remote] = threading.Thread(target=_upload, args=(remote,), name="programs", daemon=True)
    _uploads[remote].start()


def _upload(remote: Path) -> None:
    with suppress(OSError):  # the next save tries again, and a program that never arrives is compiled again
        file_access.upload_changed(remote, str(_local_folder(remote)))


def _local_folder(remote: Path) -> Path:
    return cache_folder(FOLDER) / fingerprint(os.path.abspath(remote))[:12]
