"""Resumable snapshot of an unfinished run: packed from its slots, restored into a pool that has none.

{run}--{phase}.ckpt       the newest intact checkpoint of each phase that has not returned its slots
forecasts-lstm.state …    files that finished parts of the run have left in its folder
parts.json                the run's id, and the hash of each file
"""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import copy_checkpoint_file, read_checkpoint_file_header
from ml_factory.checkpoints.leases import fencing_token_of
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool
from ml_factory.checkpoints.slots import Slots, slot_recency
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
    pool : folder of the slots that saves are written to first.
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
        found = {_name(unit): infos[0]["hash"] for unit, infos in self._units().items()}
        for file in self._files():
            found[file.name] = files.size(file)
        return found

    def size(self) -> int:
        """Return the bytes that `pack` would copy, approximately. Raises WorkspaceError as `content`."""
        newest = [Path(infos[0]["path"]) for infos in self._units().values()]
        return sum(files.size(file) for file in [*newest, *self._files()])

    def pack(self, target: Path) -> dict:
        """Copy all files into an empty folder; return {"run", "fences": {unit: its fence}} of the copies.

        Of each unit the newest intact checkpoint is copied. Raises WorkspaceError where the disk of a
        source refuses, OSError where that of the target does.
        """
        fences = {}
        for unit, infos in self._units().items():
            for info in infos:
                with suppress(CheckpointError):  # torn, or overwritten just now: try the one before
                    copied = copy_checkpoint_file(Disk(), target / _name(unit), Disk(), Path(info["path"]))
                    fences[_name(unit)] = fencing_token_of(copied)
                    break
        for file in self._files():
            (target / file.name).write_bytes(files.read(file))
        packed = [name for name in sorted(path.name for path in target.iterdir()) if (target / name).stat().st_size]
        parts = {name: files.sha256(target / name) for name in packed}
        (target / PARTS).write_text(json.dumps({"run": self.run, "files": parts}))
        return {"run": self.run, "fences": fences}

    def restore_into(self, folder: Path, slots: Slots, keep: int) -> int:
        """Restore the files that `pack` copied: checkpoints into the pool, finished parts to their folders; return
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
        units, parts = [], []
        for name, digest in manifest["files"].items():
            file = stored_path(folder, name)
            if not files.is_file(file) or files.sha256(file) != digest:
                raise CheckpointError("A part of these checkpoints is missing or was changed", where=name)
            target = next((target for target, pattern in self.files if file.match(pattern)), None)
            if target is not None:
                parts.append((stored_path(target, file.name), file))
                continue
            unit = CheckpointUnit(
                *(str(read_checkpoint_file_header(Disk(), file).info.get(key)) for key in ("run", "phase"))
            )
            if unit.run != self.run:
                raise CheckpointError("This is the checkpoint of another run", where=name, got=unit.run)
            units.append((unit, file))
        for unit, file in units:
            slots.copy_from_pool(unit, keep, str(file))
        for target, file in parts:
            if not files.is_file(target):
                files.write(target, files.read(file))
        return len(units) + len(parts)

    def _units(self) -> dict[CheckpointUnit, list[dict]]:
        """Return the descriptions of each unit's slots, newest first, without returned slots."""
        found: dict[CheckpointUnit, list[dict]] = {}
        for slot in SlotPool(Path(self.pool)).scan():
            info = slot.header.info
            if slot.fault is None and not slot.is_returned and info.get("run") == self.run:
                description = {**info, "hash": slot.header.hash, "path": str(slot.path)}
                found.setdefault(CheckpointUnit(info["run"], str(info["phase"])), []).append(description)
        return {
            unit: sorted(infos, key=slot_recency, reverse=True) for unit, infos in sorted(found.items(), key=_sort_key)
        }

    def _files(self) -> Iterator[Path]:
        for folder, pattern in self.files:
            yield from (Path(folder) / name for name in fnmatch.filter(files.names(folder), pattern))


def _name(unit: CheckpointUnit) -> str:
    return f"{unit.run}--{unit.phase}.ckpt"


def _sort_key(item: tuple[CheckpointUnit, object]) -> str:
    return _name(item[0])
