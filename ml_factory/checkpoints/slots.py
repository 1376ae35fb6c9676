"""Slot rotation of one unit of work: which checkpoints it keeps, which slot is written next, which is the newest.

A unit keeps its last checkpoints and the best one; one more slot is being written, and one torn slot is quarantined. A
process killed in the middle of a write leaves all retained slots intact. A slot whose write hung is not written again
by the session that abandoned it: the hanging write may still be carried out at any time, and must not damage another
checkpoint.
"""

import errno
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import (
    ForeignFileError,
    copy_checkpoint_file,
    read_checkpoint_file,
    read_checkpoint_file_header,
    write_checkpoint_file,
)
from ml_factory.checkpoints.leases import (
    check_fencing_token,
    fencing_token_of,
    lease_fence_order,
    read_lease_file,
    write_lease_file,
)
from ml_factory.checkpoints.slot_description import HELD, QUARANTINED, WRITING
from ml_factory.checkpoints.slot_pool import USER_SUFFIX, CheckpointUnit, Slot, SlotPool, SlotWriterId
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.files import FULL

MIN_KEPT = 2
_MAX_UNFINISHED = 4  # writes that may hang at once: a mount that hangs gets no more children
_LARGEST_SEQUENCE = 1 << 62  # the seal's has 64 bits
T = TypeVar("T")


class Slots:
    """The slots of a pool, as units of work use them.

    lease : identity of the writer.
    """

    other_machines_write = False  # to this disk, where it is a machine's first one

    def __init__(self, pool: SlotPool, lease: SlotWriterId | None = None):
        self.pool, self.lease = pool, lease or SlotWriterId()
        self._verified_hashes: dict[Path, str] = {}  # slot -> hash that this process has verified
        self._last_sequence: dict[
            CheckpointUnit, int
        ] = {}  # last sequence written, also if its slot is unreadable just now
        self._finished_writes: set[Path] = set()  # slots whose last write was refused: it cannot still be under way
        self._refused_new: Path | None = None  # a new slot that was refused, perhaps without a manifest: taken again

    # ------------------------------------------------------------------ reading

    def load_latest_valid(
        self, unit: CheckpointUnit, decode: Callable[[bytes | bytearray], dict]
    ) -> tuple[dict | None, dict | None, list[str]]:
        """Load the newest valid checkpoint: (info of the highest sequence that verifies, its state, skipped slots with
        reasons).

        decode : `deserialize_state`, which a child process that only writes does not import.
        Raises as `_first_usable` does: starting from scratch would lose a checkpoint in a slot that was refused.
        """

        def load(path: str) -> tuple[dict, dict]:
            content = bytearray()
            info = read_checkpoint_file(self.pool.disk, Path(path), content)
            return {**info, "path": path}, decode(content)

        found, skipped = self._first_usable(unit, load)
        return *(found or (None, None)), skipped

    def copy_to_pool(self, unit: CheckpointUnit, keep: int, home: str) -> list[str]:
        """Copy the newest intact checkpoint of the unit to the pool in the folder `home`; return the skipped slots
        with reasons. Raises as `_first_usable` does.
        """
        there = Slots(SlotPool(Path(home)), self.lease)
        return self._first_usable(
            unit, lambda path: there.copy_from_pool(unit, keep, path, source_disk=self.pool.disk)
        )[1]

    def _first_usable(self, unit: CheckpointUnit, use: Callable[[str], T]) -> tuple[T | None, list[str]]:
        """Return (what `use` returns for the newest checkpoint for which it does not raise, skipped slots with
        reasons).

        Raises WorkspaceError when there is none and the disk refused a slot that may hold one.
        """
        owned = self._readable(unit)
        skipped = [f"{slot.path.name}: {slot.fault}" for slot in owned if slot.fault]
        refused = [slot.error for slot in owned if slot.error]
        for info in _descriptions(owned):
            try:
                return use(info["path"]), skipped
            except (CheckpointError, WorkspaceError) as error:
                skipped.append(f"{Path(info['path']).name}: {error}")
                refused += [error] if isinstance(error, WorkspaceError) else []
        if refused:
            raise refused[0]
        return None, skipped

    def list_unverified(self, unit: CheckpointUnit) -> list[dict]:
        """List the descriptions of the unit's slots, unverified, newest first; with `path`.

        Raises WorkspaceError when the list is empty and the disk refused a slot that may be the unit's.
        """
        owned = self._readable(unit)
        infos, refused = _descriptions(owned), [slot.error for slot in owned if slot.error]
        if refused and not infos:
            raise refused[0]
        return infos

    def _readable(self, unit: CheckpointUnit) -> list[Slot]:
        """List the unit's slots, and those whose owner the disk refused to read."""
        return [slot for slot in self.pool.scan() if slot.belongs_to_unit(unit) or (slot.error and not slot.manifest)]

    def verify(self, path: str) -> dict:
        """Return the info of the checkpoint at `path`, read through. Raises CheckpointError or WorkspaceError."""
        return {**read_checkpoint_file(self.pool.disk, Path(path)), "path": str(path)}

    def read_lease(self, unit: CheckpointUnit) -> dict:
        """Return the unit's lease, {} without one."""
        return read_lease_file(self.pool.disk, self.pool.folder, unit)

    def renew(self, unit: CheckpointUnit, record: dict) -> None:
        """Write the unit's lease."""
        write_lease_file(self.pool.disk, self.pool.folder, unit, record)

    def list_phases(self, run: str) -> list[str]:
        """List the phases of a run that have slots, sorted."""
        infos = [slot.header.info for slot in self.pool.scan()]
        return sorted({str(info["phase"]) for info in infos if info.get("run") == run and "phase" in info})

    def list_trainings(self, phase: str) -> list[dict]:
        """List the descriptions, unverified, of the newest slot of each training with this phase; without users' own
        saves.
        """
        newest: dict[str, dict] = {}
        for info in (slot.header.info for slot in self.pool.scan()):
            run = str(info.get("run", ""))
            training = run.startswith("train-") and not run.endswith(USER_SUFFIX)
            if info.get("phase") == phase and "saved_at" in info and training:
                newest[run] = max(newest.get(run, info), info, key=slot_recency)
        return list(newest.values())

    def _verify_slots(self, unit: CheckpointUnit, slots: list[Slot]) -> tuple[dict[Path, dict], dict[Path, Exception]]:
        """Return ({path: info} of the unit's verified slots, oldest first; {path: reason} of its others).

        What this process has written or verified is not hashed again.
        """
        good: dict[Path, dict] = {}
        bad: dict[Path, Exception] = {}
        for slot in (slot for slot in slots if slot.belongs_to_unit(unit)):
            try:
                if slot.fault:
                    raise slot.fault
                info = {**slot.header.info, "bytes": slot.header.size, "hash": slot.header.hash}
                if self._verified_hashes.get(slot.path) != slot.header.hash:
                    info = read_checkpoint_file(self.pool.disk, slot.path)
                good[slot.path], self._verified_hashes[slot.path] = {**info, "path": str(slot.path)}, info["hash"]
            except (CheckpointError, WorkspaceError) as error:
                bad[slot.path] = error
        return dict(sorted(good.items(), key=lambda item: slot_recency(item[1]))), bad

    # ------------------------------------------------------------------ writing

    def write(self, unit: CheckpointUnit, keep: int, info: dict, state: memoryview | bytes, after: int = 0) -> dict:
        """Write the encoded state to the next slot and read it back; return its info, with its
        `sequence`, and `wrote_seconds` until it was on the disk.

        after : a sequence that the new one exceeds: of the unit's newest checkpoint on another disk.
        Raises WorkspaceError or CheckpointError; the retained checkpoints still stand then, at least the newest two.
        """
        info = {"run": unit.run, "phase": unit.phase, "lease": self.lease.to_dict(), **info}
        disk, size = self.pool.disk, len(state) + (1 << 13)

        def store(path: Path, sequence: int) -> dict:
            return write_checkpoint_file(disk, path, {**info, "sequence": sequence}, state)

        return self._write(unit, keep, store, size, lease_fence_order(info["lease"]), after)

    def copy_from_pool(
        self, unit: CheckpointUnit, keep: int, source: str, fence: int = 0, source_disk: Disk | None = None
    ) -> dict:
        """Copy a checkpoint from another pool, byte for byte; as `write` otherwise.

        Parameters
        ----------
        source : path of the container in the other pool.
        fence : of the session that copies, which may be later than the one that saved.
        source_disk : disk of the other pool; given when the unit's present owner downloads.
        """
        source_on = source_disk or Disk()
        header = read_checkpoint_file_header(source_on, Path(source))

        def store(path: Path, sequence: int) -> dict:
            return copy_checkpoint_file(self.pool.disk, path, source_on, Path(source))

        writer = lease_fence_order(header.info.get("lease"))
        if fence > writer[0]:
            writer = fence, self.lease.session
        if source_disk is not None:  # downloaded by the unit's present owner: the session that saved it may be gone
            writer = max(writer, lease_fence_order(self.read_lease(unit)))
        return self._write(unit, keep, store, header.size, writer)

    def _write(
        self, unit: CheckpointUnit, keep: int, store: Callable[[Path, int], dict], size: int, writer: tuple[int, str],
        after: int = 0,
    ) -> dict:  # fmt: skip
        with self.pool.exclusive_lock():
            slots = self.pool.scan()
            good, bad = self._verify_slots(unit, slots)
            infos = [slot.header.info or slot.manifest for slot in slots if slot.belongs_to_unit(unit)]
            check_fencing_token(unit, writer, infos, self.read_lease(unit))
            sequence = 1 + max([after, self._last_sequence.get(unit, 0), *map(_sequence_of, infos)])
            unfinished = self._unfinished_writes(unit, slots)
            good = {
                path: info for path, info in good.items() if info["sequence"] == unfinished.get(path, info["sequence"])
            }
            others = [slot for slot in slots if slot.path not in unfinished]
            excluded = {*unfinished, *self._quarantined(unit, others, bad)}
            failure: Exception | None = None
            known = {slot.path for slot in slots} - {self._refused_new}
            for path in self._targets(unit, keep, slots, good, _torn_slots(bad), excluded):
                try:
                    self.pool.make_free_space(slots, path, size)
                    owner = {"run": unit.run, "phase": unit.phase, "session": self.lease.session}
                    self.pool.write_manifest(path, WRITING, {**owner, "sequence": sequence})
                    self._finished_writes.discard(path)
                    began = time.monotonic()
                    store(path, sequence)
                    if path not in known:
                        self.pool.sync_folder()
                    write_seconds = time.monotonic() - began
                    saved = {**read_checkpoint_file(self.pool.disk, path), "path": str(path)}
                except (WorkspaceError, CheckpointError) as error:
                    failure, code = failure or error, getattr(error.__cause__, "errno", None)
                    if code != errno.ETIMEDOUT:
                        self._finished_writes.add(path)
                        self._refused_new = path if path not in known else self._refused_new
                    if isinstance(error, WorkspaceError) and code not in FULL:
                        break
                    continue
                self._verified_hashes[path], self._last_sequence[unit] = saved["hash"], saved["sequence"]
                self._refused_new = None if path == self._refused_new else self._refused_new
                self.pool.write_manifest(path, HELD, saved)
                self._repair(slots, {slot: info for slot, info in good.items() if slot not in {path, *unfinished}})
                return {**saved, "wrote_seconds": write_seconds}
            raise failure or CheckpointError("No slot can be written", where=self.pool.folder)

    def release(self, unit: CheckpointUnit, holder: dict | None = None) -> None:
        """Return the unit's slots to the pool after its artifact is registered, a slot with a hanging write last.

        holder : the lease of the caller. Raises TakenOverError when a later session holds the unit.
        """
        with self.pool.exclusive_lock():
            slots = self.pool.scan()
            if holder is not None:
                infos = [slot.header.info or slot.manifest for slot in slots if slot.belongs_to_unit(unit)]
                check_fencing_token(unit, lease_fence_order(holder), infos, self.read_lease(unit))
            owned = [slot for slot in slots if slot.belongs_to_unit(unit) and not slot.must_not_overwrite]
            unfinished = self._unfinished_writes(unit, slots)
            for slot in owned:
                self.pool.release(slot, last=slot.path in unfinished)

    def free_slot_bytes(self) -> int:
        """Return the bytes of checkpoints that ended units have returned to the pool."""
        return self.pool.free_slot_bytes()

    def empty_free_slots(self) -> int:
        """Empty those slots; return their bytes."""
        return self.pool.empty_free_slots()

    def _unfinished_writes(self, unit: CheckpointUnit, slots: list[Slot]) -> dict[Path, int]:
        """Return {slot: sequence} of the newest slots whose write this session started and never saw end.

        A slot that holds that very sequence is intact, even if the write is repeated later.
        """
        sequences = {
            slot.path: _sequence_of(slot.manifest) for slot in _being_written(unit, slots)
            if slot.path not in self._finished_writes and slot.manifest.get("session") == self.lease.session
        }  # fmt: skip
        return dict(sorted(sequences.items(), key=lambda item: item[1])[-_MAX_UNFINISHED:])

    def _targets(
        self, unit: CheckpointUnit, keep: int, slots: list[Slot], good: dict, empty: set[Path], excluded: set[Path]
    ) -> list[Path]:
        """Return the slot to write: an own one without a retained checkpoint, else a returned one, else a new one.
        Then, for a full disk, the oldest own valid slot, whose space is already used, if two valid ones would remain.

        Parameters
        ----------
        empty : own slots with torn content.
        excluded : slots that must not be written.
        """
        retained, best = retained_slots(good, keep)
        reserved = (slot.path for slot in _being_written(unit, slots))
        ours = [*sorted(empty), *reserved, *(path for path in good if path not in retained)]
        returned = [slot.path for slot in self.pool.list_free_slots(slots)]
        again = [self._refused_new] if self._refused_new else []
        free = [path for path in [*ours, *again, *returned] if path not in retained | excluded]
        first = free[0] if free else self.pool.new_slot_path()
        others = [path for path in good if path not in {first} | excluded]
        spare = [path for path in others if path != best] if len(others) > MIN_KEPT else []
        return [first, *spare[:1]]

    def _quarantined(self, unit: CheckpointUnit, slots: list[Slot], bad: dict[Path, Exception]) -> set[Path]:
        """Return the slot to leave alone: the newest torn one, for inspection, or one whose write another session
        never ended, which may be carried out late.
        """
        unfinished = {slot.path for slot in _being_written(unit, slots)}
        torn = {slot.path for slot in slots if slot.path in _torn_slots(bad) and slot.header.size}
        candidates = [slot for slot in slots if slot.path in torn | unfinished]
        if not candidates:
            return set()
        slot = max(candidates, key=lambda slot: max(_sequence_of(slot.manifest), _sequence_of(slot.header.info)))
        if slot.path in torn and slot.manifest.get("status") != QUARANTINED:
            self.pool.write_manifest(slot.path, QUARANTINED, {**slot.header.info, "reason": str(bad[slot.path])})
        return {slot.path}

    def _repair(self, slots: list[Slot], good: dict[Path, dict]) -> None:
        """Write manifests that are missing or outdated from the containers."""
        notes = {slot.path: slot.manifest for slot in slots}
        for path, info in good.items():
            if notes[path].get("status") != HELD or notes[path].get("hash") != info["hash"]:
                self.pool.write_manifest(path, HELD, info)


def _being_written(unit: CheckpointUnit, slots: list[Slot]) -> list[Slot]:
    """List the slots whose manifest names the unit and an unfinished write."""
    return [slot for slot in slots if slot.manifest.get("status") == WRITING and unit.matches(slot.manifest)]


def _descriptions(slots: list[Slot]) -> list[dict]:
    """List the descriptions of the slots whose ends show no fault, newest first; with `hash` and `path`."""
    whole = [slot for slot in slots if not slot.fault]
    infos = [{**slot.header.info, "hash": slot.header.hash, "path": str(slot.path)} for slot in whole]
    return sorted(infos, key=slot_recency, reverse=True)


def slot_recency(info: dict) -> tuple[int, int]:
    """Return the sort key of a checkpoint: by fence, then by sequence, because a session that was taken over may use
    any sequence.
    """
    return fencing_token_of(info), info["sequence"]


def _sequence_of(info: dict) -> int:
    """Return the sequence in a container's info or manifest; 0 without a plausible one."""
    number = info.get("sequence")
    return number if type(number) is int and 0 <= number < _LARGEST_SEQUENCE else 0


def retained_slots(good: dict[Path, dict], keep: int) -> tuple[set[Path], Path | None]:
    """Return (slots that must not be written, the best slot): the last `keep`, at least two, and the one with the
    lowest val_loss, the earliest of equals. `good` is oldest first.
    """
    losses = {path: slot_val_loss(info) for path, info in good.items()}
    best = min(losses, key=lambda path: losses[path], default=None)
    best = best if best is not None and losses[best] < math.inf else None
    return {*list(good)[-max(keep, MIN_KEPT) :], *([best] if best else [])}, best


def slot_val_loss(info: dict) -> float:
    """Return a checkpoint's val_loss; infinity when it was not measured."""
    loss = (info.get("metrics") or {}).get("val_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def _torn_slots(bad: dict[Path, Exception]) -> set[Path]:
    """Return the slots with torn content: neither intact foreign files, nor slots that the disk refused to read."""
    return {
        path
        for path, error in bad.items()
        if isinstance(error, CheckpointError) and not isinstance(error, ForeignFileError)
    }
