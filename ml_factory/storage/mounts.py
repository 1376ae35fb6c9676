"""Mounted file systems: found in the mount table without touching them, and used through child processes.

A mount that hangs blocks any process that asks as little as a file's size, and keeps that process from ending. Each
operation on a mount therefore runs in a child (`worker_process`) with a deadline. After a timeout the mount gets two
seconds per operation until it answers again: twenty operations on a dead mount do not take twenty times half a minute.
"""

import errno
import functools
import os
from pathlib import Path
from typing import Any

from ml_factory.errors import UnresponsiveMountError
from ml_factory.storage.worker_process import WorkerProcess, WorkerUnavailableError

# Seconds without a reply: of a mount that has answered so far, of one that has not.
DEADLINE, RETRY_DEADLINE = 30.0, 2.0
MOUNTS = Path("/proc/self/mounts")
_REMOTE = ("fuse", "nfs", "cifs", "smb", "9p", "ceph", "davfs")
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fusectl")
_MOST_LINKS = 40
_DISCONNECTED = (errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN)


class Mount:
    """One mount as this process reaches it: through a pool of idle children; a thread that finds none starts one.

    Parameters
    ----------
    top : mount point.
    module : its `serve` runs the requests in a child.
    """

    def __init__(self, top: str, module: str):
        self._top, self._module, self._idle, self.unresponsive = top, module, [], False

    def call(self, operation: str, path: str | os.PathLike, args: tuple) -> Any:
        """Run an operation in a child. Raises OSError as the operation does, UnresponsiveMountError where the mount
        does not answer in time or is disconnected.
        """
        seconds = min(RETRY_DEADLINE, DEADLINE) if self.unresponsive else DEADLINE
        try:
            child = self._idle.pop()
        except IndexError:
            child = WorkerProcess(self._module, [], self._top, seconds)
        try:
            answer, content = child.call({"do": operation, "path": os.path.abspath(path), "args": args}, seconds)
        except WorkerUnavailableError as error:
            raise self._no_answer(path, error) from error
        self.unresponsive = False
        self._idle.append(child)
        if answer.get("errno") in _DISCONNECTED:
            raise self._no_answer(path, answer["strerror"])
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], str(path))
        return content if answer["raw"] else answer["result"]

    def _no_answer(self, path: str | os.PathLike, reason: object) -> UnresponsiveMountError:
        self.unresponsive = True
        return UnresponsiveMountError(
            "The mount does not answer; nothing there was changed", where=path, got=reason,
            next_step="mount it again (on Colab: run the setup cell), then run this again"
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def mount_at(top: str, module: str, process: str) -> Mount:
    """Return the handle of the mount at `top`; a forked process has its own."""
    return Mount(top, module)


def mount_of(path: str | os.PathLike) -> str | None:
    """Return the mount point that holds `path`, None on a local disk. Never touches the mount itself.

    A mount is another machine's file system in the mount table (Colab's Drive is FUSE), or a folder in
    $ML_FACTORY_MOUNTS (separated by `:`). The root file system never counts: where it hangs, no program runs.
    """
    table = _table()
    listed = os.environ.get("ML_FACTORY_MOUNTS", "").split(os.pathsep)
    tops = {os.path.abspath(folder) for folder in listed if folder}
    tops |= {_followed(folder, table)[0] for folder in tops}
    return _followed(os.path.abspath(path), table, tops)[1]


def _followed(path: str, table: dict[str, bool], tops: set[str] = frozenset()) -> tuple[str, str | None]:
    """Return (the path with its links followed, the mount it leads into); links inside a mount are not followed."""
    waiting, place, links = path.split("/")[1:], "", 0
    while waiting:
        place = f"{place}/{waiting.pop(0)}"
        if place in tops or table.get(place):
            return "/".join([place, *waiting]), place
        try:
            target = os.readlink(place)
        except OSError:  # not a link, or absent
            continue
        links += 1
        if links > _MOST_LINKS:
            break
        target = os.path.normpath(os.path.join(os.path.dirname(place), target))
        waiting, place = [*target.split("/")[1:], *waiting], ""
    return place or "/", None


def _table() -> dict[str, bool]:
    """Return {mount point: True when the file system mounted there last is another machine's}."""
    try:
        return _parsed(MOUNTS.read_bytes())
    except OSError:
        return {}


@functools.lru_cache(maxsize=2)
def _parsed(table: bytes) -> dict[str, bool]:
    """Return `_table` of a mount table's text; cached, because every access to a file asks for it."""
    found = {}
    for line in os.fsdecode(table).splitlines():
        _, folder, kind, *_ = line.split(" ")
        found[folder.replace("\\040", " ")] = kind.startswith(_REMOTE) and kind not in _LOCAL_FUSE
    return found
