"""Bars, prepared data and what is made of them on a real mount: no process of ours asks it itself, and none waits."""

import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import notebook, pipeline
from ml_factory.checkpoints.safe_stop import safe_stop
from ml_factory.checkpoints.slot_pool import SlotPool
from ml_factory.errors import UnresponsiveMountError
from ml_factory.storage import artifact_registry, mounts
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from utils import colab_setup

SYMBOL, HORIZON = "DEMO", 5
TREES = {"rounds": 20, "block": 5, "depth": 3, "threads": 1, "patience": 0}
_RELEASE = 300.0  # seconds after which what hangs goes on: who waited for it then fails, and hangs no longer


@pytest.fixture
def drive(mount, tmp_path, monkeypatch):
    """A drive with a deadline of a few seconds; the cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mounts, "DEADLINE", 4.0)
    monkeypatch.setattr(mounts, "RETRY_DEADLINE", 0.5)
    monkeypatch.setattr(artifact_registry, "RETRY_SECONDS", 0.0)  # a drive that is healed is asked at once
    made = mount()
    late = threading.Timer(_RELEASE, made.heal)
    late.daemon = True
    late.start()
    yield made
    late.cancel()
    made.heal()


@pytest.fixture
def workspace(drive, prepared_template) -> Workspace:
    """Prepared data of the made-up market on the drive."""
    subprocess.run(["cp", "-r", prepared_template, drive.path / "ml_factory"], check=True)  # a drive keeps no modes
    return Workspace(drive.path / "ml_factory")


@pytest.mark.soak
def test_pipeline_on_mount_makes_no_file_call_in_main_process(drive, monkeypatch):
    monkeypatch.setattr(mounts, "DEADLINE", 60.0)  # nothing hangs here, however busy the machine
    root, own = drive.path / "ml_factory", os.getpid()
    pipeline.prepare(root, SYMBOL, (HORIZON,))
    assert not drive.requested_by(own)
    for _ in range(2):  # made, and found
        result = pipeline.train(root, SYMBOL, HORIZON, "xgboost", quick=True, model_settings=TREES)
    pipeline.cross_validate(root, SYMBOL, HORIZON, "xgboost", folds=2, quick=True, model_settings=TREES)
    pipeline.evaluate(root, SYMBOL, HORIZON)
    pipeline.predict(root, SYMBOL, HORIZON, "xgboost")
    notebook.finish([Workspace(root).processed(SYMBOL), result.report_path])
    assert not notebook.progress(Workspace(root), SYMBOL)["05_train_ensemble"]
    assert colab_setup._mount_state(drive.path) == "alive"
    assert not drive.requested_by(own)
    (drive.path / "seen").touch()
    assert drive.requested_by(own), "nobody is recorded: nothing was shown"


@pytest.mark.soak_except("current.json")
@pytest.mark.parametrize(
    "path", ["*current.json", "*-features.npy", "*labels_h5.parquet", "*certificates*", "*_1m.parquet"]
)
def test_train_and_prepare_with_hanging_file_raise_and_change_no_file(workspace, drive, path):
    there = {file: file.read_bytes() for file in _files(workspace)}
    drive.fault("hang", "read", path=path)
    with pytest.raises(UnresponsiveMountError, match=r"does not answer.*mount it again"):
        pipeline.train(workspace, SYMBOL, HORIZON, "xgboost", quick=True, model_settings=TREES)
    with pytest.raises(UnresponsiveMountError):
        pipeline.prepare(workspace, SYMBOL, (HORIZON,))
    drive.wait_struck("hang")
    drive.heal()
    assert {file: file.read_bytes() for file in _files(workspace)} == there


def test_prepare_with_hanging_data_file_raises_with_file_name(prepared_template, prepared, drive):
    theirs = drive.path / "bars.parquet"
    theirs.write_bytes(Workspace(prepared_template).raw_bars(SYMBOL).read_bytes())
    drive.fault("hang", "read")
    with pytest.raises(UnresponsiveMountError, match=r"does not answer.*bars\.parquet.*mount it again"):
        pipeline.prepare(prepared, "MES", (HORIZON,), data=theirs)
    drive.wait_struck("hang")
    assert not prepared.raw_bars("MES").exists()


def test_mount_state_of_hanging_drive_is_dead(drive):
    (drive.path / "MyDrive").mkdir()
    assert colab_setup._mount_state(drive.path) == "alive"
    drive.fault("hang")
    assert colab_setup._mount_state(drive.path) == "dead"


@pytest.mark.soak
def test_train_on_mount_that_hangs_stores_model_locally_and_copies_later(workspace, drive, caplog):
    def train(**more):
        return pipeline.train(
            workspace, SYMBOL, HORIZON, "xgboost", seed=3, quick=True, model_settings=TREES, mirror="off", **more
        )

    observed = []

    def hang(block: int, _) -> None:
        observed.append(block)
        if len(observed) == 2:
            end = time.monotonic() + 60
            while not SlotPool(workspace.checkpoints).scan() and time.monotonic() < end:
                time.sleep(0.05)  # the first checkpoint is on its way there, by another thread
            drive.fault("hang")

    with pytest.raises(UnresponsiveMountError, match=r"does not answer.*mount it again"):
        train(callbacks=[hang])
    assert len(observed) == TREES["rounds"] // TREES["block"]
    assert "xgboost of DEMO is stored on this machine's disk" in caplog.text
    temporary = ArtifactRegistry(workspace.models).local_fallback
    [kept] = temporary.list(SYMBOL)
    stopped = safe_stop(5, flush=lambda: None, on_status=observed.append)
    assert not stopped.safe and "xgboost of DEMO" in stopped.text and "checkpoint of train_xgboost" in stopped.text
    drive.heal()
    found = train(on_status=observed.append)
    assert found.reused and found.artifact_hash == kept.hash and "finished before" in observed[-1]
    assert found.artifact.is_relative_to(drive.path) and not temporary.list(SYMBOL)
    assert [one.hash for one in ArtifactRegistry(workspace.models).list(SYMBOL)] == [kept.hash]
    assert safe_stop(5, flush=lambda: None, on_status=observed.append).safe
    pool = SlotPool(workspace.checkpoints).scan()
    assert pool and all(slot.is_returned for slot in pool)
    again = train(fresh=True)  # as one that nothing disturbed; its file names another run
    same = [pd.read_parquet(one.predictions_path).drop(columns="run_id") for one in (found, again)]
    pd.testing.assert_frame_equal(*same, check_exact=True)


def test_registry_on_full_mount_stores_artifact_locally_and_copies_later(workspace, drive, caplog):
    artifact_registry = ArtifactRegistry(workspace.models)
    artifact_registry.register(SYMBOL, "model", "toy", {"a": np.ones(3)}, {"which": "before"})
    drive.fault("EDQUOT", "write", path="*state.safetensors*")
    kept = artifact_registry.register(SYMBOL, "model", "toy", {"a": np.zeros(3)}, {"which": "new"})
    assert not artifact_registry.is_persisted(kept) and "No space left" in caplog.text
    found = artifact_registry.find(SYMBOL, model="toy")
    assert (found.facts["which"], found.sequence, found.load_state()["a"].tolist()) == ("new", 2, [0, 0, 0])
    drive.heal()
    found = artifact_registry.find(SYMBOL, model="toy")
    assert (
        artifact_registry.is_persisted(found) and (found.hash, found.sequence) == (kept.hash, 2) and found.is_intact()
    )
    assert not artifact_registry.local_fallback.list(SYMBOL)


def _files(workspace: Workspace) -> list[Path]:
    return sorted(file for file in (workspace.root / "data").rglob("*") if file.is_file())
