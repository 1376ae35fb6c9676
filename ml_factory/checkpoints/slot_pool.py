"""The slots of one workspace: files that all units of work share, overwritten in turn and never deleted.

    checkpoints/slot-3fa41c.ckpt   one checkpoint, as `containers` writes it
                slot-3fa41c.json   its manifest: whose it is, sequence, size, hash, metrics, and whether it was returned
                locks/             one lock for the pool and one for each unit of work

A slot's name is drawn at random, so two machines that share a Drive never make the same one. The container decides
whose a slot is and what it is worth; a manifest that is missing or says something else is written anew. Only that a
slot was returned stands in the manifest alone: its content stays until another unit of work needs the space.
"""

import json
import random
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.checkpoints.file_format import (
    ContainerHeader,
    ForeignFileError,
    empty_container,
    read_header,
    read_small,
    write_small,
)
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.atomic_files import Disk, disk_errors
from ml_factory.storage.locks import file_lock, machine_id

HELD, WRITING, QUARANTINED, RETURNED = "held", "writing", "quarantined", "returned"
USER_SUFFIX = "-user"  # ends the name of the run under which a user's saves beside a training stand
# After so long a mount has shown everybody that a slot was returned, and whoever took it since has written it.
_REST_SECONDS = 900.0
# Drive may hold two files of one name and shows the second as "slot-3fa41c (1).ckpt": it is a slot like any other.
_SLOT = re.compile(r"slot-[0-9a-f]{6}( \(\d+\))?\.ckpt")


@dataclass(frozen=True)
class WriterId:
    """Who writes: kept in every container and manifest.

    session : name of the process that saves.  fence : a number that grows with each takeover of a unit of work;
    whoever finds a higher one in the slots has been taken over, and writes no more.
    """

    session: str = ""
    fence: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Unit:
    """One unit of work: a phase of a run."""

    run: str
    phase: str

    def matches(self, told: dict) -> bool:
        return (told.get("run"), told.get("phase")) == (self.run, self.phase)


@dataclass(frozen=True)
class Slot:
    """One file of the pool.

    look : what its two ends say.  note : its manifest, {} without one.  error : why the disk would not say.
    """

    path: Path
    header: ContainerHeader = field(default_factory=lambda: ContainerHeader({}))
    manifest: dict = field(default_factory=dict)
    error: WorkspaceError | None = None

    @property
    def fault(self) -> Exception | None:
        return self.error or self.header.fault

    @property
    def unwritable(self) -> bool:
        """Not to be written: whole but of something else, or the disk does not read it just now."""
        return isinstance(self.fault, ForeignFileError | WorkspaceError)

    @property
    def returned(self) -> bool:
        """Given back, and nothing was written to it since."""
        same = self.fault is not None or self.manifest.get("hash") == self.header.hash
        return self.manifest.get("status") == RETURNED and same and not self.unwritable

    def is_free(self, machine: str, now: float) -> bool:
        """Returned, and nobody else is likely to write it: this machine gave it back, or another one long ago."""
        if not self.returned:
            return False
        at = self.manifest.get("returned_at")
        return self.manifest.get("host") == machine or not isinstance(at, int | float) or now - at > _REST_SECONDS

    def belongs_to(self, unit: Unit) -> bool:
        """By its container; by the manifest where the container says nothing."""
        return unit.matches(self.header.info or self.manifest)


class Pool:
    """The slots in one folder.

    disk : every file operation goes through it.  lock : a lock file on a local disk; by default below the folder.
    quota : bytes all slots together may take; None: what the disk has.
    """

    def __init__(self, folder: Path, disk: Disk | None = None, *, lock: Path | None = None, quota: int | None = None):
        self.folder, self.disk, self.quota = Path(folder), disk or Disk(), quota
        self._lock = lock or self.folder / "locks" / "pool.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes of this machine; on a disk without locks, just go on."""
        with ExitStack() as stack:
            with suppress(WorkspaceError):
                stack.enter_context(file_lock(self._lock))
            yield

    def scan(self) -> list[Slot]:
        """Every slot, with what can be seen without reading it through. Raises WorkspaceError when the folder cannot
        be listed."""
        with disk_errors(self.folder):
            names = self.disk.names(self.folder)
        return [self._slot(self.folder / name, names) for name in names if _SLOT.fullmatch(name)]

    def _slot(self, path: Path, names: list[str]) -> Slot:
        manifest = {}
        if path.with_suffix(".json").name in names:
            with suppress(WorkspaceError, ValueError, RecursionError):
                manifest = json.loads(read_small(self.disk, path.with_suffix(".json")))
        manifest = manifest if isinstance(manifest, dict) else {}
        try:
            return Slot(path, read_header(self.disk, path), manifest)
        except WorkspaceError as error:
            return Slot(path, manifest=manifest, error=error)

    def new_path(self) -> Path:
        """Where a slot is made that no other machine makes. Raises WorkspaceError where the folder cannot be made."""
        with disk_errors(self.folder):
            self.disk.make_folder(self.folder)
        return self.folder / f"slot-{secrets.token_hex(3)}.ckpt"

    def write_manifest(self, path: Path, status: str, told: dict) -> None:
        """Write a slot's manifest; a disk that refuses it costs nothing, since the container says the same."""
        facts = {name: value for name, value in told.items() if name != "path"}
        with suppress(WorkspaceError):
            write_small(self.disk, path.with_suffix(".json"), json.dumps({"status": status, **facts}).encode())

    def release(self, slot: Slot, last: bool) -> None:
        """Mark what this slot holds as returned by this machine, now.  last : to be taken after all others."""
        told = {"hash": slot.header.hash, "host": machine_id(), "returned_at": time.time()}
        told |= {"saved_at": datetime.now(UTC).isoformat()} if last else {}
        self.write_manifest(slot.path, RETURNED, {**slot.header.info, **told})

    def free_slots(self, slots: list[Slot]) -> list[Slot]:
        """Those that may be taken, in the order to take them: what this machine gave back, oldest first, then what
        others did, in any order, so that two machines that look at once do not take the same."""
        machine, now = machine_id(), time.time()
        free = [slot for slot in slots if slot.is_free(machine, now)]
        random.SystemRandom().shuffle(free)
        return sorted(free, key=_take_order)

    def free_space(self, slots: list[Slot], target: Path, size: int) -> None:
        """See that `size` bytes can stand at `target`; slots that were returned give their space, oldest first.

        Raises CheckpointError when they cannot; nothing else was touched then.
        """
        used = {slot.path: slot.header.size for slot in slots}
        spare = [slot for slot in self.free_slots(slots) if slot.path != target and slot.header.size]
        while (room := self._available_bytes(used) + used.get(target, 0)) < size:
            if not spare:
                raise CheckpointError(
                    "No room for this checkpoint; what was there before is untouched", where=self.folder,
                    got=f"{room:,} bytes", wanted=f"{size:,} bytes",
                    next_step="free some space (on Google Drive empty the Trash too)",
                )  # fmt: skip
            slot = spare.pop(0)
            if self._slot(slot.path, [slot.path.with_suffix(".json").name]).returned:  # still, since it was looked at
                empty_container(self.disk, slot.path)
                used[slot.path] = 0

    def _available_bytes(self, used: dict[Path, int]) -> int:
        with disk_errors(self.folder):
            free = self.disk.free(self.folder)
        return free if self.quota is None else min(free, self.quota - sum(used.values()))


def _take_order(slot: Slot) -> tuple[bool, str]:
    """When a free slot is taken."""
    here = slot.manifest.get("host") == machine_id()
    return not here, str(slot.manifest.get("saved_at")) if here else ""
