"""A stand-in for `google.colab`: what this project calls of it, with the names, printed lines and errors of
googlecolab/colabtools (August 2026). It lives in sys.modules alone: a folder named google would hide google.auth.

    install()
    from google.colab import drive
"""

import importlib
import os
import sys
import types
from pathlib import Path

_unmounted: set[str] = set()
_mounts: set[str] = set()


class Error(Exception):
    """Base of Colab's errors."""


class SecretNotFoundError(Error):
    """There is no such secret."""

    def __init__(self, key):
        super().__init__(f"Secret {key} does not exist.")


class TimeoutException(Error):
    """No page answered."""

    def __init__(self, key):
        super().__init__(f"Requesting secret {key} timed out. Secrets can only be fetched from the Colab page.")


class NotebookAccessError(Exception):
    """This notebook was not given access to the secret."""

    def __init__(self, key):
        super().__init__(f"Notebook does not have access to secret {key}")


def get(key):
    """Return the secret of that name: the environment variable."""
    if key not in os.environ:
        raise SecretNotFoundError(key)
    return os.environ[key]


def mount(mountpoint, force_remount=False, timeout_ms=120000, readonly=False):
    """Make a plain folder with MyDrive in it."""
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    drive = Path(mountpoint) / "MyDrive"
    if drive.is_dir() and mountpoint not in _unmounted and not force_remount:
        print(
            f"Drive already mounted at {mountpoint}; to attempt to forcibly remount, "
            f'call drive.mount("{mountpoint}", force_remount=True).'
        )
        return
    if drive.parent.is_dir() and not drive.is_dir() and any(drive.parent.iterdir()):
        raise ValueError("Mountpoint must not already contain files")
    if not drive.parent.parent.exists():
        raise ValueError("Mountpoint must be in a directory that exists")
    drive.mkdir(parents=True, exist_ok=True)
    _unmounted.discard(mountpoint)
    _mounts.add(mountpoint)
    print(f"Mounted at {mountpoint}")


def flush_and_unmount(timeout_ms=24 * 60 * 60 * 1000):
    """Flush and unmount, both: there is no call that only flushes. The files stay, and the next mount finds them."""
    if not _mounts:
        print("Drive not mounted, so nothing to flush and unmount.")
    _unmounted.update(_mounts)
    _mounts.clear()


def authenticate_user(clear_output=True, project_id=None):
    """Sign the person in."""


def download(filename):
    """Send a file to the browser."""
    if not os.path.exists(filename):
        raise FileNotFoundError(f"Cannot find file: {filename}")


MODULES = {
    "errors": (Error,), "userdata": (get, SecretNotFoundError, TimeoutException, NotebookAccessError),
    "drive": (mount, flush_and_unmount), "auth": (authenticate_user,), "files": (download,),
}  # fmt: skip


def install() -> None:
    """Register the stand-in in this process."""
    google, colab = importlib.import_module("google"), types.ModuleType("google.colab")
    google.colab, colab.__path__ = colab, []
    sys.modules["google.colab"] = colab
    for name, members in MODULES.items():
        module = sys.modules[f"google.colab.{name}"] = types.ModuleType(f"google.colab.{name}")
        setattr(colab, name, module)
        for member in members:
            setattr(module, member.__name__, member)


def uninstall() -> None:
    """Remove it."""
    for name in ("google.colab", *(f"google.colab.{part}" for part in MODULES)):
        sys.modules.pop(name, None)
    vars(sys.modules["google"]).pop("colab", None)
