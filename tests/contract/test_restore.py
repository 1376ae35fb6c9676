"""Runs, folds and stacks that W&B gives back to an empty workspace."""

import shutil

import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import ArtifactRegistry, files, folds, train_module
from tests.contract.test_runs import SMALL
from tests.contract.test_wandb import account  # noqa: F401 - a fixture of every test here
from tests.tracking.wandb_stand_in import KEY, install, settle, versions


@pytest.fixture
def places(prepared_template, tmp_path, monkeypatch):
    """A workspace that dies, an empty one, and one that is mirrored nowhere: as they were prepared."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    made = []
    for name in ("dies", "empty", "straight"):
        shutil.copytree(prepared_template, tmp_path / name)
        made.append(Workspace(tmp_path / name))
    return made


def dying(monkeypatch, owner, name: str, after: int):
    """The function of that name dies after so many calls."""
    whole, calls = getattr(owner, name), []

    def killed(*given, **named):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, killed)


def train_xgboost(place, **named):
    def callback(step, metrics):
        if named.get("dies") and step == 3:
            raise KeyboardInterrupt

    return pipeline.train(place, "DEMO", 5, "xgboost", model_settings=SMALL, callbacks=[callback])


def cross_validate(place, **_):
    return pipeline.cross_validate(place, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL)


def stack(place, **_):
    return pipeline.stack(place, "DEMO", 5, ("linear", "lightgbm"), folds=2, quick=True)


def left_by(result) -> list:
    """What a result is, to the bit."""
    if hasattr(result, "predictions_hash"):
        return [result.predictions_hash, files.sha256(result.artifact / "state.safetensors")]
    return [pd.util.hash_pandas_object(table).tolist() for table in (result.folds, result.fold_table.astype(str))]


@pytest.mark.soak_except("train")
@pytest.mark.parametrize(
    ("verb", "death", "reached"),
    [
        (train_xgboost, None, "unfinished at round 15"),
        (cross_validate, (folds, "fit_on_rows", 2), "unfinished at fold 2 of 3"),
        (stack, (folds, "fit_on_rows", 3), "unfinished at linear: all folds; lightgbm: fold 1 of 2"),
    ],
)
def test_run_restored_from_wandb_into_empty_workspace_resumes_bit_exact(
    verb, death, reached, places, tmp_path, monkeypatch
):
    dies, empty, straight = places
    wanted = left_by(verb(straight))  # mirrored nowhere
    store, done = install(tmp_path, monkeypatch), settle(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if death:
            dying(patch, *death)
        verb(dies, dies=True)
    assert all(done())
    (name,) = (path.name for path in store.iterdir() if path.name.startswith("checkpoints-"))
    assert len(versions(store, name)) == 1
    result = verb(empty)
    assert left_by(result) == wanted
    assert reached in (result.found or str(result.resumed_from))
    assert result.exact
    assert all(done())
    # What left an artifact at W&B needs no checkpoints there; of the rest the last word stays.
    assert len(versions(store, name)) == (0 if verb in (train_xgboost, stack) else 2)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


def test_finished_run_restored_from_wandb_is_not_fitted_again(places, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    done = settle(monkeypatch)
    first = cross_validate(places[0])
    assert all(done())
    with monkeypatch.context() as patch:
        patch.setattr(folds, "fit_on_rows", None)  # nothing is fitted
        again = cross_validate(places[1])
    assert left_by(again) == left_by(first)
    assert all(done())


@pytest.mark.soak
def test_stack_with_models_in_wandb_is_restored_into_empty_workspace(
    prepared, prepared_template, tmp_path, monkeypatch
):
    store, done = install(tmp_path, monkeypatch), settle(monkeypatch)
    bases = ("linear", "lightgbm")
    first = pipeline.stack(prepared, "DEMO", 5, bases, folds=2, quick=True)
    assert done() == [True] * 3 and len(list(store.iterdir())) == 3  # no checkpoints: all of it is finished
    shutil.copytree(prepared_template, tmp_path / "empty")
    monkeypatch.setattr(train_module, "build_model", None)  # nothing is trained
    again = pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True)
    assert again.artifact.name == first.artifact.name and again.predictions_hash == first.predictions_hash
    assert first.lineage.drop(columns="available").equals(again.lineage.drop(columns="available"))
    assert again.lineage["kind"].tolist() == ["stack", "run", "data"] + ["model", "run", "data"] * 2
    # Requested by name, W&B gives the bases although the registry has them.
    sequence = max(one.sequence for one in ArtifactRegistry(tmp_path / "empty/models").list("DEMO"))
    pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True, source="wandb")
    assert max(one.sequence for one in ArtifactRegistry(tmp_path / "empty/models").list("DEMO")) == sequence + 2
    assert all(done())


def test_train_with_source_wandb_uses_artifact_of_wandb_and_raises_without_one(
    prepared, prepared_template, tmp_path, monkeypatch
):
    store, done = install(tmp_path, monkeypatch), settle(monkeypatch)
    first = pipeline.train(prepared, "DEMO", 5, "linear", quick=True)
    assert all(done())
    shutil.copytree(prepared_template, tmp_path / "empty")
    monkeypatch.setattr(train_module, "build_model", None)  # nothing is trained
    restored = pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")
    assert restored.reused and restored.artifact_hash == first.artifact_hash
    assert restored.predictions_hash == first.predictions_hash and all(done())
    with pytest.raises(TypeError, match="NoneType"):  # a fresh run restores nothing
        pipeline.train(
            shutil.copytree(prepared_template, tmp_path / "new"), "DEMO", 5, "linear", quick=True, fresh=True
        )
    shutil.rmtree(store)
    with pytest.raises(NotPreparedError, match="W&B has no such model"):
        pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")
