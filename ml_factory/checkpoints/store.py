"""Checkpoint store: slots on the local disk, their copies on a mount, and the staging buffer that saves pass through.

A save copies the state in memory and returns; a child process writes it to a slot of the local disk and reads it back.
Where the workspace is on a mount (Drive), another child uploads it from there. The newest checkpoint is the one with
the highest sequence that verifies, on either disk.
"""

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_factory.background_thread import BackgroundThread
from ml_factory.checkpoints.child_slots import LOCAL_DISK, ChildSlots
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.leases import LeaseHeartbeat, LeaseHolder
from ml_factory.checkpoints.mirrored_leases import MirroredLeases
from ml_factory.checkpoints.save_writer import SaveWriter
from ml_factory.checkpoints.schedule import save_durations
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots, slot_recency
from ml_factory.checkpoints.staging_buffer import StagingBuffer
from ml_factory.checkpoints.uploader import CheckpointUploader, SaveStatus
from ml_factory.errors import CheckpointError, UnresponsiveMountError, WorkspaceError
from ml_factory.process_identity import process_id
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import deserialize_state
from ml_factory.storage.workspace import is_bucket_mirror

_LOCK_SECONDS = 2.0  # wait of a direct write for the mount's lock, which an upload holds or a local disk that hangs
_EXIT_SECONDS = 10.0  # for a local save at interpreter exit
UNRESPONSIVE_SECONDS = 1.0  # last wait for a mount that did not answer before, or when the process was asked to stop
_log = logging.getLogger("ml_factory")
_open: "weakref.WeakSet[CheckpointStore]" = weakref.WeakSet()


@dataclass(frozen=True)
class StorageTiers:
    """Disks and writer of a store of checkpoints.

    Parameters
    ----------
    local : folder on a local disk that saves are written to first when the checkpoints' folder is on a mount. None:
        below the user's cache folder for a mount (by the mount table, or $ML_FACTORY_MOUNTS), unused otherwise.
    quota_bytes : bytes that all checkpoints in the folder together may take; None: the free space.
    deadline_seconds : seconds without a reply after which a mount counts as dead.
    disk : a Disk through which this process itself works on the folder, for tests; None: children do.
    lease : identity of the writer, for workspaces that several sessions share; None: this process.
    """

    local: str | os.PathLike | None = None
    quota_bytes: int | None = None
    deadline_seconds: float = 60
    disk: Disk | None = None
    lease: SlotWriterId | None = None


class CheckpointStore:
    """The disks that one manager saves to and loads from.

    Parameters
    ----------
    folder : folder of all runs' checkpoints.
    keep_last : number of checkpoints kept of each unit.
    tiers : see `StorageTiers`.
    background : write in threads and child processes; otherwise a save is on the disk when it returns.
    on_saved : called after each save that is on the disk, from the writing thread.

    Attributes
    ----------
    home : slots that are written first.
    mount, uploader : slots on the mount, and what copies there from `home`; None without a mount.
    writer : writes to `home`, or to the mount itself when the local disk refuses a save.
    last_saves : status of each unit's last save.
    """

    def __init__(
        self, folder: str | os.PathLike, keep_last: int, tiers: StorageTiers, background: bool,
        on_saved: Callable[[], object],
    ):  # fmt: skip
        self.folder, self.keep_last, self.on_saved = Path(os.path.abspath(folder)), keep_last, on_saved
        self.lease, self.deadline = tiers.lease or SlotWriterId(process_id()), tiers.deadline_seconds
        self.staging, self.durations = StagingBuffer(), save_durations(self.folder)
        self.executor = BackgroundThread("checkpoint", inline=not background)
        self.last_saves: dict[CheckpointUnit, SaveStatus] = {}
        self._process, self._save_lock = process_id(), threading.RLock()
        self._holders: list[LeaseHolder] = []
        self.heartbeat = LeaseHeartbeat(lambda: list(self._holders))
        local, quota, disk = tiers.local, tiers.quota_bytes, tiers.disk
        if local is None and files.is_remote(self.folder):
            local = local_cache_folder("checkpoints") / fingerprint_json(str(self.folder))[:12]
        self.home_folder = self.folder if local is None else Path(os.path.abspath(local))
        self.locks = self.home_folder / "locks"
        own_disk, own_quota = (disk, quota) if local is None else (None, None)
        self.home = Slots(SlotPool(self.home_folder, own_disk, quota=own_quota), self.lease)
        child: ChildSlots | Slots = self.home
        if background and own_disk is None:
            child = ChildSlots(
                self.home_folder, self.locks / "pool.lock", self.lease, disk=LOCAL_DISK, memory=self.staging.file,
                quota=own_quota, deadline=self.deadline,
            )  # fmt: skip
        self.mount: ChildSlots | Slots | None = None
        direct: ChildSlots | Slots | None = None
        self.uploader: CheckpointUploader | None = None
        if local is not None:
            lock, executor = self.locks / "mount.lock", BackgroundThread("checkpoint-mount", inline=not background)
            self.mount = (
                ChildSlots(self.folder, lock, self.lease, quota=quota, deadline=self.deadline)
                if disk is None
                else Slots(SlotPool(self.folder, disk, lock=lock, quota=quota), self.lease)
            )
            direct = self.mount
            if disk is None:
                direct = ChildSlots(
                    self.folder, lock, self.lease, memory=self.staging.file, quota=quota, deadline=self.deadline,
                    lock_seconds=_LOCK_SECONDS,
                )  # fmt: skip
            self.uploader = CheckpointUploader(self.home, self.mount, keep_last, executor, target=str(self.folder))
        self._writing: CheckpointUnit | None = None  # the unit of the newest state handed to the writer
        self.writer = SaveWriter(self.home, child, direct, keep_last, self.deadline, background)
        _open.add(self)

    @property
    def owned_by_this_process(self) -> bool:
        """True in the process that opened the store, False in a fork of it."""
        return self._process == process_id()

    def check_process(self) -> None:
        """Raise CheckpointError in a forked process: the staging buffer, the writing threads and the leases are its
        parent's.
        """
        if not self.owned_by_this_process:
            raise CheckpointError(
                "This CheckpointManager belongs to another process", where=self.folder,
                got=f"process {os.getpid()}, made by fork", wanted="the process that opened it",
                next_step="open a CheckpointManager in the process that saves",
            )  # fmt: skip

    def lease_holder(self, unit: CheckpointUnit) -> LeaseHolder:
        """Return the lease of this session on a unit, which the heartbeat renews while it is held."""
        executor = self.executor if self.uploader is None else self.uploader.executor
        root = self.folder.parent
        local = MirroredLeases(self.home, root) if is_bucket_mirror(root) else self.home
        self._holders.append(LeaseHolder(unit, self.lease.session, local, self.mount, executor.submit))
        return self._holders[-1]

    # ------------------------------------------------------------------ writing

    @contextmanager
    def staging_lock(self, unit: CheckpointUnit, seconds: float) -> Iterator[bool]:
        """Hold the staging buffer alone among this process's threads, after its last content was written.

        Yields False when that took longer than `seconds`. A save that is being repeated is given up for a newer one of
        its own unit only.
        """
        ends = time.monotonic() + seconds
        if not self._save_lock.acquire(timeout=seconds):
            yield False
            return
        try:
            if self._writing == unit:
                self.writer.newer.set()
            free = self.wait_home(max(0.0, ends - time.monotonic()))
            self.writer.newer.clear()
            yield free
        finally:
            self._save_lock.release()

    def write(
        self, unit: CheckpointUnit, info: dict, state: memoryview, *, mount_fence: Callable[[], int], force: bool,
        last: bool,
    ) -> tuple[dict, bool]:  # fmt: skip
        """Write a staged state, as `SaveWriter.write`; return (its info, True when it is on the mount)."""
        self._writing = unit
        metrics = {key: _encode_metric(value) for key, value in info["metrics"].items()}
        saved, disk = self.writer.write(
            unit, {**info, "metrics": metrics}, state, shared=self.staging.shared, mount_fence=mount_fence, force=force,
            last=last,
        )  # fmt: skip
        return _with_metrics(saved), disk != LOCAL_DISK

    def release(self, unit: CheckpointUnit, holder: dict | None = None) -> None:
        """Return the unit's slots to the pool, on both disks; `holder` as of `Slots.release`."""
        self.home.release(unit, holder)
        if self.uploader is not None:
            self.uploader.release(unit, holder)

    def free_slot_bytes(self) -> int:
        """Return the bytes of checkpoints, on both disks, that ended units have returned to the pool."""
        return sum(tier.free_slot_bytes() for tier in (self.home, self.mount) if tier is not None)

    def empty_free_slots(self) -> int:
        """Empty those slots on both disks; return their bytes. The files stay and are used again."""
        return sum(tier.empty_free_slots() for tier in (self.home, self.mount) if tier is not None)

    # ------------------------------------------------------------------ reading

    def load_latest(self, unit: CheckpointUnit, fence: int = 0) -> dict | None:
        """Return the unit's newest verified checkpoint, as `CheckpointManager.load_latest_checkpoint`.

        fence : of this session, for an upload that an earlier session did not finish.
        Raises WorkspaceError when the mount does not answer and nothing is on the local disk: to start from scratch
        then would lose what the mount holds.
        """
        self.check_process()
        self._wait_saves()
        info, state, skipped = self.home.load_latest_valid(unit, deserialize_state)
        unusable = self._download_newer(unit, info, fence)
        if unusable is not None:
            info, state, unreadable = self.home.load_latest_valid(unit, deserialize_state)
            skipped = list(dict.fromkeys([*unusable, *skipped, *unreadable]))
        if info is not None:
            return {"state": state, **_with_metrics(info), "skipped": skipped}
        if skipped:
            _log.warning("No checkpoint of %s can be used: %s", unit.phase, "; ".join(skipped))
        return None

    def _download_newer(self, unit: CheckpointUnit, local: dict | None, fence: int) -> list[str] | None:
        """Download a checkpoint that only the mount has; return the slots skipped there, None if nothing was
        downloaded.

        local : the newest that verified on the local disk. One that is torn there may be intact on the mount.
        """
        if self.mount is None or self.uploader is None:
            return None
        try:
            remote = self.mount.list_unverified(unit)
            if remote and (local is None or slot_recency(remote[0]) > slot_recency(local)):
                return self.mount.copy_to_pool(unit, self.keep_last, str(self.home_folder))
            if local is not None and local["hash"] not in {info["hash"] for info in remote}:
                self.uploader.enqueue_upload(unit, fence=lambda: fence)  # an earlier session ended before this upload
        except WorkspaceError as error:
            if local is None:
                raise
            _log.warning("Resuming from the local disk: %s", error)
        return None

    def list_checkpoints(self, unit: CheckpointUnit) -> list[dict]:
        """List the unit's verified checkpoints, oldest first, at most `keep_last`; one that is on the local disk is not
        read again on the mount.
        """
        found: dict[str, dict] = {}
        for tier, info in sorted(self._unverified(unit), key=lambda pair: slot_recency(pair[1]), reverse=True):
            if len(found) < self.keep_last and info["hash"] not in found:
                with suppress(CheckpointError, WorkspaceError):
                    found[info["hash"]] = tier.verify(info["path"])
        return [_with_metrics(info) for info in reversed(found.values())]

    def latest_info(self, unit: CheckpointUnit) -> dict | None:
        """Return the description of the unit's newest checkpoint, unverified; None without one. Cheap on a mount.

        Raises UnresponsiveMountError when the mount does not answer and nothing is on the local disk.
        """
        infos = [info for _, info in self._unverified(unit, needed=True)]
        return _with_metrics(max(infos, key=slot_recency)) if infos else None

    def _unverified(self, unit: CheckpointUnit, needed: bool = False) -> list[tuple[Slots | ChildSlots, dict]]:
        """List (tier, description) of the unit's checkpoints on both disks, the local one first.

        needed : raise UnresponsiveMountError when nothing is on the local disk and the mount does not answer.
        """
        self.check_process()
        self._wait_saves()
        found: list[tuple[Slots | ChildSlots, dict]] = []
        with suppress(WorkspaceError):
            found += [(self.home, info) for info in self.home.list_unverified(unit)]
        if self.mount is not None:
            remote = self._query_mount(lambda mount: mount.list_unverified(unit), needed and not found)
            found += [(self.mount, info) for info in remote or ()]
        return found

    def list_phases(self, run: str) -> list[str]:
        """List the phases of this run that have slots, on the local disk or the mount."""
        remote = self._query_mount(lambda mount: mount.list_phases(run)) or ()
        return sorted({*self.home.list_phases(run), *remote})

    def list_trainings(self, phase: str) -> list[dict]:
        """List the descriptions of each training's newest checkpoint with this phase, on either disk."""
        self.check_process()
        self._wait_saves()
        remote = self._query_mount(lambda mount: mount.list_trainings(phase)) or []
        newest = {info["run"]: info for info in remote}
        for info in self.home.list_trainings(phase):
            newest[info["run"]] = max(info, newest.get(info["run"], info), key=slot_recency)
        return list(newest.values())

    def _query_mount(self, query: Callable[[ChildSlots | Slots], Any], needed: bool = False) -> Any:
        """Return the mount's answer; None, with a warning, when it does not answer.

        needed : raise UnresponsiveMountError instead of returning None.
        """
        if self.mount is None:
            return None
        try:
            return query(self.mount)
        except WorkspaceError as error:
            if needed and isinstance(error, UnresponsiveMountError):
                raise
            _log.warning("Only the local disk is read: %s", error)
            return None

    # ------------------------------------------------------------------ waiting and closing

    def wait_home(self, seconds: float | None = None) -> bool:
        """Wait for the writes to the first disk; return False when some are unfinished after `seconds`."""
        return self.executor.wait(seconds)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for every background write (disk and mount); return False when some are unfinished after `seconds`."""
        began = time.monotonic()
        if not self.wait_home(seconds):
            return False
        remaining = None if seconds is None else seconds - (time.monotonic() - began)
        return self.uploader is None or self.uploader.wait(remaining)

    def _wait_saves(self) -> None:
        """Wait until every save that this process started on this disk is written."""
        for store in open_checkpoint_stores():
            if store.home_folder == self.home_folder:
                store.wait_home(self.deadline)

    def close(self, seconds: float | None = None) -> None:
        """Finish the uploads and end the threads and children; `seconds` as of `CheckpointManager.close`."""
        if self.uploader is not None:
            unresponsive = self.uploader.unresponsive or files.is_unresponsive(self.folder)
            usual = UNRESPONSIVE_SECONDS if unresponsive else self.deadline
            self.uploader.wait(usual if seconds is None else seconds)
            self.uploader.close()
        self.executor.close()
        self.close_children()
        if self in _open:
            _open.discard(self)
            self.staging.close()

    def close_children(self) -> None:
        """End the child processes; no mount is waited for."""
        for tier in (self.writer.child, self.writer.direct, self.mount):
            if isinstance(tier, ChildSlots):
                tier.close()


def open_checkpoint_stores() -> list[CheckpointStore]:
    """List the stores that this process has open."""
    return [store for store in list(_open) if store.owned_by_this_process]


def _encode_metric(value: object) -> object:
    """Encode NaN and infinity (a score not yet measured), which JSON lacks, as {"float": text}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _with_metrics(info: dict) -> dict:
    """Return a checkpoint's info with its metrics decoded."""
    metrics = info.get("metrics") or {}
    read = {key: float(one["float"]) if isinstance(one, dict) else one for key, one in metrics.items()}
    return {**info, "metrics": read}


def _at_exit() -> None:
    for store in open_checkpoint_stores():
        store.wait_home(_EXIT_SECONDS)
        store.close_children()


atexit.register(_at_exit)
