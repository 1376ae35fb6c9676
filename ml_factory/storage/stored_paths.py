"""Paths made of names that stand in a file, a bucket or a service: never outside their folder, never through a link.

Every user of a shared workspace can choose such a name: the run of an artifact, a part of prepared data, an object
of a bucket, a file at W&B.
"""

import os
import re
from pathlib import Path

from ml_factory.errors import FileError

LONGEST_NAME = 255  # bytes, of most file systems
# Separators and drives of any system, control characters, halves of surrogate pairs.
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]|^[A-Za-z]:")


def stored_path(folder: str | os.PathLike, *names: object, inside: str | os.PathLike | None = None) -> Path:
    """Return the path of these names, one below the other, in a folder.

    Parameters
    ----------
    folder : not checked itself.
    names : each one plain name of a file or folder.
    inside : a folder above; what is between it and `folder` must not be a link either.

    Raises FileError for a name that is not plain, and for a symbolic link on the way or at the end.
    """
    for name in names:
        if not is_plain_name(name):
            raise FileError(
                "This name cannot be a file's", where=folder, got=repr(name)[:80], wanted="one plain name",
                next_step="restore the file that holds this name, or delete it",
            )  # fmt: skip
    path = Path(folder, *map(str, names))
    below = path.absolute().relative_to(Path(inside or folder).absolute())
    ways = [Path(inside or folder) / way for way in [*reversed(below.parents), below][1:]]
    if link := next(filter(os.path.islink, ways), None):
        raise FileError(
            "A symbolic link is in the place of a file or folder of the workspace", where=link,
            next_step="remove the link",
        )  # fmt: skip
    return path


def is_plain_name(name: object) -> bool:
    """Return True for a name that is one file's or folder's on every system."""
    if not isinstance(name, str) or name in ("", ".", "..") or name != name.rstrip(". ") or _FORBIDDEN.search(name):
        return False
    return len(name.encode()) <= LONGEST_NAME
