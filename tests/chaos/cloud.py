"""The machine a chain of lives is lived on, and what is left of it when it is taken away.

`Disk`: a local folder; what a lost one leaves is a random part of its newest files. `Mounted`: the workspace lies on a
Drive of tests/faults, which uploads late and in any order; what a lost one leaves is what its cloud had received.
"""

import shutil
from pathlib import Path

from ml_factory.seeding import seeded_generator
from tests.faults.mount import Mount


class Disk:
    """A workspace and a home on a local disk, both below `folder`."""

    def __init__(self, folder: Path, template: Path, seed: int):
        self.folder, self.home, self.seed = folder, folder / "home", seed
        self.root = self._filled(template)
        self.home.mkdir()

    def _filled(self, template: Path) -> Path:
        return Path(shutil.copytree(template, self.folder / "workspace"))

    def secure(self) -> None:
        """Make the present files survive a loss: called once, after the first checkpoint."""

    def lose(self) -> None:
        """A fresh machine: empty caches, and the workspace without some of what was written last."""
        luck = seeded_generator("lost", self.seed)
        self.seed += 1
        slots = sorted((self.root / "checkpoints").glob("slot-*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        for path in slots[1:]:  # the first save was secured
            if luck.random() < 0.4:
                path.unlink()
        for path in (self.root / "checkpoints").glob("slot-*.json"):
            if luck.random() < 0.5:
                path.unlink()
        for path in sorted((self.root / "results").rglob("*")):
            if path.is_file() and luck.random() < 0.3:
                path.unlink()
        self._empty_home()

    def _empty_home(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()

    def remove(self) -> None:
        """All of it."""
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Leave it to be looked at."""


class Mounted(Disk):
    """The workspace on a Drive that uploads at some calls, whole files in any order. Raises NoMount."""

    def _filled(self, template: Path) -> Path:
        shutil.copytree(template, self.folder / "cloud" / "workspace")
        self.mount = Mount(self.folder, seed=self.seed, uploads=0.1)
        return self.mount.path / "workspace"

    def secure(self) -> None:
        self.mount.upload()

    def lose(self) -> None:
        self.mount.remount()
        self._empty_home()

    def close(self) -> None:
        self.mount.unmount()
