"""Files from which an unfinished run resumes: the newest intact checkpoint of each phase, and what its finished parts
left in its folder (fold-lstm-1-of-5.state ...).
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    parts : (folder, pattern of names) of files that finished parts leave.
    """

    run: str
    checkpoints: str
    parts: Sequence[Sequence[str]] = ()

    def to_dict(self) -> dict:
        return asdict(self)

    def content(self) -> dict[str, object]:
        """Return the present content: name -> the checkpoint's hash, or a file's size, since a finished part is
        written once. Raises WorkspaceError where the disk refuses.
        """
        found: dict[str, object] = {name: infos[0]["hash"] for name, infos in self._phases()}
        return found | {path.name: files.size(path) for path in self._parts()}

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
        for path in self._parts():
            (target / path.name).write_bytes(files.read(path))
        return sorted(target.iterdir())

    def restore(self, folder: Path) -> int:
        """Copy the files that `pack` made to their places, where nothing is yet; return their number.

        Everything is verified first. Raises CheckpointError where a checkpoint is damaged or another run's.
        """
        copies = []
        for path in sorted(folder.iterdir()):
            target = next((Path(target) for target, pattern in self.parts if path.match(pattern)), None)
            if target is not None:
                copies.append((stored_path(target, path.name), path))
                continue
            info = verify_checkpoint(path)
            if info["run"] != self.run:
                raise CheckpointError("This is the checkpoint of another run", where=path.name, got=info["run"])
            copies.append((stored_path(Path(self.checkpoints) / self.run, f"{info['phase']}.0.ckpt"), path))
        for target, path in copies:
            if not files.is_file(target):
                files.write(target, files.read(path))
        return len(copies)

    def _phases(self) -> Iterator[tuple[str, list[dict]]]:
        """Yield (name of its copy, descriptions of its checkpoints, newest first) of each phase."""
        folder = CheckpointFolder(self.checkpoints, 1)
        for phase in folder.phases(self.run):
            if infos := folder.infos(self.run, phase):
                yield f"{phase}.ckpt", infos

    def _parts(self) -> Iterator[Path]:
        for folder, pattern in self.parts:
            yield from (Path(folder) / name for name in fnmatch.filter(files.names(folder), pattern))
