"""A workspace in a bucket, behind a real server of the GCS protocol: one machine works and is gone, another goes on."""

import time
from pathlib import Path

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.checkpoints import leases
from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_pool import SlotWriterId
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import CheckpointError
from ml_factory.storage import workspace as workspaces
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from tests.small_data import SMALL_DATA
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
    pipeline.prepare(place, "MES", horizons=(5,), data=bars, settings=SMALL_DATA)
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
    board = pipeline.leaderboard(place)  # nothing of this symbol was used on this machine
    assert board.frame["run_id"].tolist() == [went_on.run_id] and board.frame["net"].notna().all()
    found = train(place)
    assert found.reused and found.artifact_hash == went_on.artifact_hash
    assert Path(found.artifact).is_relative_to(tmp_path / "three")
    whole = pipeline.load_predictions(place, "MES", 5, "xgboost")

    straight = tmp_path / "folder"
    pipeline.prepare(straight, "MES", horizons=(5,), data=bars, settings=SMALL_DATA)
    assert train(straight).artifact_hash == went_on.artifact_hash
    assert np.array_equal(pipeline.load_predictions(straight, "MES", 5, "xgboost")["p_long"], whole["p_long"])


def test_bucket_workspace_prepared_files_are_downloaded_once(machine, tmp_path):
    place = machine("one")
    pipeline.prepare(place, "DEMO", horizons=(5,), settings=SMALL_DATA)
    machine("two")
    workspace = Workspace(place)
    folder = workspace.processed("DEMO")
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert stamps
    again = Workspace(place)
    assert again.processed("DEMO") == folder and again == workspace
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == stamps
    assert pipeline.prepare(place, "DEMO", horizons=(5,), settings=SMALL_DATA).reused


@pytest.fixture
def session(machine, monkeypatch):
    """Open the checkpoints of a session on a machine; a lease is renewed each 0.2 s and stale after 2."""
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 2.0)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.1)
    opened = []

    def start(name: str) -> CheckpointManager:
        place = Workspace(machine(name))
        manager = CheckpointManager(
            place.checkpoints, run="r", tiers=StorageTiers(lease=SlotWriterId(name)),
            on_saved=lambda: workspaces.push_workspace_checkpoints(place.root),
        )  # fmt: skip
        manager.store.heartbeat._seconds = 0.2
        opened.append((manager, place))
        return manager

    yield start
    for manager, place in opened:
        manager.close()
        workspaces._buckets[place.root]._background.close()


def save(manager: CheckpointManager, value: int) -> None:
    assert manager.save_checkpoint("p", {"value": value}, force=True)
    manager.wait()
    workspaces._buckets[manager.store.folder.parent]._background.wait(60)


def lease_in_bucket(manager: CheckpointManager) -> dict:
    phase = manager.phase("p")
    return phase.lease_holder._local.read_lease(phase.unit)


def test_second_session_in_bucket_is_refused_while_first_renews_its_lease(session):
    first = session("one")
    first.phase("p").load()
    save(first, 1)
    second = session("two")
    with pytest.raises(CheckpointError, match="Another session is working"):
        second.phase("p").load()
    save(first, 2)
    assert lease_in_bucket(second)["session"] == "one"
    first.store.heartbeat.stop()  # it is gone
    found = second.phase("p").load()
    assert found["state"] == {"value": 2}  # also what it saved after this machine first looked
    save(second, 3)
    with pytest.raises(LeaseTakenOverError):  # it was only away
        lease_in_bucket(first)
        first.save_checkpoint("p", {"value": 4}, force=True)
        first.wait()
        first.save_checkpoint("p", {"value": 5}, force=True)
    assert lease_in_bucket(second)["fence"] == 2


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
    mirror = workspaces._buckets[Workspace(place).root]
    assert {name.split("/")[2] for name in mirror._list_remote(("models/",))} == {models[2].path.name}
    left = ArtifactRegistry(Workspace(machine("two")).models).list("MES")
    assert [one.hash for one in left] == [models[2].hash] and left[0].is_intact()


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
