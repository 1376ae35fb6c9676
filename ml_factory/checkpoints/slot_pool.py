"""Slot pool of one workspace: files that all units of work share, overwritten in turn and never deleted.

    checkpoints/slot-3fa41c.ckpt   one checkpoint, as `file_format` writes it
                slot-3fa41c.json   its manifest: owner, sequence, size, hash, metrics, and whether it was returned
                locks/             one lock for the pool and one for each unit of work

A slot's name is drawn at random, so two machines that share a Drive never create the same one. The container decides
who owns a slot and whether it is intact; a manifest that is missing or disagrees is written again. Only the returned
status stands in the manifest alone: the slot's content stays until another unit of work needs the space.
"""

import json
import random
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import (
    CheckpointFileHeader,
    ForeignFileError,
    read_checkpoint_file_header,
    read_small_file,
    write_small_file,
)
from ml_factory.checkpoints.slot_description import RETURNED, check_slot_manifest
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.locks import file_lock, lock_file_identity

USER_SUFFIX = "-user"  # suffix of the run name under which the user's own saves during a training are stored
# Seconds after which every machine has seen that a slot was returned, and a machine that took it has written it.
_REST_SECONDS = 900.0
# Drive may hold two files of one name and shows the second as "slot-3fa41c (1).ckpt": it is a slot like any other.
_SLOT = re.compile(r"slot-[0-9a-f]{6}( \(\d+\))?\.ckpt")


@dataclass(frozen=True)
class SlotWriterId:
    """Identity of a writer, stored in every container and manifest.

    Parameters
    ----------
    session : id of the process that saves.
    fence : a number that grows with each takeover of a unit of work; a session that finds a higher one in the slots has
        been taken over, and stops writing.
    """

    session: str = ""
    fence: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class CheckpointUnit:
    """One unit of work: a phase of a run."""

    run: str
    phase: str

    def matches(self, info: dict) -> bool:
        """Return True when a container's info or manifest names this unit."""
        return (info.get("run"), info.get("phase")) == (self.run, self.phase)


@dataclass(frozen=True)
class Slot:
    """One file of the pool.

    Parameters
    ----------
    path : of the container.
    header : read from its two ends.
    manifest : its JSON manifest, {} without one.
    error : why the disk refused to read it.
    """

    path: Path
    header: CheckpointFileHeader = field(default_factory=lambda: CheckpointFileHeader({}))
    manifest: dict = field(default_factory=dict)
    error: WorkspaceError | None = None

    @property
    def fault(self) -> Exception | None:
        return self.error or self.header.fault

    @property
    def must_not_overwrite(self) -> bool:
        """True for a slot that must not be overwritten: an intact file of another kind, or unreadable just now."""
        return isinstance(self.fault, ForeignFileError | WorkspaceError)

    @property
    def is_returned(self) -> bool:
        """True when the slot was returned to the pool, and not written since."""
        same = self.fault is not None or self.manifest.get("hash") == self.header.hash
        return self.manifest.get("status") == RETURNED and same and not self.must_not_overwrite

    def is_free(self, lock: str, now: float) -> bool:
        """Return True for a returned slot that no other machine is likely to take: returned by this machine, or long
        ago.

        lock : identity of the pool's lock, which all processes that share the pool and its local disk exclude each
            other by.
        """
        if not self.is_returned:
            return False
        at = self.manifest.get("returned_at")
        return self.was_returned_under(lock) or not isinstance(at, int | float) or now - at > _REST_SECONDS

    def was_returned_under(self, lock: str) -> bool:
        """Return True when a process returned it that held this lock of the pool."""
        return bool(lock) and self.manifest.get("lock") == lock

    def belongs_to_unit(self, unit: CheckpointUnit) -> bool:
        """Return True when the container names this unit, or the manifest where the container is unreadable."""
        return unit.matches(self.header.info or self.manifest)


class SlotPool:
    """The slots in one folder.

    Parameters
    ----------
    folder : of the slots.
    disk : runs every file operation.
    lock : a lock file on a local disk; by default below the folder.
    quota : bytes that all slots together may take; None: the free space.
    lock_seconds : wait no longer for the lock, whose disk may hang, and go on without it; None: as long as it takes.
    """

    def __init__(
        self, folder: Path, disk: Disk | None = None, *, lock: Path | None = None, quota: int | None = None,
        lock_seconds: float | None = None,
    ):  # fmt: skip
        self.folder, self.disk, self.quota, self._synced = Path(folder), disk or Disk(), quota, False
        self._lock, self._lock_seconds = lock or self.folder / "locks" / "pool.lock", lock_seconds

    @contextmanager
    def exclusive_lock(self) -> Iterator[None]:
        """Exclude other processes of this machine inside a `with`; without effect on a disk that has no locks."""
        if self._lock_seconds is not None:
            with _locked_in_time(self._lock, self._lock_seconds):
                yield
            return
        with ExitStack() as stack:
            with suppress(WorkspaceError):
                stack.enter_context(file_lock(self._lock))
            yield

    def scan(self) -> list[Slot]:
        """List every slot, from headers and manifests alone. Raises WorkspaceError when the folder cannot be listed."""
        with disk_errors(self.folder):
            names = self.disk.names(self.folder)
        return [self._slot(self.folder / name, names) for name in names if _SLOT.fullmatch(name)]

    def _slot(self, path: Path, names: list[str]) -> Slot:
        manifest = {}
        if path.with_suffix(".json").name in names:
            with suppress(WorkspaceError, ValueError):
                manifest = check_slot_manifest(parse_json(read_small_file(self.disk, path.with_suffix(".json"))))
        try:
            return Slot(path, read_checkpoint_file_header(self.disk, path), manifest)
        except WorkspaceError as error:
            return Slot(path, manifest=manifest, error=error)

    def new_slot_path(self) -> Path:
        """Return a new slot's path, unique among machines. Raises WorkspaceError where the folder cannot be made."""
        with disk_errors(self.folder):
            self.disk.make_folder(self.folder)
        return self.folder / f"slot-{secrets.token_hex(3)}.ckpt"

    def sync_folder(self) -> None:
        """Make a new slot's name survive a power cut; the first time also the folder's."""
        with disk_errors(self.folder):
            self.disk.sync_folder(self.folder, not self._synced)
        self._synced = True

    def write_manifest(self, path: Path, status: str, info: dict) -> None:
        """Write a slot's manifest; a failed write does no harm, since the container holds the same facts."""
        fields = {name: value for name, value in info.items() if name != "path"}
        with suppress(WorkspaceError):
            write_small_file(self.disk, path.with_suffix(".json"), json.dumps({"status": status, **fields}).encode())

    def release(self, slot: Slot, last: bool) -> None:
        """Mark the slot as returned by this machine, now.

        last : take it after all other returned slots.
        """
        fields = {"hash": slot.header.hash, "lock": lock_file_identity(self._lock), "returned_at": time.time()}
        fields |= {"saved_at": datetime.now(UTC).isoformat()} if last else {}
        self.write_manifest(slot.path, RETURNED, {**slot.header.info, **fields})

    def list_free_slots(self, slots: list[Slot]) -> list[Slot]:
        """List the slots that may be taken, in the order to take them: those that this machine returned, oldest
        first, then those of other machines in random order, so that two machines that scan at once do not take the same
        slot.
        """
        lock, now = lock_file_identity(self._lock), time.time()
        free = [slot for slot in slots if slot.is_free(lock, now)]
        random.SystemRandom().shuffle(free)
        return sorted(free, key=lambda slot: _take_order(slot, lock))

    def free_slot_bytes(self) -> int:
        """Return the bytes of the slots that may be taken."""
        return sum(slot.header.size for slot in self.list_free_slots(self.scan()))

    def empty_free_slots(self) -> int:
        """Empty the slots that may be taken; return their bytes. The files stay, for the next units of work."""
        freed = 0
        with self.exclusive_lock():
            for slot in self.list_free_slots(self.scan()):
                if slot.header.size and self._is_still_returned(slot):
                    write_small_file(self.disk, slot.path, b"")
                    freed += slot.header.size
        return freed

    def _is_still_returned(self, slot: Slot) -> bool:
        """Return True when the slot was not taken since the scan."""
        return self._slot(slot.path, [slot.path.with_suffix(".json").name]).is_returned

    def make_free_space(self, slots: list[Slot], target: Path, size: int) -> None:
        """Make `size` bytes available at `target`; returned slots are emptied, oldest first.

        Raises CheckpointError when the space does not suffice; nothing else was changed then.
        """
        used = {slot.path: slot.header.size for slot in slots}
        spare = [slot for slot in self.list_free_slots(slots) if slot.path != target and slot.header.size]
        while (available := self._available_bytes(used) + used.get(target, 0)) < size:
            if not spare:
                raise CheckpointError(
                    "Not enough space for this checkpoint; the earlier ones are untouched", where=self.folder,
                    got=f"{available:,} bytes", wanted=f"{size:,} bytes",
                    next_step="free some space (on Google Drive empty the Trash too)",
                )  # fmt: skip
            slot = spare.pop(0)
            if self._is_still_returned(slot):
                write_small_file(self.disk, slot.path, b"")
                used[slot.path] = 0

    def _available_bytes(self, used: dict[Path, int]) -> int:
        with disk_errors(self.folder):
            free = self.disk.free(self.folder)
        return free if self.quota is None else min(free, self.quota - sum(used.values()))


def _take_order(slot: Slot, lock: str) -> tuple[bool, str]:
    """Return the sort key of a free slot."""
    own = slot.was_returned_under(lock)
    return not own, str(slot.manifest.get("saved_at")) if own else ""


@contextmanager
def _locked_in_time(path: Path, seconds: float) -> Iterator[None]:
    """Hold a file lock inside a `with`, or no lock where it is not free, or its disk does not answer, in time.

    A thread takes it, because a call into a disk that hangs does not return.
    """
    decided, done = threading.Event(), threading.Event()

    def hold() -> None:
        with suppress(WorkspaceError), file_lock(path):
            decided.set()
            done.wait()
        decided.set()

    threading.Thread(target=hold, name="pool-lock", daemon=True).start()
    decided.wait(seconds)
    try:
        yield
    finally:
        done.set()
