"""Detection of mounted file systems by the mount table, without touching the mount itself."""

import os
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
_REMOTE = ("fuse", "nfs", "cifs", "smb", "9p", "ceph", "davfs")
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fusectl")
_MOST_LINKS = 40


def on_mount(path: str | os.PathLike) -> bool:
    """Return True when the path's file system is another machine's: slow, and gone when the connection is.

    Known from the mount table, where Colab's Drive is FUSE, and from the folders in $ML_FACTORY_MOUNTS (separated by
    `:`). The root file system never counts as a mount: where it hangs, no program runs.
    """
    return mount_of(path) is not None


def mount_of(path: str | os.PathLike) -> str | None:
    """Return the mount point that holds `path`, None on a local disk. Never touches the mount itself."""
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
    found = {}
    with suppress(OSError), open(MOUNTS, encoding="utf-8") as mounts:
        for line in mounts:
            _, folder, kind, *_ = line.split(" ")
            found[folder.replace("\\040", " ")] = kind.startswith(_REMOTE) and kind not in _LOCAL_FUSE
    return found
