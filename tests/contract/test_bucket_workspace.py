"""A workspace in a bucket, behind a real server of the GCS protocol, or on a drive: one machine works and is gone,
another goes on.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from google.auth.exceptions import RefreshError

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import UnresponsiveMountError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import ArtifactRegistry, Bucket, mirror
from tests.small_data import SMALL_DATA

BOOSTER = {"rounds": 30, "depth": 3, "min_leaf": 5.0}


@pytest.fixture(params=["bucket", "drive"])
def machine(request, monkeypatch, tmp_path):
    """Call it with a name to sit at that machine: its local disk is its own, the bucket or the drive is the same."""
    address = str(tmp_path / "drive/ws")
    if request.param == "bucket":
        address = request.getfixturevalue("gcs_bucket")
    else:
        monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))

    def sit_at(name: str) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return address

    return sit_at


class Gone(BaseException):
    """The machine vanishes."""


def train(place: str, **options):
    return pipeline.train(place, "MES", 5, "xgboost", model_settings=BOOSTER, mirror="off", **options)


def test_workspace_on_empty_machine_resumes_killed_training_bit_exact(machine, monkeypatch, tmp_path):
    place = machine("one")
    bars = tmp_path / "bars.parquet"
    synthetic_bars(days=8, seed=1).reset_index().to_parquet(bars)
    pipeline.prepare(place, "MES", horizons=(5,), data=bars, settings=SMALL_DATA)
    features = pipeline.load_features(place, "MES")

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")

    def dies(epoch, metrics):
        if epoch == 2:
            workspace = Workspace(place)
            while not list(workspace.checkpoints.glob("*/*.ckpt")) or not workspace.wait(0):
                time.sleep(0.01)  # the save may still be on its way
            raise Gone

    with monkeypatch.context() as dead:
        dead.setattr(Workspace, "push", lambda self: None)  # a machine that is gone brings nothing up any more
        with pytest.raises(Gone):
            train(place, callbacks=[dies])

    place = machine("two")
    assert not (tmp_path / "two").exists()
    assert pipeline.load_features(place, "MES").equals(features)
    stamps = {path: path.stat().st_mtime_ns for path in Workspace(place).processed("MES").rglob("*.npy")}
    went_on = train(place)
    assert went_on.found.endswith("Resumes from there.")  # on an equal machine, by its record
    assert went_on.resumed_from in (1, 2)  # the last save, or the one before it, was up in time
    assert stamps and {path: path.stat().st_mtime_ns for path in stamps} == stamps  # downloaded once

    place = machine("three")
    pushed = []
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "push", lambda self: pushed.append(self))
        board = pipeline.leaderboard(place)  # nothing of this symbol was used on this machine
    assert len(pushed) == 1  # for the backtests inside it too
    assert board.frame["run_id"].tolist() == [went_on.run_id] and board.frame["net"].notna().all()
    found = train(place)
    assert found.reused and found.artifact_hash == went_on.artifact_hash
    assert Path(found.artifact).is_relative_to(tmp_path / "three")
    whole = pipeline.load_predictions(place, "MES", 5, "xgboost")

    straight = tmp_path / "folder"
    pipeline.prepare(straight, "MES", horizons=(5,), data=bars, settings=SMALL_DATA)
    assert train(straight).artifact_hash == went_on.artifact_hash
    assert np.array_equal(pipeline.load_predictions(straight, "MES", 5, "xgboost")["p_long"], whole["p_long"])


@pytest.mark.parametrize("machine", ["bucket"], indirect=True)
def test_clean_of_bucket_workspace_deletes_objects_and_copies_of_other_machine(machine, monkeypatch, tmp_path):
    place = machine("one")
    registry = ArtifactRegistry(Workspace(place).models)
    models = [
        registry.register("MES", "model", "xgboost", {"number": n}, {"run_id": f"r{n}", "horizon": 5}) for n in range(3)
    ]
    names = {str(model.path.relative_to(registry.folder)) for model in models}
    Workspace(place).push()
    other = Workspace(machine("two"))
    assert {one.path.parent.name + "/" + one.path.name for one in ArtifactRegistry(other.models).list("MES")} == names
    machine("one")
    result = pipeline.clean(place, "MES", 1)
    assert {item.path for item in result.items} == {model.path for model in models[:2]}
    left = ArtifactRegistry(Workspace(machine("two")).models).list("MES")
    assert [one.hash for one in left] == [models[2].hash] and left[0].is_intact()


@pytest.mark.parametrize("machine", ["bucket"], indirect=True)
def test_bucket_out_of_reach_leaves_the_local_copy_and_an_empty_machine_refuses(machine, monkeypatch, caplog):
    Workspace(place := machine("one")).results.joinpath("note.json").write_text("{}")
    Workspace(place).push()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.0, raising=False)  # seconds until it asks again
    away = Bucket(place)  # read by this process: a child would ask again after seconds
    mirror.open_mirror(place).remote = away
    assert (Workspace(place).results / "note.json").is_file() and "Only the local copy" in caplog.text
    mirror.open_mirror(machine("two")).remote = away
    with pytest.raises(WorkspaceError, match="did not answer"):
        Workspace(place)
    away._files = SimpleNamespace(exists=Mock(side_effect=RefreshError("invalid_grant")))
    with pytest.raises(WorkspaceError, match="sign-in") as refused:  # a sign-in that ended is an answer
        away.remove("note.json")
    assert not isinstance(refused.value, UnresponsiveMountError)


@pytest.mark.parametrize("machine", ["bucket"], indirect=True)
def test_workspace_of_environment_in_a_bucket_is_mirrored_there(machine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ML_FACTORY_ROOT", f"{machine('one')}/slice")
    place = Workspace()
    (place.results / "note.json").write_text("{}")
    place.push()
    monkeypatch.setenv("ML_FACTORY_ROOT", f"{machine('two')}/slice")
    again = Workspace("")
    assert (again.results / "note.json").is_file() and again.address.endswith("/mine/slice")
    assert not (tmp_path / "gs:").exists()
