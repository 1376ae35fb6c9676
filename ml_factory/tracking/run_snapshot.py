"""Files from which an unfinished run resumes: the newest intact checkpoint of each phase, and what its finished parts
left in its folder (fold-lstm-1-of-5.state ...).
"""

import fnmatch
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ml_factory.checkpoints.checkpoint_file import verify_checkpoint
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.errors import CheckpointError
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path


@dataclass(frozen=True)
class RunSnapshot:
    """Locations of one run's resumable files.

    Parameters
    ----------
    run : its id.
    checkpoints : folder of all runs' checkpoints.
    parts, pattern : folder and names of the files that finished parts leave.
    """

    run: str
    checkpoints: str
    parts: str
    pattern: str

    def content(self) -> dict[str, object]:
        """Return the present content: name -> the checkpoint's hash, or a file's size, since a finished part is
        written once. Raises WorkspaceError where the disk refuses.
        """
        found: dict[str, object] = {name: infos[0]["hash"] for name, infos in self._phases()}
        return found | {path.name: files.size(path) for path in self._part_files()}

    def pack(self, target: Path) -> list[Path]:
        """Copy all files into an empty folder and return the copies, each checkpoint verified. Raises WorkspaceError,
        OSError.
        """
        for name, infos in self._phases():
            for info in infos:
                (target / name).write_bytes(files.read(info["path"]))
                with suppress(CheckpointError):  # torn, or overwritten just now: the one before is tried
                    verify_checkpoint(target / name)
                    break
                (target / name).unlink()
        for path in self._part_files():
            (target / path.name).write_bytes(files.read(path))
        return sorted(target.iterdir())

    def restore(self, folder: Path) -> None:
        """Copy the files that `pack` made to their places, where nothing is yet.

        Everything is verified first. Raises CheckpointError where a checkpoint is damaged or another run's.
        """
        copies = {}
        for path in folder.iterdir():
            if path.match(self.pattern):
                copies[stored_path(self.parts, path.name)] = path
                continue
            info = verify_checkpoint(path)
            if info["run"] != self.run:
                raise CheckpointError("This is the checkpoint of another run", where=path.name, got=info["run"])
            copies[stored_path(Path(self.checkpoints) / self.run, f"{info['phase']}.0.ckpt")] = path
        for target, path in copies.items():
            if not files.is_file(target):
                files.write(target, files.read(path))

    def _phases(self) -> Iterator[tuple[str, list[dict]]]:
        """Yield (name of its copy, descriptions of its checkpoints, newest first) of each phase."""
        folder = CheckpointFolder(self.checkpoints, 1)
        for phase in folder.phases(self.run):
            if infos := folder.infos(self.run, phase):
                yield f"{phase}.ckpt", infos

    def _part_files(self) -> list[Path]:
        return [Path(self.parts) / name for name in fnmatch.filter(files.names(self.parts), self.pattern)]
