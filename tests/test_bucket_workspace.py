"""A workspace in a bucket, behind a real server of the GCS protocol: one machine works and is gone, another goes on."""

import time
from pathlib import Path

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.storage import workspace as workspaces
from ml_factory.storage.workspace import Workspace
from tests.storage.gcs import gcs_bucket  # noqa: F401 - a fixture

BOOSTER = {"rounds": 30, "depth": 3, "min_leaf": 5.0}


@pytest.fixture
def machine(gcs_bucket, monkeypatch, tmp_path):  # noqa: F811
    """Call it with a name to sit at that machine: its local disk is its own, the bucket is the same."""

    def sit_at(name: str) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return gcs_bucket

    return sit_at


class Gone(BaseException):
    """The machine vanishes."""


def train(place: str, **options):
    return pipeline.train(place, "MES", 5, "xgboost", model_settings=BOOSTER, mirror="off", **options)


def test_bucket_workspace_on_empty_machine_resumes_killed_training_bit_exact(machine, monkeypatch, tmp_path):
    place = machine("one")
    bars = tmp_path / "bars.parquet"
    synthetic_bars(days=8, seed=1).reset_index().to_parquet(bars)
    pipeline.prepare(place, "MES", horizons=(5,), data=bars)
    features = pipeline.load_features(place, "MES")

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")

    def dies(epoch, metrics):
        if epoch == 2:
            mirror = workspaces._buckets[Workspace(place).root]
            while not list(mirror.folder.glob("checkpoints/slot-*.ckpt")) or not mirror._background.wait(0):
                time.sleep(0.01)  # the save may still be on its way
            raise Gone

    with monkeypatch.context() as dead:
        dead.setattr(Workspace, "push", lambda self: None)  # a machine that is gone brings nothing up any more
        with pytest.raises(Gone):
            train(place, callbacks=[dies])

    place = machine("two")
    assert not (tmp_path / "two").exists()
    assert pipeline.load_features(place, "MES").equals(features)
    went_on = train(place)
    assert went_on.resumed_from in (1, 2)  # the last save, or the one before it, was up in time

    place = machine("three")
    found = train(place)
    assert found.reused and found.artifact_hash == went_on.artifact_hash
    assert Path(found.artifact).is_relative_to(tmp_path / "three")
    whole = pipeline.load_predictions(place, "MES", 5, "xgboost")

    straight = tmp_path / "folder"
    pipeline.prepare(straight, "MES", horizons=(5,), data=bars)
    assert train(straight).artifact_hash == went_on.artifact_hash
    assert np.array_equal(pipeline.load_predictions(straight, "MES", 5, "xgboost")["p_long"], whole["p_long"])


def test_bucket_workspace_prepared_files_are_downloaded_once(machine, tmp_path):
    place = machine("one")
    pipeline.prepare(place, "DEMO", horizons=(5,))
    machine("two")
    workspace = Workspace(place)
    folder = workspace.processed("DEMO")
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert stamps
    again = Workspace(place)
    assert again.processed("DEMO") == folder and again == workspace
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == stamps
    assert pipeline.prepare(place, "DEMO", horizons=(5,)).reused
