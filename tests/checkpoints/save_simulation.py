"""A training on disks that fail by a timetable, on a simulated clock."""

import errno
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ml_factory import errors
from ml_factory.checkpoints import save_writer, uploader
from ml_factory.checkpoints.child_slots import LOCAL_DISK, MOUNT, KilledChildError
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import read_checkpoint_file
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import SaveSchedule
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import CheckpointError
from ml_factory.storage.serialization import deserialize_state

MINUTE = 60.0
KINDS = ("EIO", "ENOSPC", "hang", "killed")


@dataclass(frozen=True)
class Outage:
    """A stretch of seconds in which a disk does not take writes; `kind` as of KINDS."""

    start: float
    end: float
    kind: str


class Clock:
    """Simulated seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimetableDisk(Disk):
    """A disk with outages; each operation takes a millisecond, one that hangs until the outage or its deadline ends."""

    def __init__(self, clock: Clock, outages: list[Outage], answer_seconds=lambda: 15.0):
        self.clock, self.outages, self.answer_seconds, self.count, self._gave_up = (
            clock,
            outages,
            answer_seconds,
            0,
            -1.0,
        )

    def enter(self, operation: str) -> None:
        self.count += 1
        if self.clock.now == self._gave_up:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        self.clock.now += 0.001
        kind = next((one.kind for one in self.outages if one.start <= self.clock.now < one.end), "")
        if kind == "EIO" or (kind == "ENOSPC" and operation == "write"):
            raise OSError(getattr(errno, kind), kind)
        if kind == "killed":
            raise KilledChildError("killed")
        if kind == "hang":
            end = next(one.end for one in self.outages if one.start <= self.clock.now < one.end)
            given_up = self.clock.now + self.answer_seconds()
            self.clock.now = min(end, given_up)
            if given_up < end:
                self._gave_up = given_up
                raise TimeoutError(errno.ETIMEDOUT, "no answer")


def _timed(name):
    method = getattr(Disk, name)

    def operation(self, *args):
        self.enter(name)
        return None if name in ("fsync", "sync_folder") else method(self, *args)

    return operation


for _name in [name for name in vars(Disk) if not name.startswith("_") and name != "close"]:
    setattr(TimetableDisk, _name, _timed(_name))


class Concurrently:
    """Runs the uploads in no time of the training's: they have a thread of their own."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def submit(self, job) -> None:
        before = self.clock.now
        job()
        self.clock.now = before

    def wait(self, seconds=None) -> bool:
        return True

    def close(self) -> None:
        pass


class Simulation:
    """A training that saves when a save is due, on a local disk and, unless `mounted` is False, a mount."""

    def __init__(self, folder: Path, monkeypatch, outages: dict[str, list[Outage]], minutes: float, mounted=True):
        self.clock, self.folder, self.interval = Clock(), folder, minutes * 60
        names = (LOCAL_DISK, MOUNT) if mounted else (LOCAL_DISK,)
        self.disks = {name: TimetableDisk(self.clock, outages.get(name, [])) for name in names}
        self.folders = {LOCAL_DISK: folder / ("here" if mounted else "there"), MOUNT: folder / "there"}
        for module in (save_writer, uploader):
            monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": self.clock}))
        self.manager = self._manager(mounted)
        self.manager.store.home.pool.disk = self.disks[LOCAL_DISK]
        for name, disk in self.disks.items():
            disk.answer_seconds = lambda name=name: self.manager.store.writer._answer_seconds(name)
        monkeypatch.setattr(errors, "redact_secrets", str)  # it reads the environment for every error
        self.manager.store.heartbeat.start = lambda: None  # it would wait for the disks in real time
        self.saved_at, self._read = -1.0, {}

    def _manager(self, mounted: bool) -> CheckpointManager:
        tiers = StorageTiers(self.folders[LOCAL_DISK] if mounted else None, disk=self.disks[[*self.disks][-1]])
        schedule = SaveSchedule(first_save_minutes=self.interval / 60, clock=self.clock)
        manager = CheckpointManager(
            self.folder / "there", self.interval / 60, run="r", background=False, schedule=schedule, tiers=tiers
        )
        if mounted:
            manager.store.uploader.executor = Concurrently(self.clock)
        return manager

    def step(self, seconds: float) -> None:
        """Train so long, then save if it is due."""
        self.clock.now += seconds
        self.manager.save_checkpoint("p", {"at": self.clock.now, "a": np.full(50, self.clock.now)})

    def newest(self) -> float:
        """Return the time of the newest intact state on any disk, read from the files; it never goes back."""
        for path in [path for folder in set(self.folders.values()) for path in folder.glob("slot-*.ckpt")]:
            version = path.stat().st_mtime_ns
            if self._read.get(path, (0, 0.0))[0] != version:
                self._read[path] = version, intact_state(path)
        found = max((at for _, at in self._read.values()), default=-1.0)
        assert found >= self.saved_at, "a checkpoint was lost"
        self.saved_at = found
        return found

    def takes_writes(self) -> bool:
        """Return True when one disk had no outage in the last minute."""
        begin, now = self.clock.now - MINUTE, self.clock.now
        return any(all(one.end <= begin or one.start > now for one in disk.outages) for disk in self.disks.values())

    def overdue(self) -> float:
        """Return the seconds since the newest state beyond one interval and a minute; 0 where nothing is promised."""
        if not self.takes_writes():
            return 0.0
        return self.clock.now - max(self.newest(), 0.0) - self.interval - MINUTE


def intact_state(path: Path) -> float:
    """Return the time of the state in a slot, read through; -1 where it is torn."""
    content = bytearray()
    try:
        read_checkpoint_file(Disk(), path, content)
    except CheckpointError:
        return -1.0
    state = deserialize_state(content)
    assert (state["a"] == state["at"]).all()
    return state["at"]


def random_outages(chance: random.Random, seconds: float) -> list[Outage]:
    """Draw outages of seconds to an hour, with pauses between them."""
    outages, at = [], chance.choice([0.0, chance.expovariate(1 / 600)])
    while at < seconds:
        end = at + chance.choice([0.5, 20.0, 100.0, 600.0, 3000.0]) * chance.uniform(0.5, 1.5)
        outages.append(Outage(at, end, chance.choice(KINDS)))
        at = end + chance.expovariate(1 / chance.choice([30.0, 300.0, 2000.0]))
    return outages
