"""Compiled GPU and TPU programs, cached in the workspace for the next session.

A compiler reads and writes its cache files itself, in the middle of a training. The cache of a workspace on a mount is
therefore a copy on the local disk: downloaded once, and new files are uploaded in the background.
"""

import logging
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ml_factory.background_thread import BackgroundThread
from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json

FOLDER = "compiled"
_log = logging.getLogger("ml_factory")


def compile_cache_folder(remote: Path) -> Path:
    """Return a compiler's cache folder on a local disk: the folder itself, or a copy of one on a mount.

    A mount that does not answer costs its deadline once per process and a warning: everything is compiled again.
    """
    return _downloaded(Path(remote), os.getpid()) if files.is_remote(remote) else Path(remote)


@lru_cache(maxsize=8)
def _downloaded(remote: Path, process: int) -> Path:
    local = _local_folder(remote)
    try:
        files.make_folder(local)
        files.download_missing(remote, str(local))
    except WorkspaceError as error:
        _log.warning("Compiled programs are not downloaded from the workspace: %s", error)
    return local


def upload_compile_cache(root: Path) -> None:
    """Upload new compiled programs to the mount in the background, unless an earlier upload is still under way."""
    remote, background = Path(root) / FOLDER, _background(os.getpid())
    if files.is_remote(remote) and any(_local_folder(remote).glob("*")) and background.wait(0):
        background.submit(lambda: _upload(remote))


@lru_cache(maxsize=1)
def _background(process: int) -> BackgroundThread:
    """Return the thread that uploads; a forked process has its own."""
    return BackgroundThread("programs")


def _upload(remote: Path) -> None:
    with suppress(WorkspaceError):  # the next save tries again, and a program that never arrives is compiled again
        files.upload_changed(remote, str(_local_folder(remote)))


def _local_folder(remote: Path) -> Path:
    return local_cache_folder(FOLDER) / fingerprint_json(os.path.abspath(remote))[:12]
