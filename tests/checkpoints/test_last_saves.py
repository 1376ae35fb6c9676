"""The last save of a session: its time limit, and the message about it."""

import errno
import threading
import time

import pytest

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import SaveSchedule
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.checkpoints.uploader import COPIED
from ml_factory.errors import SessionOverError


def save(manager, value):
    return manager.save_checkpoint("p", {"value": value}, force=True)


class SlowDisk(Disk):
    """A mount: each write takes its time, and fails while `away`."""

    seconds, away = 0.0, False

    def write(self, descriptor, data, offset):
        time.sleep(self.seconds)
        if self.away:
            raise OSError(errno.EIO, "away")
        return super().write(descriptor, data, offset)


def test_manager_reserves_measured_copy_duration_for_last_save(tmp_path):
    calls, disk = [], SlowDisk()
    ending = SaveSchedule(ending=lambda seconds: calls.append(seconds) or False)
    settings = {"tiers": StorageTiers(tmp_path / "here", disk=disk), "schedule": ending}
    disk.seconds = 0.4
    with CheckpointManager(tmp_path / "there", run="r", **settings) as manager:
        save(manager, 1)
        assert manager.wait(60) and 0 < manager.store.durations.written < manager.store.durations.copied
        manager.phase("p").due()
        assert calls[-1] == manager.store.durations.copied > 0.4
    with CheckpointManager(tmp_path / "there", run="another", **settings) as manager:
        manager.phase("p").due()
        assert calls[-1] > 0.4


def test_manager_copy_delayed_by_absent_mount_is_not_measured(tmp_path, monkeypatch):
    disk = SlowDisk()
    with CheckpointManager(tmp_path / "there", run="r", tiers=StorageTiers(tmp_path / "here", disk=disk)) as manager:
        disk.away = True
        save(manager, 1)
        assert not manager.wait(60)
        disk.away = False
        assert manager.wait(60) and manager.phase("p").last_save.where == COPIED
        assert manager.store.durations.copied == 0 < manager.store.durations.written


@pytest.mark.parametrize(
    ("fault", "output"),
    [(None, "saved and stopped here"), ("mount", "this machine's disk alone"), ("disk", "the last save was refused")],
)
def test_session_over_states_location_of_last_save(tmp_path, fault, output):
    disk, over = SlowDisk(), []
    local = tmp_path / "here" if fault == "mount" else None
    tiers = StorageTiers(local, disk=disk, deadline_seconds=2)
    settings = {"tiers": tiers, "schedule": SaveSchedule(ending=lambda seconds: bool(over))}
    with CheckpointManager(tmp_path / "there", run="r", **settings) as manager:
        save(manager, 1)
        assert manager.wait(60)
        disk.away = fault is not None
        over.append(True)
        with pytest.raises(SessionOverError, match=output):
            save(manager, 2)
        disk.away, over[:] = False, []
    with CheckpointManager(tmp_path / "there", run="r", tiers=StorageTiers(local)) as manager:
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 1 if fault == "disk" else 2}


@pytest.mark.parametrize("away", [True, False], ids=["on a mount", "on this disk"])
def test_manager_close_on_ctrl_c_completes_local_write_and_limits_mount_wait(tmp_path, monkeypatch, away):
    """The writer reads the copy in memory: were that given up, the save would be torn."""
    places = {"tiers": StorageTiers(tmp_path / "here")} if away else {}
    manager = CheckpointManager(tmp_path / "there", run="r", **places)
    calls, kept, writing, write = [], [], threading.Event(), manager.store.home.write

    def slowly(*given):
        writing.set()
        time.sleep(1.5)
        kept.append(manager.store.staging.file >= 0)
        return write(*given)

    monkeypatch.setattr(manager.store.home, "write", slowly)
    if away:
        monkeypatch.setattr(manager.store.uploader, "wait", calls.append)
    with pytest.raises(KeyboardInterrupt), manager:
        save(manager, 1)
        assert writing.wait(60)
        raise KeyboardInterrupt
    assert kept == [True] and calls == ([1.0] if away else [])
    with CheckpointManager(tmp_path / "there", run="r", **places) as manager:
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 1}
