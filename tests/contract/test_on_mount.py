"""A drive that refuses, drops and tears files: what was acknowledged is loaded by a machine with an empty disk."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ml_factory import CheckpointManager, Workspace
from ml_factory.errors import CheckpointError, WorkspaceError
from tests.contract.doors import mirror, read_checkpoint


@pytest.fixture
def world(tmp_path, monkeypatch, request):
    made = World(tmp_path, monkeypatch, getattr(request, "param", 0))
    yield made
    for manager in made.managers:
        manager.close(1)


class World:
    """A drive and the machine that uses it at present, through the public classes alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
        self.folder, self.patch, self.luck = folder, monkeypatch, random.Random(seed)
        self.drive, self.machines, self.saved = folder / "drive", 0, -1
        monkeypatch.setenv("ML_FACTORY_MOUNTS", str(self.drive))
        monkeypatch.setattr(mirror, "LOOK_AGAIN_SECONDS", 0.0)
        self.drive.mkdir()
        self.managers: list[CheckpointManager] = []
        self.acknowledged: set[int] = set()  # values that the drive held when `save` was acknowledged, and holds still
        self.other_machine()

    def other_machine(self) -> None:
        """Sit at a machine with an empty disk; the one before is gone, a quarter of an hour ago."""
        for manager in self.managers:
            manager.wait(10)  # a lease is overwritten in place: two writers would tear it
        for lease in self.drive.glob("ws/checkpoints/leases/*.json"):
            record = json.loads(lease.read_text())
            lease.write_text(json.dumps({**record, "seen": record["seen"] - 1000}))
        self.machines += 1
        self.patch.setenv("XDG_CACHE_HOME", str(self.folder / f"disk-{self.machines}"))
        self.open()
        wanted = max(self.acknowledged, default=None)
        found = self.load()
        assert found is None if wanted is None else found is not None and found >= wanted
        self.saved = -1 if found is None else found

    def open(self) -> None:
        """Begin a session on this machine."""
        self.manager = CheckpointManager(Workspace(str(self.drive / "ws")).checkpoints, run="r")
        self.managers.append(self.manager)

    def load(self) -> int | None:
        found = self.manager.phase("p").load()
        if found is None:
            return None
        assert (found["state"]["a"] == found["state"]["value"]).all()
        return found["state"]["value"]

    def save(self) -> None:
        self.saved += 1
        state = {"value": self.saved, "a": np.full(200, self.saved)}
        info = self.manager.save_checkpoint("p", state, force=True, metrics={"val_loss": self.luck.random()})
        if self.manager.wait(60):
            assert "mount" in info["status"]
            self.acknowledged = self.on_drive()
            assert self.saved in self.acknowledged
        else:
            assert info["status"] == "saved locally"

    def session(self) -> None:
        """The session ends, another begins on the same machine."""
        self.manager.close(1)
        self.open()
        assert self.load() == (None if self.saved < 0 else self.saved)

    def refuse(self) -> None:
        """The drive takes nothing until the next save is over."""
        place = self.drive / "ws/checkpoints/r"
        if not place.exists():
            return
        place.rename(self.drive / "away")
        place.touch()
        self.save()
        place.unlink()
        (self.drive / "away").rename(place)
        if self.luck.random() < 0.5:  # the heartbeat comes before the next save
            self.manager.phase("p").beat()
            assert self.manager.wait(60) and self.saved in self.on_drive()
            self.acknowledged = self.on_drive()

    def damage(self) -> None:
        """The drive loses a file, or a part of it."""
        for path in self.luck.sample(sorted(self.drive.glob("ws/checkpoints/r/*.ckpt")), 1):
            if self.luck.random() < 0.5:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: self.luck.randrange(400)])
            self.acknowledged &= self.on_drive()

    def on_drive(self) -> set[int]:
        found = set()
        for path in self.drive.glob("ws/checkpoints/r/*.ckpt"):
            try:
                found.add(read_checkpoint(path)[1]["value"])
            except CheckpointError:
                continue
        return found


@pytest.mark.parametrize("world", range(4), indirect=True)
def test_drive_that_refuses_drops_and_tears_loses_no_acknowledged_save(world):
    for _ in range(14):
        step = world.luck.choice(["save", "save", "save", "session", "refuse", "damage", "other_machine"])
        if step == "damage" and not list(world.drive.glob("ws/checkpoints/r/*.ckpt")):
            continue
        getattr(world, step)()
    world.other_machine()


@pytest.mark.parametrize("size", [100, -1])
@pytest.mark.parametrize("pushed", [False, True])
def test_checkpoint_torn_on_local_disk_is_fetched_from_drive(world, size, pushed):
    world.save()
    [path] = (world.manager.folder.folder / "r").glob("*.ckpt")
    path.write_bytes(path.read_bytes()[:size])
    if pushed:  # a verb that ends, or the next save
        Workspace(str(world.drive / "ws")).push()
    assert world.load() == 0 and read_checkpoint(path) and world.on_drive() == {0}


def test_resume_fetches_newest_checkpoint_and_the_next_only_where_that_one_is_torn(world):
    manager, large, whole = world.manager, np.arange(300_000.0), 2_000_000
    for value in range(5):
        state = {"value": value, "a": large}
        assert manager.save_checkpoint("p", state, force=True, metrics={"val_loss": float(value > 0)})
    manager.close()
    found = []

    def machine(name: str) -> CheckpointManager:
        world.patch.setenv("XDG_CACHE_HOME", str(world.folder / name))
        world.managers.append(made := CheckpointManager(Workspace(world.drive / "ws").checkpoints, run="r"))
        found[:] = [made.folder.folder / "r"]
        return made

    def here() -> list[bool]:
        return sorted(path.stat().st_size > whole for path in found[0].glob("p.*.ckpt"))

    second = machine("second")
    assert here() == [False] * 5
    assert second.phase("p").load()["state"]["value"] == 4 and here() == [False] * 4 + [True]
    second.save_checkpoint("p", {"value": 5, "a": large}, force=True, metrics={"val_loss": 0.5})
    assert second.wait(30) and 0 in world.on_drive()  # the best one, of which only the header is here
    second.close()
    names = {read_checkpoint(path)[1]["value"]: path for path in world.drive.glob("ws/checkpoints/r/*.ckpt")}
    names[5].write_bytes(names[5].read_bytes()[:-1])
    assert machine("third").phase("p").load()["state"]["value"] == 4
    assert not names[5].with_suffix(".ckpt.kept").exists() and here() == [False] * 4 + [True]
    fourth = machine("fourth")
    os.rename(world.drive, world.folder / "away")
    with pytest.raises(WorkspaceError):  # and does not start again
        fourth.load_latest_checkpoint("p")


def test_process_that_ends_without_close_releases_its_lease_on_drive(world, spawn):
    code = (
        "import sys; from ml_factory import *; manager = CheckpointManager(Workspace(sys.argv[1]).checkpoints, run='r')"
    )
    process = spawn(f"{code}; manager.save_checkpoint('q', {{}}, force=True)", world.drive / "ws")
    assert process.wait(60) == 0
    assert world.manager.phase("p").lease.held and world.manager.wait(30)
    leases = [json.loads(path.read_text()) for path in world.drive.glob("ws/checkpoints/leases/*.json")]
    assert sorted(lease["released"] for lease in leases) == [False, True]


def test_session_ends_as_early_as_its_longest_upload_needs(world, monkeypatch):
    moments, ending, phase = iter((0.0, 1.0, 60.0, 120.0, 180.0, 180.0, 180.0)), [], world.manager.phase("p")
    clock = SimpleNamespace(**{**vars(time), "perf_counter": moments.__next__})
    monkeypatch.setattr("ml_factory.checkpoints.manager.time", clock)
    remote = mirror.open_mirror(str(world.drive / "ws")).remote
    send = remote.put  # for three minutes, with a beat after each
    monkeypatch.setattr(remote, "put", lambda *one: (phase.beat(), phase.beat(), send(*one))[2], raising=False)
    world.save()
    world.manager.ending = ending.append
    assert phase.due_in() > 0 and ending == [180.0]


def test_heartbeat_goes_on_after_a_disk_that_failed(tmp_path, monkeypatch):
    def fails(*_):
        beats.append(1)
        raise OSError("a rename failed")

    beats, deadline = [], time.monotonic() + 10
    monkeypatch.setattr("ml_factory.checkpoints.manager.RENEW_SECONDS", 0.01)
    with CheckpointManager(tmp_path, run="r") as manager, monkeypatch.context() as patch:
        patch.setattr(manager.phase("p").lease, "renew", fails)
        manager.start_beating()
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(beats) >= 3


def test_rm_of_checkpoints_on_drive_begins_anew_and_finished_files_are_deleted_there(world):
    world.save()
    (world.drive / "ws/results/note.txt").write_text("something else is listed")
    world.manager.close()
    shutil.rmtree(world.drive / "ws/checkpoints")
    world.open()
    assert world.load() is None
    world.save()
    world.manager.phase("p").remove_files()
    assert world.manager.save_checkpoint("q", {"a": 1}, force=True) and world.manager.wait()
    assert list(world.drive.glob("ws/checkpoints/r/p.*"))  # until the verb has pushed what replaces it
    Workspace(str(world.drive / "ws")).push()
    assert [path.name for path in world.drive.glob("ws/checkpoints/r/*")] == ["q.0.ckpt"]


def test_empty_machine_refuses_to_begin_anew_while_drive_does_not_answer(world, tmp_path, monkeypatch):
    world.save()
    world.manager.close()
    shutil.rmtree(world.drive)
    world.drive.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(WorkspaceError):
        world.open()
