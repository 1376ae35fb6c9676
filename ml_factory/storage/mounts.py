"""Mounted file systems of other machines, found in the mount table without touching them: one that hangs blocks whoever
asks as little as a file's size.
"""

import os
from contextlib import suppress
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
    listed = os.environ.get("ML_FACTORY_MOUNTS", "").split(os.pathsep)
    return _mount_of(os.path.abspath(path), _remote_mounts() | {os.path.abspath(folder) for folder in listed if folder})


def _mount_of(path: str, tops: set[str], links: int = 0) -> str | None:
    """Return the one of `tops` that the path leads into; links on the way are followed, those inside a mount not."""
    names = path.split("/")
    for end in range(2, len(names) + 1):
        place = "/".join(names[:end])
        if place in tops:
            return place
        with suppress(OSError):  # not a link, or absent
            target = os.path.join(os.path.dirname(place), os.readlink(place), *names[end:])
            return _mount_of(os.path.normpath(target), tops, links + 1) if links < _MOST_LINKS else None
    return None


def _remote_mounts() -> set[str]:
    """Return the mount points at which another machine's file system is mounted last."""
    try:
        lines = os.fsdecode(MOUNTS.read_bytes()).splitlines()
    except OSError:
        return set()
    kinds = {folder.replace("\\040", " "): kind for _, folder, kind, *_ in (line.split(" ") for line in lines)}
    return {folder for folder, kind in kinds.items() if kind.startswith(_REMOTE) and kind not in _LOCAL_FUSE}
