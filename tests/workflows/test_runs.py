"""A run as its folder records it: the one line that is said of it, its attempts, and what a kill left undone."""

import json
from dataclasses import replace

import pytest

from ml_factory import CheckpointManager, pipeline, runs
from ml_factory.errors import SettingsError
from ml_factory.runs import Run, RunOptions, open_run
from ml_factory.settings import RunSettings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import evaluation, folds

FOLDS = RunSettings("MES", 10, "lightgbm", "folds", 0, False, "0" * 64, (("folds", 3), ("rounds", 20)))
TRAIN = replace(FOLDS, task="train", settings=(("rounds", 20),))
BASES = (("base_models", ["xgboost", "lightgbm"]), ("bases", ["a", "b"]), ("folds", 2))
STACK = RunSettings("MES", 10, "stack", "stack", 0, False, "0" * 64, BASES)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path)


def save(workspace: Workspace, run: Run, phase: str, **metrics) -> None:
    with CheckpointManager(workspace.checkpoints, run=run.run_id) as manager:
        assert manager.save_checkpoint(phase, {"a": 1}, force=True, metrics=metrics)


def begun(workspace: Workspace, spec: RunSettings) -> Run:
    with open_run(workspace, spec) as run:
        run.begin()
    return run


def line(workspace: Workspace, spec: RunSettings) -> str:
    with open_run(workspace, spec) as run:
        return run.status(finished=False)


def test_status_of_folds_counts_their_files_and_the_fit_in_the_next(workspace):
    assert "Starts from the beginning" in line(workspace, FOLDS)
    run = begun(workspace, FOLDS)
    assert "no checkpoint of it is there" in line(workspace, FOLDS)
    save(workspace, run, "folds_lightgbm_1", rounds=10)
    assert "unfinished at round 10 in the first fold (" in line(workspace, FOLDS)
    run.fold_path("lightgbm", 1, 3).touch()
    assert "unfinished at fold 1 of 3 (" in line(workspace, FOLDS)  # what fold 1 had come to counts no more
    save(workspace, run, "folds_lightgbm_2", epochs=1, step=5)
    assert "unfinished at fold 1 of 3, epoch 1, step 5 in the next (" in line(workspace, FOLDS)
    for number in (2, 3):
        run.fold_path("lightgbm", number, 3).touch()
    assert "unfinished at all folds (" in line(workspace, FOLDS)


@pytest.mark.parametrize("spec", [TRAIN, FOLDS, STACK], ids=["train", "folds", "stack"])
def test_status_names_what_the_newest_other_run_differs_in(workspace, spec):
    """Other code also changes the models that a stack is built on: it is not told as other settings."""
    run = begun(workspace, spec)
    deeper = replace(spec, settings=(*spec.settings, ("depth", 4)))
    assert f"{run.run_id} is of other settings (depth as usual then, 4 now). Opens a new run" in line(workspace, deeper)
    assert f"{run.run_id} is of other data. Opens a new run" in line(workspace, replace(spec, data="1" * 64))
    other = tuple((name, ["c", "d"] if name == "bases" else one) for name, one in spec.settings)
    if spec is STACK:
        assert "is of other settings (other bases). Opens" in line(workspace, replace(spec, settings=other))
    path = run.folder / "run.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | {"sources": record["sources"] | {"seeding.py": "0" * 64}}))
    assert "was begun with other code" in line(workspace, replace(spec, data="1" * 64, settings=other))
    for name, value in (("settings", [None, "a"]), ("sources", 5)):  # a damaged record is left out
        path.write_text(json.dumps(record | {name: value}))
        assert run.run_id not in line(workspace, deeper)


def test_fresh_opens_an_attempt_beside_and_the_newest_is_opened_again(workspace):
    def opened(**options) -> str:
        with open_run(workspace, TRAIN, RunOptions(mirror="off", **options)) as run:
            return run.run_id

    first = opened(fresh=True)  # where there is none it is the first
    assert first == TRAIN.run_id and not list(workspace.results.rglob("*.json"))  # nothing is written before `begin`
    begun(workspace, TRAIN)
    assert (opened(), opened(fresh=True)) == (first, f"{first}-2")
    (workspace.results / "MES" / f"{first}-2").mkdir()
    assert (opened(), opened(fresh=True)) == (f"{first}-2", f"{first}-3")
    assert opened(run=first) == first


def test_model_registered_by_a_killed_training_ends_its_run_and_releases_checkpoints(prepared, monkeypatch):
    """Killed between the registration of the model and the end of the run."""
    settings = {"model_settings": {"rounds": 10, "depth": 2}, "mirror": "off"}
    done = pipeline.train(prepared, "DEMO", 5, "xgboost", **settings)
    (done.report_path.parent / "done.json").unlink()
    with CheckpointManager(prepared.checkpoints, run=done.run_id) as manager:
        manager.save_checkpoint("train_xgboost", {"a": 1}, force=True)
    assert pipeline.train(prepared, "DEMO", 5, "xgboost", **settings).reused
    assert (done.report_path.parent / "done.json").is_file() and not list(prepared.checkpoints.rglob("*.ckpt"))
    ArtifactRegistry(prepared.models).remove(ArtifactRegistry(prepared.models).find("DEMO", 5, "xgboost"))
    again = pipeline.train(prepared, "DEMO", 5, "xgboost", **settings)
    assert not again.reused and again.artifact_hash == done.artifact_hash


@pytest.mark.parametrize(("verb", "given", "words"), [
    ("train", {"quik": True}, "did you mean 'quick'"),
    ("cross_validate", {"source": "wandb"}, r"no such argument.*source"),
    ("train", {"seed": -1}, "SEED cannot be used"),
    ("train", {"source": "there"}, "registry or wandb"),
])  # fmt: skip
def test_unknown_option_of_a_run_raises(verb, given, words, workspace):
    with pytest.raises(SettingsError, match=words):
        getattr(pipeline, verb)(workspace, "DEMO", 5, "xgboost", **given)


@pytest.mark.parametrize("verb", ["cross_validate", "stack"])
def test_cross_validate_and_stack_in_second_rank_raise_and_write_nothing(verb, prepared, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    models = "xgboost" if verb == "cross_validate" else ("xgboost", "linear")
    with pytest.raises(SettingsError, match="Only train runs as several processes"):
        getattr(pipeline, verb)(prepared, "DEMO", 5, models)
    assert not list(prepared.results.rglob("run.json"))


TREES = {"rounds": 10, "depth": 3}


def test_cross_validate_resumed_with_other_threads_is_marked_inexact(prepared, monkeypatch):
    asked = []

    def killed_in_the_second_fold(*given, **options):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return fit(*given, **options)

    fit = folds.fit_on_rows
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(folds, "fit_on_rows", killed_in_the_second_fold)
        with pytest.raises(KeyboardInterrupt):
            pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=TREES)
    result = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=TREES)
    assert result.resumed_from == 1 and "unfinished at fold 1 of 2" in result.found
    assert not result.exact and any(
        "threads: began with" in reason and "64" in reason for reason in result.inexact_because
    )
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, seed=1, model_settings=TREES)
    assert straight.exact and "bit-exact" not in straight.summary()


def test_evaluate_headline_shows_model_chosen_on_validation_rows(prepared, monkeypatch):
    for name in ("xgboost", "lightgbm"):
        pipeline.train(prepared, "DEMO", 5, name, mirror="off", model_settings=TREES)
    means = evaluation.prepared_dataset_metrics
    calls = []

    def disturbed(data, rows, forecasts, best):
        table = means(data, rows, forecasts, best)
        calls.append(set(rows.tolist()) <= set(data.splits["validation"].tolist()))
        if calls[-1]:  # on validation rows lightgbm is made the winner, on test rows xgboost
            table.loc["lightgbm", "log_loss"] = 0.0
        else:
            table.loc["xgboost", ["log_loss", "log_loss_gain"]] = [0.0, 9.0]
        return table

    monkeypatch.setattr(evaluation, "prepared_dataset_metrics", disturbed)
    found = pipeline.evaluate(prepared, "DEMO", 5)
    facts = parse_json(found.report_path.with_suffix(".json").read_text())
    assert "lightgbm was chosen on validation rows" in found.report_path.read_text()
    assert all(f"\n{name} " in found.summary() for name in ("xgboost", "lightgbm", "prior"))  # a table
    assert facts["chosen"] == facts["backtest"]["model"] == "lightgbm" and sorted(calls) == [False, True]


def test_train_of_torn_artifact_retrains_with_same_bytes(prepared):
    workspace = prepared
    options = {"mirror": "off", "model_settings": {"rounds": 10, "depth": 2, "threads": 1}}
    first = pipeline.train(workspace, "DEMO", 5, "lightgbm", **options)
    state = first.artifact / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:1000])
    again = pipeline.train(workspace, "DEMO", 5, "lightgbm", **options)
    assert not again.reused and again.artifact == first.artifact and state.read_bytes() == whole
    assert again.predictions_hash == first.predictions_hash
    assert pipeline.train(workspace, "DEMO", 5, "lightgbm", **options).reused
