"""Resumable snapshot of an unfinished run: packed from its files, restored where there are none.

{run}--{phase}.ckpt       the newest intact checkpoint of each phase
forecasts-lstm.state …    files that finished parts of the run have left in its folder
parts.json                the run's id, and the hash of each file
"""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ml_factory.checkpoints.checkpoint_file import verify_checkpoint
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.errors import CheckpointError
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path

PARTS = "parts.json"


@dataclass(frozen=True)
class RunSnapshot:
    """Locations of one run's resumable files.

    Parameters
    ----------
    run : its id.
    pool : folder of the checkpoints.
    files : (folder, pattern of names) of files that finished parts leave.
    """

    run: str
    pool: str
    files: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_dict(cls, fields: dict) -> "RunSnapshot":
        files = tuple((folder, pattern) for folder, pattern in fields["files"])
        return cls(fields["run"], fields["pool"], files)

    def to_dict(self) -> dict:
        return asdict(self)

    def content(self) -> dict[str, object]:
        """Return the present content: name -> the checkpoint's hash, or a file's size, since a finished part is
        written once.

        Cheap; {} without content. Raises WorkspaceError where a disk refuses or a mount does not answer.
        """
        found: dict[str, object] = {name: infos[0]["hash"] for name, infos in self._phases().items()}
        for file in self._files():
            found[file.name] = files.size(file)
        return found

    def size(self) -> int:
        """Return the bytes that `pack` would copy, approximately. Raises WorkspaceError as `content`."""
        newest = [Path(infos[0]["path"]) for infos in self._phases().values()]
        return sum(files.size(file) for file in [*newest, *self._files()])

    def pack(self, target: Path) -> dict:
        """Copy all files into an empty folder; return {"run", "fences": {name: its fence}} of the copies.

        Of each phase the newest intact checkpoint is copied. Raises WorkspaceError where the disk of a
        source refuses, OSError where that of the target does.
        """
        fences = {}
        for name, infos in self._phases().items():
            for info in infos:
                with suppress(CheckpointError):  # torn, or overwritten just now: try the one before
                    (target / name).write_bytes(files.read(info["path"]))
                    fences[name] = verify_checkpoint(target / name)["lease"]["fence"]
                    break
                (target / name).unlink()
        for file in self._files():
            (target / file.name).write_bytes(files.read(file))
        packed = [name for name in sorted(path.name for path in target.iterdir()) if (target / name).stat().st_size]
        parts = {name: files.sha256(target / name) for name in packed}
        (target / PARTS).write_text(json.dumps({"run": self.run, "files": parts}))
        return {"run": self.run, "fences": fences}

    def restore_into(self, folder: Path) -> int:
        """Restore the files that `pack` copied: checkpoints and finished parts to their folders; return
        their number.

        Everything is verified first. Raises CheckpointError where a file is missing, changed or another run's.
        """
        manifest = files.read_json(folder / PARTS)
        if (
            not isinstance(manifest, dict)
            or manifest.get("run") != self.run
            or not isinstance(manifest.get("files"), dict)
        ):
            raise CheckpointError("These are not the checkpoints of this run", where=self.run)
        copies: list[tuple[Path, Path]] = []
        for name, digest in manifest["files"].items():
            file = stored_path(folder, name)
            if not files.is_file(file) or files.sha256(file) != digest:
                raise CheckpointError("A part of these checkpoints is missing or was changed", where=name)
            target = next((target for target, pattern in self.files if file.match(pattern)), None)
            if target is not None:
                copies.append((stored_path(target, file.name), file))
                continue
            info = verify_checkpoint(file)
            if info["run"] != self.run:
                raise CheckpointError("This is the checkpoint of another run", where=name, got=info["run"])
            copies.append((stored_path(Path(self.pool) / self.run, f"{info['phase']}.0.ckpt"), file))
        for target, file in copies:
            if not files.is_file(target):
                files.write(target, files.read(file))
        return len(copies)

    def _phases(self) -> dict[str, list[dict]]:
        """Return the name of each phase's copy -> the descriptions of its checkpoints, newest first."""
        pool = CheckpointFolder(self.pool, 1)
        found = {_name(self.run, phase): pool.infos(self.run, phase) for phase in pool.phases(self.run)}
        return {name: infos for name, infos in found.items() if infos}

    def _files(self) -> Iterator[Path]:
        for folder, pattern in self.files:
            yield from (Path(folder) / name for name in fnmatch.filter(files.names(folder), pattern))


def _name(run: str, phase: str) -> str:
    return f"{run}--{phase}.ckpt"
