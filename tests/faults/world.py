"""A small training on a faulty drive, and a ledger of its acknowledged saves."""

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from ml_factory.checkpoints import slot_pool
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import FactoryError
from ml_factory.seeding import seeded_generator
from ml_factory.storage.serialization import deserialize_state, serialize_state
from tests.faults.cloud import Cloud
from tests.faults.disk import DriveDisk
from tests.faults.drive import Drive

KEEP, PHASE, SIZE = 3, "toy", 600


@functools.cache
def state_at(step: int) -> dict:
    """The training's state after so many steps: momentum SGD on noise that is a function of the step."""
    if step == 0:
        return {"step": 0, "weights": np.zeros(SIZE), "momentum": np.zeros(SIZE)}
    before = state_at(step - 1)
    momentum = 0.9 * before["momentum"] + seeded_generator("toy", step).normal(size=SIZE)
    return {"step": step, "weights": before["weights"] - 0.01 * momentum, "momentum": momentum}


def check_state(state: dict) -> int:
    """The step of a state that is exactly the training's after that many steps."""
    wanted = state_at(state["step"])
    for name in ("weights", "momentum"):
        np.testing.assert_array_equal(state[name], wanted[name])
    return state["step"]


@dataclass
class World:
    """One machine after another over one cloud.

    saved_files : sequence -> (the slot's bytes, the step), for every save that was acknowledged as verified.
    """

    local: Path  # a real folder, for locks
    settings: dict = field(default_factory=dict)  # of the drive
    step: int = 0
    saved_files: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def __post_init__(self):
        self.drive = Drive(Cloud(), **self.settings)
        self.new_process()

    def new_process(self) -> None:
        """Another process on the same machine: what the old one had open is closed, its memory is gone."""
        for number in list(self.drive.handles):
            self.drive.forget(number)
        self.disk = DriveDisk(self.drive, self.local)
        self.disk.heal()
        self.manager = CheckpointManager(
            self.local / "checkpoints", keep_last=KEEP, run="run", background=False, tiers=StorageTiers(disk=self.disk)
        )

    def new_machine(self) -> None:
        """A machine that has what the cloud had received."""
        self.drive = Drive(self.drive.cloud, **self.settings)
        self.new_process()

    def end(self) -> None:
        self.disk.heal()
        self.manager.close()

    def save(self) -> bool:
        """Train one step and save; whether it was acknowledged."""
        self.step += 1
        info = self.manager.save_checkpoint(PHASE, state_at(self.step), force=True)
        return info is not None and self.acknowledged(info)

    def acknowledged(self, info: dict) -> bool:
        path = f"/{Path(info['path']).relative_to(self.local).as_posix()}"
        self.saved_files[info["sequence"]] = (bytes(self.drive.files[path].data), self.step)
        return True

    def load(self) -> dict | None:
        return self.manager.load_latest_checkpoint(PHASE)

    def resume(self) -> None:
        """Go on from the newest checkpoint, or from the beginning."""
        found = self.load()
        self.step = check_state(found["state"]) if found else 0

    def alive(self) -> dict[int, int]:
        """sequence -> step of every acknowledged save whose bytes are on the drive, whole, under any name."""
        contents = {bytes(file.data) for file in self.drive.files.values()}
        return {number: step for number, (data, step) in self.saved_files.items() if data in contents}


class Uploaded(World):
    """The same with the drive as a mount: saves go to a pool on the local disk and are uploaded; a machine that
    finds nothing there downloads from the mount. A save is acknowledged when the mount is reported to hold it.
    """

    unit = CheckpointUnit("run", PHASE)

    def new_process(self) -> None:
        super().new_process()
        lease = SlotWriterId(f"session-{len(self.drive.calls)}")
        self.mount = Slots(SlotPool(self.local / "checkpoints", self.disk, lock=self.local / "mount.lock"), lease)
        self.home = getattr(self, "home", None) or Slots(SlotPool(Path(tempfile.mkdtemp(dir=self.local))), lease)

    def new_machine(self) -> None:
        self.home = None
        super().new_machine()

    def save(self) -> bool:
        self.step += 1
        here = self.home.write(self.unit, KEEP, {"saved_at": "", "metrics": {}}, serialize_state(state_at(self.step)))
        try:
            return self.acknowledged(self.mount.copy_from_pool(self.unit, KEEP, here["path"]))
        except FactoryError:
            return False

    def fetch(self) -> dict | None:
        """Load on a machine whose local disk is empty."""
        self.home = Slots(SlotPool(Path(tempfile.mkdtemp(dir=self.local))), SlotWriterId("fresh"))
        return self.load()

    def load(self) -> dict | None:
        here, passed = self.home.list_unverified(self.unit), []
        there = self.mount.list_unverified(self.unit)
        if there and (not here or there[0]["sequence"] > here[0]["sequence"]):
            passed = self.mount.copy_to_pool(self.unit, KEEP, str(self.home.pool.folder))
        info, state, skipped = self.home.load_latest_valid(self.unit, deserialize_state)
        return info and {"state": state, **info, "skipped": passed + skipped}


def check_load(world: World, faulty: bool, load: Callable[[], dict | None] | None = None) -> None:
    """Check a load's answer: the newest, or, while the disk fails, an older one with a reason, or an error; a
    training that has a checkpoint never starts from scratch.
    """
    alive = world.alive()
    try:
        found = (load or world.load)()
    except FactoryError:
        assert faulty, "a healthy disk refused to load"
        return
    if not alive:
        return
    assert found is not None, "told to begin anew although there are checkpoints"
    step = check_state(found["state"])
    if step < max(alive.values()):
        assert faulty, f"step {step} loaded although {max(alive.values())} is there"
        assert found["skipped"], "an older one, and no reason given"


def check_goes_on(world: World) -> None:
    """On a healed disk: two more steps are saved, each is the newest, numbers never come twice."""
    world.resume()
    for _ in range(2):
        before = dict(world.saved_files)
        assert world.save(), "a healthy disk did not take a save"
        newest = max(world.saved_files)
        assert newest not in before or before[newest] == world.saved_files[newest], f"sequence {newest} came twice"
        assert newest > max(before, default=0), f"sequence {newest} after {max(before)}"
        found = world.load()
        assert found["sequence"] == newest and check_state(found["state"]) == world.step
    assert not {call.split()[0] for call in world.drive.calls} & {"remove", "rename"}, "something was deleted"


@contextmanager
def quiet(level: int = logging.CRITICAL) -> Iterator[None]:
    """No lines about saves that failed on purpose, and slots whose names are the same every time."""
    log, numbers = logging.getLogger("ml_factory"), count(1)
    before = log.level
    log.setLevel(level)
    names = SimpleNamespace(token_hex=lambda size: f"{next(numbers):0{2 * size}x}")
    try:
        with mock.patch.object(slot_pool, "secrets", names):
            yield
    finally:
        log.setLevel(before)
