"""How one unit of work uses the slots of the pool: what it keeps, which slot is written next, what is the newest.

A unit keeps its last checkpoints and the best one; one slot more is being written, and one torn slot is kept aside.
A process killed in the middle of a write leaves all that was kept. A slot whose write hung is not written again by the
session that gave it up: what hung may be carried out at any time, and must find nothing to spoil.
"""

import errno
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ml_factory.checkpoints.file_format import (
    ForeignFileError,
    copy_container,
    read_container,
    read_header,
    write_container,
)
from ml_factory.checkpoints.leases import check_fence, fence_of, read_lease, write_lease, writer_rank
from ml_factory.checkpoints.slot_pool import HELD, QUARANTINED, USER_SUFFIX, WRITING, Pool, Slot, Unit, WriterId
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.atomic_files import FULL, Disk

MIN_KEPT = 2
_MAX_UNFINISHED = 4  # writes that may still be under way at once: a mount that hangs is given no more children
_LARGEST_SEQUENCE = 1 << 62  # the footer's has 64 bits
T = TypeVar("T")


class Slots:
    """The slots of a pool, as its units of work use them.

    lease : who writes.
    """

    def __init__(self, pool: Pool, lease: WriterId | None = None):
        self.pool, self.lease = pool, lease or WriterId()
        self._verified_hashes: dict[Path, str] = {}  # slot -> hash this process has verified already
        self._last_sequence: dict[
            Unit, int
        ] = {}  # sequence written here last, whether or not its slot can be read just now
        self._finished_writes: set[Path] = set()  # slots whose last write here was refused: nothing of it is under way

    # ------------------------------------------------------------------ looking

    def verify_slots(self, unit: Unit, trust_seen: bool = False) -> tuple[dict[Path, dict], dict[Path, Exception]]:
        """({path: info} of the unit's verified slots, oldest first; {path: reason} of its others).

        trust_seen : do not hash again what was written or verified here.
        """
        return self._verify_slots(unit, self.pool.scan(), trust_seen)

    def latest_valid(self, unit: Unit, read: Callable[[bytearray], T]) -> tuple[dict | None, T | None, list[str]]:
        """(info of the highest sequence that verifies, what `read` made of its payload, which were passed over, why).

        read : may raise CheckpointError; that checkpoint is passed over, too. Raises WorkspaceError when none was found
        and the disk refused a slot that may hold one: to begin anew then would lose it.
        """
        mine = self._readable(unit)
        skipped = [f"{slot.path.name}: {slot.fault}" for slot in mine if slot.fault]
        refused = [slot.error for slot in mine if slot.error]
        whole = [slot for slot in mine if not slot.fault]
        for slot in sorted(whole, key=lambda slot: recency(slot.header.info), reverse=True):
            payload = bytearray()
            try:
                info = read_container(self.pool.disk, slot.path, payload)
                return {**info, "path": str(slot.path)}, read(payload), skipped
            except (CheckpointError, WorkspaceError) as error:
                skipped.append(f"{slot.path.name}: {error}")
                refused += [error] if isinstance(error, WorkspaceError) else []
        if refused:
            raise refused[0]
        return None, None, skipped

    def list_unverified(self, unit: Unit) -> list[dict]:
        """What the unit's slots say of themselves, unverified, newest first; with `path`.

        Raises WorkspaceError when there is nothing and the disk refused a slot that may be the unit's.
        """
        return self._told(unit)[0]

    def _told(self, unit: Unit) -> tuple[list[dict], list[str]]:
        """(as `told`, which slots said nothing and why)."""
        mine = self._readable(unit)
        infos = [
            {**slot.header.info, "hash": slot.header.hash, "path": str(slot.path)} for slot in mine if not slot.fault
        ]
        refused = [slot.error for slot in mine if slot.error]
        if refused and not infos:
            raise refused[0]
        reasons = [f"{slot.path.name}: {slot.fault}" for slot in mine if slot.fault]
        return sorted(infos, key=recency, reverse=True), reasons

    def _readable(self, unit: Unit) -> list[Slot]:
        """The unit's slots, and those of which the disk would not say whose they are."""
        return [slot for slot in self.pool.scan() if slot.belongs_to(unit) or (slot.error and not slot.manifest)]

    def copy_out(self, unit: Unit, keep: int, home: str) -> list[str]:
        """Bring the newest whole checkpoint of the unit to the pool in the folder `home`; which were passed over.

        Raises WorkspaceError where the disk refuses all of them.
        """
        infos, skipped = self._told(unit)
        refused = []
        for told in infos:
            try:
                Slots(Pool(Path(home)), self.lease).copy_in(unit, keep, told["path"], source_disk=self.pool.disk)
                return skipped
            except (CheckpointError, WorkspaceError) as error:
                skipped.append(f"{Path(told['path']).name}: {error}")
                refused += [error] if isinstance(error, WorkspaceError) else []
        if refused:
            raise refused[0]
        return skipped

    def verify(self, path: str) -> dict:
        """The info of the checkpoint at `path`, read through. Raises CheckpointError or WorkspaceError."""
        return {**read_container(self.pool.disk, Path(path)), "path": str(path)}

    def read_lease(self, unit: Unit) -> dict:
        """What the lease of the unit says, {} without one."""
        return read_lease(self.pool.disk, self.pool.folder, unit)

    def renew(self, unit: Unit, told: dict) -> None:
        """Write the lease of the unit."""
        write_lease(self.pool.disk, self.pool.folder, unit, told)

    def list_phases(self, run: str) -> list[str]:
        """The phases of a run that have slots, in order."""
        infos = [slot.header.info for slot in self.pool.scan()]
        return sorted({str(info["phase"]) for info in infos if info.get("run") == run and "phase" in info})

    def list_trainings(self, phase: str) -> list[dict]:
        """What the newest slot of each training that has this phase says of itself, unverified; not of what its user
        saved beside it."""
        newest: dict[str, dict] = {}
        for info in (slot.header.info for slot in self.pool.scan()):
            run = str(info.get("run", ""))
            if info.get("phase") == phase and run.startswith("train-") and not run.endswith(USER_SUFFIX):
                newest[run] = max(newest.get(run, info), info, key=recency)
        return list(newest.values())

    def _verify_slots(self, unit: Unit, slots: list[Slot], trust_seen: bool):
        good, bad = {}, {}
        for slot in (slot for slot in slots if slot.belongs_to(unit)):
            try:
                if slot.fault:
                    raise slot.fault
                info = {**slot.header.info, "bytes": slot.header.size, "hash": slot.header.hash}
                if not (trust_seen and self._verified_hashes.get(slot.path) == slot.header.hash):
                    info = read_container(self.pool.disk, slot.path)
                good[slot.path], self._verified_hashes[slot.path] = {**info, "path": str(slot.path)}, info["hash"]
            except (CheckpointError, WorkspaceError) as error:
                bad[slot.path] = error
        return dict(sorted(good.items(), key=lambda item: recency(item[1]))), bad

    # ------------------------------------------------------------------ writing

    def write(self, unit: Unit, keep: int, info: dict, payload: memoryview) -> dict:
        """Write the next slot and read it back; the info of what now stands there, with its `sequence`, and
        `wrote_seconds` until it was on the disk.

        Raises WorkspaceError or CheckpointError; then what was kept before still stands, at least the newest two.
        """
        info = {"run": unit.run, "phase": unit.phase, "lease": self.lease.to_dict(), **info}
        disk, size = self.pool.disk, len(payload) + (1 << 13)

        def store(path: Path, sequence: int) -> dict:
            return write_container(disk, path, {**info, "sequence": sequence}, payload)

        return self._write(unit, keep, store, size, writer_rank(info["lease"]))

    def copy_in(self, unit: Unit, keep: int, source: str, fence: int = 0, source_disk: Disk | None = None) -> dict:
        """Take a checkpoint over from another pool, byte for byte; as `write` otherwise.

        fence : of whoever carries it, which may be a later session than the one that saved it.
        """
        there = source_disk or Disk()
        header = read_header(there, Path(source))

        def store(path: Path, sequence: int) -> dict:
            return copy_container(self.pool.disk, path, there, Path(source))

        writer = writer_rank(header.info.get("lease"))
        if fence > writer[0]:
            writer = fence, self.lease.session
        if source_disk is not None:  # fetched by whoever holds the work now: the one who saved it may be long gone
            writer = max(writer, writer_rank(self.read_lease(unit)))
        return self._write(unit, keep, store, header.size, writer)

    def _write(self, unit: Unit, keep: int, store: Callable[[Path, int], dict], size: int, writer: tuple[int, str]):
        with self.pool.locked():
            slots = self.pool.scan()
            good, bad = self._verify_slots(unit, slots, trust_seen=True)
            told = [slot.header.info or slot.manifest for slot in slots if slot.belongs_to(unit)]
            check_fence(unit, writer, told, self.read_lease(unit))
            sequence = 1 + max([self._last_sequence.get(unit, 0), *map(_number, told)])
            late = self._unfinished_writes(unit, slots)
            good = {path: info for path, info in good.items() if info["sequence"] == late.get(path, info["sequence"])}
            aside = {*late, *self._quarantined(unit, [slot for slot in slots if slot.path not in late], bad)}
            failure: Exception | None = None
            for path in self._targets(unit, keep, slots, good, torn_slots(bad), aside):
                try:
                    self.pool.free_space(slots, path, size)
                    self.pool.write_manifest(path, WRITING, self._writing_manifest(unit, sequence))
                    self._finished_writes.discard(path)
                    began = time.monotonic()
                    store(path, sequence)
                    wrote = time.monotonic() - began
                    saved = {**read_container(self.pool.disk, path), "path": str(path)}
                except (WorkspaceError, CheckpointError) as error:
                    failure, code = failure or error, getattr(error.__cause__, "errno", None)
                    if code != errno.ETIMEDOUT:
                        self._finished_writes.add(path)
                    if isinstance(error, WorkspaceError) and code not in FULL:
                        break
                    continue
                self._verified_hashes[path], self._last_sequence[unit] = saved["hash"], saved["sequence"]
                self.pool.write_manifest(path, HELD, saved)
                self._repair(slots, {where: one for where, one in good.items() if where != path and where not in late})
                return {**saved, "wrote_seconds": wrote}
            raise failure

    def release(self, unit: Unit, holder: dict | None = None) -> int:
        """The unit has left its artifact: its slots may be written by others, one whose write hung last of all.
        Returns how many.

        holder : the lease of who gives them back. Raises TakenOverError when a later session holds the unit.
        """
        with self.pool.locked():
            slots = self.pool.scan()
            if holder is not None:
                told = [slot.header.info or slot.manifest for slot in slots if slot.belongs_to(unit)]
                check_fence(unit, writer_rank(holder), told, self.read_lease(unit))
            mine, late = (
                [slot for slot in slots if slot.belongs_to(unit) and not slot.unwritable],
                self._unfinished_writes(unit, slots),
            )
            for slot in mine:
                self.pool.release(slot, last=slot.path in late)
        return len(mine)

    def _writing_manifest(self, unit: Unit, sequence: int) -> dict:
        """What a manifest says while its slot is written."""
        return {"run": unit.run, "phase": unit.phase, "sequence": sequence, "session": self.lease.session}

    def _unfinished_writes(self, unit: Unit, slots: list[Slot]) -> dict[Path, int]:
        """The newest slots of which this session was never told how its write ended, and the number it had: a slot that
        holds that very save is whole, whatever still comes."""
        begun = {
            slot.path: _number(slot.manifest) for slot in slots
            if slot.manifest.get("status") == WRITING and unit.matches(slot.manifest)
            and slot.path not in self._finished_writes and slot.manifest.get("session") == self.lease.session
        }  # fmt: skip
        return dict(sorted(begun.items(), key=lambda item: item[1])[-_MAX_UNFINISHED:])

    def _targets(
        self, unit: Unit, keep: int, slots: list[Slot], good: dict, empty: set[Path], aside: set[Path]
    ) -> list[Path]:
        """The slot to write: one of ours with nothing to keep, else one that was returned, else a new one. Then, for
        a full disk, our oldest good one, whose space is ours already, as long as two good ones would still be left.

        empty : our slots whose content is worth nothing.  aside : those that are left alone.
        """
        kept, best = kept_slots(good, keep)
        reserved = [
            slot.path for slot in slots if slot.manifest.get("status") == WRITING and unit.matches(slot.manifest)
        ]
        ours = [*sorted(empty), *reserved, *(path for path in good if path not in kept)]
        returned = [slot.path for slot in self.pool.free_slots(slots)]
        free = [path for path in [*ours, *returned] if path not in kept | aside]
        first = free[0] if free else self.pool.new_path()
        others = [path for path in good if path not in {first} | aside]
        spare = [path for path in others if path != best] if len(others) > MIN_KEPT else []
        return [first, *spare[:1]]

    def _quarantined(self, unit: Unit, slots: list[Slot], bad: dict[Path, Exception]) -> set[Path]:
        """The slot to leave alone: the newest that is torn, for whoever wants to look into it, or whose write another
        session never ended, which may be carried out late."""
        unfinished = {
            slot.path for slot in slots if slot.manifest.get("status") == WRITING and unit.matches(slot.manifest)
        }
        torn = {slot.path for slot in slots if slot.path in torn_slots(bad) and slot.header.size}
        left = [slot for slot in slots if slot.path in torn | unfinished]
        if not left:
            return set()
        slot = max(left, key=lambda slot: max(_number(slot.manifest), _number(slot.header.info)))
        if slot.path in torn and slot.manifest.get("status") != QUARANTINED:
            self.pool.write_manifest(slot.path, QUARANTINED, {**slot.header.info, "reason": str(bad[slot.path])})
        return {slot.path}

    def _repair(self, slots: list[Slot], good: dict[Path, dict]) -> None:
        """Manifests that are missing, or of something older, are written from the containers."""
        notes = {slot.path: slot.manifest for slot in slots}
        for path, info in good.items():
            if notes[path].get("status") != HELD or notes[path].get("hash") != info["hash"]:
                self.pool.write_manifest(path, HELD, info)


def recency(info: dict) -> tuple[int, int]:
    """What a later session saved is later, whatever number one that was taken over gave to its own."""
    return fence_of(info), info["sequence"]


def _number(told: dict) -> int:
    """The sequence number a container or a manifest tells; 0 when it tells none that a save could have had."""
    number = told.get("sequence")
    return number if type(number) is int and 0 <= number < _LARGEST_SEQUENCE else 0


def kept_slots(good: dict[Path, dict], keep: int) -> tuple[set[Path], Path | None]:
    """(the slots not to be written, the best of all): the last `keep`, at least two, and the one with the lowest
    val_loss, the earliest of equals. `good` is oldest first."""
    losses = {path: val_loss(info) for path, info in good.items()}
    best = min(losses, key=losses.get, default=None)
    best = best if best is not None and losses[best] < math.inf else None
    return {*list(good)[-max(keep, MIN_KEPT) :], *([best] if best else [])}, best


def val_loss(info: dict) -> float:
    """What a checkpoint is judged by; infinity when it was not measured."""
    loss = (info.get("metrics") or {}).get("val_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def torn_slots(bad: dict[Path, Exception]) -> set[Path]:
    """Slots whose content is torn: not those that are whole but strange, nor those the disk would not read just now."""
    return {
        path
        for path, error in bad.items()
        if isinstance(error, CheckpointError) and not isinstance(error, ForeignFileError)
    }
