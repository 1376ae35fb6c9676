"""What a cloud had received when the machine behind it was taken away: any mix of old and new files.

A write goes to the local disk first; the cloud receives some of the versions, never half of one, and lags behind by
whole files. Until the first checkpoint is there everything is received, so that there is something to go on from.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from ml_factory.seeding import generator


class Cloud:
    """The cloud's copy of `root` in `folder`. share : of the written versions, how many it receives."""

    def __init__(self, root: Path, folder: Path, seed: int, share: float = 0.6):
        self.root, self.folder, self.share = root, folder, share
        self.luck: np.random.Generator = generator("cloud", seed)

    def written(self, path: str | os.PathLike, kept: bool) -> None:
        """A file was written; perhaps the cloud receives it. kept : whether it has a checkpoint already."""
        path = Path(os.path.abspath(path))
        if not path.is_relative_to(self.root) or not path.is_file():
            return
        if not kept or self.luck.random() < self.share:
            there = self.folder / path.relative_to(self.root)
            there.parent.mkdir(parents=True, exist_ok=True)
            aside = there.with_name(f".{there.name}.uploading")
            shutil.copyfile(path, aside)
            os.replace(aside, there)


def lose_machine(root: Path, home: Path, folder: Path) -> None:
    """The local disk is gone, caches too; the workspace is what the cloud had received."""
    for gone in (root, home):
        shutil.rmtree(gone, ignore_errors=True)
    home.mkdir(parents=True)
    shutil.copytree(folder, root, ignore=shutil.ignore_patterns(".*.uploading"))
