"""The real CheckpointManager, its children included, on a real mount that fails."""

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_pool import CheckpointUnit
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.checkpoints.uploader import COPIED
from ml_factory.storage.serialization import deserialize_state
from tests.faults.mount import ROOT, Mount
from tests.faults.world import KEEP, PHASE, check_state, state_at

ERRORS = ("ENOTCONN", "EIO", "ETIMEDOUT", "ESTALE", "EDQUOT")


class Training:
    """Steps of the toy training on a mount, with a save after each.

    saved_files : step -> the bytes of its slot, for every save that is on the mount and was read back there.
    """

    unit = CheckpointUnit("run", PHASE)

    def __init__(self, mount: Mount, home: Path, deadline: float = 20):
        self.mount, self.home, self.step = mount, home, 0
        self.saved_files: dict[int, bytes] = {}
        self.manager = CheckpointManager(
            mount.path / "checkpoints",
            run="run",
            keep_last=KEEP,
            tiers=StorageTiers(local=home, deadline_seconds=deadline),
        )

    def save(self) -> dict:
        self.step += 1
        return self.manager.save_checkpoint(PHASE, state_at(self.step), force=True)

    def uploaded(self) -> bool:
        """Return True when the newest save is on the mount; then record it."""
        if not self.manager.wait():
            return False
        [state] = self.manager.store.last_saves.values()
        assert state.where == COPIED
        newest = self.manager.list_checkpoints(PHASE)[-1]
        self.saved_files[self.step] = Path(newest["path"]).read_bytes()
        return True

    def caught_up(self, seconds: float = 60) -> bool:
        """Return True when the save arrives after some tries: a short deadline may pass once more on a busy machine."""
        end = time.monotonic() + seconds
        while not (there := self.uploaded()) and time.monotonic() < end:
            time.sleep(0.1)
        return there

    def alive(self) -> list[int]:
        """Steps of which the cloud has every byte."""
        contents = {file.read_bytes() for file in self.mount.cloud.rglob("*") if file.is_file()}
        return [step for step, data in self.saved_files.items() if data in contents]

    def another_machine(self) -> "Training":
        """The machine is gone with its disk; a fresh one has what the cloud had received, and goes on from there."""
        self.manager.close(0)
        shutil.rmtree(self.home)
        self.mount.remount()
        other = Training(self.mount, self.home)
        found = other.manager.load_latest_checkpoint(PHASE)
        other.step = check_state(found["state"]) if found else 0
        return other


@pytest.fixture
def training(mount, tmp_path, caplog):
    """training(**settings of the drive) -> Training; all are closed, after their mounts are dead."""
    caplog.set_level(logging.CRITICAL, "ml_factory")
    made = []

    def make(deadline: float = 20, **settings) -> Training:
        made.append(Training(mount(**settings), tmp_path / f"home-{len(made)}", deadline))
        return made[-1]

    yield make
    for one in made:
        one.mount.unmount()
        one.manager.close(0)


@pytest.mark.parametrize("error", ERRORS)
def test_manager_on_mount_error_continues_and_copies_after_recovery(training, error):
    work = training()
    work.save()
    assert work.uploaded()
    work.mount.fault(error, path="/checkpoints*")
    for _ in range(3):
        work.save()
        assert not work.uploaded()
    assert check_state(work.manager.load_latest_checkpoint(PHASE)["state"]) == work.step
    work.mount.heal()
    work.save()
    assert work.uploaded()
    work.mount.upload()
    assert work.another_machine().step == 5


@pytest.mark.parametrize("fault", ["drop", "torn"])
def test_manager_on_dropped_or_torn_mount_write_does_not_report_upload(training, fault):
    work = training()
    work.save()
    assert work.uploaded()
    work.mount.fault(fault, "write", path="*.ckpt")
    work.save()
    assert not work.uploaded()
    work.mount.heal()
    assert work.uploaded()
    work.mount.upload()
    assert work.another_machine().step == 2


@pytest.mark.parametrize("seed", range(3))
def test_manager_after_death_with_mixed_cloud_versions_resumes_on_other_machine(training, seed):
    work = training(seed=seed, uploads=0.08)
    for _ in range(KEEP + 3):
        work.save()
        assert work.uploaded()
    work.mount.kill()
    alive = work.alive()
    other = work.another_machine()
    assert other.step >= max(alive, default=0)
    other.save()
    assert other.uploaded()


def test_manager_with_lost_torn_or_duplicate_uploads_loses_at_most_one_save(training):
    work = training()
    for fault in ("drop", "torn", "duplicate"):
        for _ in range(2):
            work.save()
            assert work.uploaded()
        work.mount.upload()
        work.mount.fault(fault, "upload", path="*.ckpt", times=2)
        work.mount.fault("scramble", "stat")
        work.save()
        assert work.uploaded()
        work.mount.upload()
        alive = max(work.alive())
        other = work.another_machine()
        assert other.step >= alive >= work.step - 1
        other.saved_files, work = work.saved_files, other
        work.saved_files = {step: data for step, data in work.saved_files.items() if step <= work.step}


def test_manager_after_remount_with_lost_files_copies_newest_checkpoint(training):
    work = training()
    work.save()
    assert work.uploaded()
    work.mount.upload()
    work.save()
    assert work.uploaded()
    work.mount.kill()
    work.save()
    assert not work.uploaded()
    work.mount.remount()  # the second save never reached the cloud
    work.save()
    assert work.uploaded()
    work.mount.upload()
    assert work.another_machine().step == 4


def test_manager_on_slow_mount_saves_locally_without_waiting(training):
    work = training()
    work.mount.fault("slow", "read", "write", rate=50_000)
    ballast = np.zeros(500_000)  # 4 MB: 80 seconds on its way, and more until it is read back
    work.manager.save_checkpoint(PHASE, {**state_at(1), "ballast": ballast}, force=True)
    work.mount.wait_struck("slow")
    for step in range(2, 12):  # ten steps with a save each, while the first is still on its way
        assert work.manager.save_checkpoint(PHASE, {**state_at(step), "ballast": ballast}, force=True) is not None
        assert work.manager.store.wait_home()
        assert work.manager.store.uploader.pending
        assert check_state(work.manager.store.home.load_latest_valid(work.unit, deserialize_state)[1]) == step
    assert not work.alive(), "it had arrived: nothing was shown"
    work.mount.heal()
    work.step = 11
    assert work.uploaded()
    work.mount.upload()
    assert work.another_machine().step == 11


def test_manager_on_hanging_mount_saves_locally_without_waiting(training):
    work = training(deadline=2)
    work.save()
    assert work.uploaded()
    work.mount.fault("hang", path="/checkpoints*")
    work.save()
    work.mount.wait_struck("hang")
    for _ in range(5):
        assert work.save() is not None
        assert work.manager.store.wait_home()
    assert not work.manager.wait()
    stopped = work.manager.safe_stop(1)
    assert not stopped.safe and "Not confirmed" in stopped.text
    assert check_state(work.manager.load_latest_checkpoint(PHASE)["state"]) == 7
    work.mount.heal()  # what hung is carried out now, late
    work.save()
    assert work.caught_up()
    work.mount.upload()
    assert work.another_machine().step == 8


def test_manager_rotation_on_quota_mount_fills_no_trash(training):
    work = training(quota=150_000)
    size = 0
    for _ in range(12):
        work.save()
        assert work.uploaded()
        size = max(size, len(work.saved_files[work.step]))
    facts = work.mount.facts()
    assert facts["trash"] == 0
    assert facts["peak"] < (KEEP + 3) * (size + 2000)


SCRIPT = """
import sys
import time
from pathlib import Path
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
from tests.faults.world import state_at

tiers = StorageTiers(sys.argv[2], deadline_seconds=2)
manager = CheckpointManager(Path(sys.argv[1]) / "checkpoints", run="run", tiers=tiers)
for step in range(1, 4):
    manager.save_checkpoint("toy", state_at(step), force=True)
if sys.argv[3] == "close":
    manager.close()
print("trained", flush=True)
"""


@pytest.mark.parametrize("ending", ["close", "just end"])
def test_manager_process_ends_while_mount_hangs(mount, tmp_path, ending):
    drive = mount()
    (drive.path / "checkpoints").mkdir()
    drive.fault("hang", path="/checkpoints*")
    words = [sys.executable, "-c", SCRIPT, drive.path, tmp_path / "home", ending]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "trained"), done.stderr
    manager = CheckpointManager(tmp_path / "nowhere", run="run", tiers=StorageTiers(tmp_path / "home"))
    assert check_state(manager.load_latest_checkpoint(PHASE)["state"]) == 3
    manager.close()
