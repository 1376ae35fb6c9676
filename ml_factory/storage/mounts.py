"""Mounted file systems of other machines, found in the mount table without touching them: one that hangs blocks whoever
asks as little as a file's size.
"""

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
_REMOTE = ("fuse", "nfs", "cifs", "smb", "9p", "ceph", "davfs")
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs", "fusectl")
_MOST_LINKS = 40


def mount_of(path: str | os.PathLike) -> str | None:
    """Return the mount point that holds `path`, None on a local disk. Never touches the mount itself.

    A mount is another machine's file system in the mount table (Colab's Drive is FUSE), or a folder in
    $ML_FACTORY_MOUNTS (separated by `:`). The root file system never counts: where it hangs, no program runs.
    """
    table = _remote_mounts()
    listed = os.environ.get("ML_FACTORY_MOUNTS", "").split(os.pathsep)
    tops = {os.path.abspath(folder) for folder in listed if folder}
    tops |= {_followed(folder, table)[0] for folder in tops}
    return _followed(os.path.abspath(path), table | tops)[1]


def _followed(path: str, tops: set[str]) -> tuple[str, str | None]:
    """Return (the path with its links followed, the mount it leads into); links inside a mount are not followed."""
    waiting, place, links = path.split("/")[1:], "", 0
    while waiting:
        place = f"{place}/{waiting.pop(0)}"
        if place in tops:
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


def _remote_mounts() -> set[str]:
    """Return the mount points at which another machine's file system is mounted last."""
    try:
        lines = os.fsdecode(MOUNTS.read_bytes()).splitlines()
    except OSError:
        return set()
    kinds = {folder.replace("\\040", " "): kind for _, folder, kind, *_ in (line.split(" ") for line in lines)}
    return {folder for folder, kind in kinds.items() if kind.startswith(_REMOTE) and kind not in _LOCAL_FUSE}
