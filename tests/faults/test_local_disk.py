"""The real CheckpointManager with a local disk that really refuses, and another disk as its mount."""

import logging

import numpy as np
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.checkpoints.uploader import COPIED


@pytest.mark.parametrize(("fault", "size"), [("EIO", 10), ("EIO", 1_000_000), ("ENOSPC", 10), ("ENOSPC", 1_000_000)])
def test_manager_saves_on_mount_while_local_disk_fails_and_locally_after_recovery(mount, tmp_path, caplog, fault, size):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    disk, there, a = mount(), tmp_path / "there", np.arange(size)
    with CheckpointManager(there, run="r", tiers=StorageTiers(disk.path / "here")) as manager:
        manager.save_checkpoint("p", {"value": 0, "a": a}, force=True)
        assert manager.wait(60)
        disk.fault(fault, *(["write"] if fault == "ENOSPC" else []))
        for value in (1, 2):
            saved = manager.save_checkpoint("p", {"value": value, "a": a}, force=True)
            assert manager.store.wait_home(60) and saved["status"] == COPIED
            assert saved["path"].startswith(str(there))
        disk.heal()
        value = 3
        saved = manager.save_checkpoint("p", {"value": value, "a": a}, force=True)
        assert manager.wait(60) and saved["path"].startswith(str(disk.path))
        found = manager.load_latest_checkpoint("p")
        assert found["state"]["value"] == value and (found["state"]["a"] == a).all()
    with CheckpointManager(there, run="r", tiers=StorageTiers(tmp_path / "other machine")) as manager:
        assert manager.load_latest_checkpoint("p")["state"]["value"] == value
