"""What lets an unfinished run go on, as one handful of files: taken from its slots, put back into a pool that has none.

{run}--{phase}.ckpt       the newest whole checkpoint of each phase that has not returned its slots
forecasts-lstm.state …    what finished parts of the run have left in its folder
parts.json                whose it is, and the hash of each file
"""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ml_factory.checkpoints.file_format import copy_container, read_header
from ml_factory.checkpoints.leases import fence_of
from ml_factory.checkpoints.slot_pool import Pool, Unit
from ml_factory.checkpoints.slots import Slots, recency
from ml_factory.errors import CheckpointError
from ml_factory.storage import file_access
from ml_factory.storage.atomic_files import Disk, file_hash, is_file, read_file, read_json, write_bytes_atomic

PARTS = "parts.json"


@dataclass(frozen=True)
class RunSnapshot:
    """Where the parts of one run lie.

    run : its id.  pool : the folder of slots that saves land in first.
    runs : the ids under which its checkpoints lie: its own, and those of folds nested in it.
    files : (folder, pattern of names) of files that finished parts leave.
    """

    run: str
    pool: str
    runs: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_dict(cls, told: dict) -> "RunSnapshot":
        kept = tuple((folder, pattern) for folder, pattern in told["files"])
        return cls(told["run"], told["pool"], tuple(told["runs"]), kept)

    def to_dict(self) -> dict:
        return asdict(self)

    def content(self) -> dict[str, object]:
        """What there is now: name -> the checkpoint's hash, or a file's size: a finished part is written once. Cheap;
        {} without anything. Raises OSError where a mount does not answer."""
        found = {_name(unit): told[0]["hash"] for unit, told in self._units().items()}
        for file in self._files():
            found[file.name] = file_access.size(file)
        return found

    def size(self) -> int:
        """Bytes that `pack` would copy, about. Raises OSError where a mount does not answer."""
        newest = [Path(told[0]["path"]) for told in self._units().values()]
        return sum(file_access.size(file) for file in [*newest, *self._files()])

    def pack(self, aside: Path) -> dict:
        """Copy all of it into an empty folder; {"run", "fences": {unit: its fence}} of what was copied.

        Of each unit the newest that is whole. Raises OSError and WorkspaceError when a disk refuses.
        """
        fences = {}
        for unit, told in self._units().items():
            for one in told:
                with suppress(CheckpointError):  # torn, or written over just now: the one before it
                    info = copy_container(Disk(), aside / _name(unit), Disk(), Path(one["path"]))
                    fences[_name(unit)] = fence_of(info)
                    break
        for file in self._files():
            (aside / file.name).write_bytes(read_file(file))
        whole = [name for name in sorted(path.name for path in aside.iterdir()) if (aside / name).stat().st_size]
        parts = {name: file_hash(aside / name) for name in whole}
        (aside / PARTS).write_text(json.dumps({"run": self.run, "files": parts}))
        return {"run": self.run, "fences": fences}

    def restore_into(self, folder: Path, slots: Slots, keep: int) -> int:
        """Take what `pack` made into the pool, and finished parts to where they were; how many files.

        Everything is checked first. Raises CheckpointError where something is missing, changed or another run's.
        """
        told = read_json(folder / PARTS)
        if not isinstance(told, dict) or told.get("run") != self.run or not isinstance(told.get("files"), dict):
            raise CheckpointError("These are not the checkpoints of this run", where=self.run)
        units, files = [], []
        for name, wanted in told["files"].items():
            file = folder / Path(name).name
            if not is_file(file) or file_hash(file) != wanted:
                raise CheckpointError("A part of these checkpoints is missing or was changed", where=name)
            home = next((home for home, pattern in self.files if file.match(pattern)), None)
            if home is not None:
                files.append((Path(home) / file.name, file))
                continue
            unit = Unit(*(str(read_header(Disk(), file).info.get(key)) for key in ("run", "phase")))
            if unit.run not in self.runs:
                raise CheckpointError("This is the checkpoint of another run", where=name, got=unit.run)
            units.append((unit, file))
        for unit, file in units:
            slots.copy_in(unit, keep, str(file))
        for there, file in files:
            if not is_file(there):
                write_bytes_atomic(there, read_file(file))
        return len(units) + len(files)

    def _units(self) -> dict[Unit, list[dict]]:
        """What the slots of each unit say of themselves, newest first; those that were returned are nobody's."""
        found: dict[Unit, list[dict]] = {}
        for slot in Pool(Path(self.pool)).scan():
            info = slot.header.info
            if slot.fault is None and not slot.returned and info.get("run") in self.runs:
                told = {**info, "hash": slot.header.hash, "path": str(slot.path)}
                found.setdefault(Unit(info["run"], str(info["phase"])), []).append(told)
        return {unit: sorted(told, key=recency, reverse=True) for unit, told in sorted(found.items(), key=_by_name)}

    def _files(self) -> Iterator[Path]:
        for folder, pattern in self.files:
            yield from (Path(folder) / name for name in fnmatch.filter(file_access.names(folder), pattern))


def _name(unit: Unit) -> str:
    return f"{unit.run}--{unit.phase}.ckpt"


def _by_name(item: tuple[Unit, object]) -> str:
    return _name(item[0])
