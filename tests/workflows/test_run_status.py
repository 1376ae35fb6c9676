"""What the one line says of a run, from made-up checkpoints and records: nothing is trained here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.settings import RunSettings
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.runs.run_status import format_run_status

FOLDS = RunSettings("MES", 10, "lightgbm", "folds", 0, False, "0" * 64, (("folds", 3), ("rounds", 20)))
TRAIN = replace(FOLDS, task="train", settings=(("rounds", 20),))
BASES = (("base_models", ["xgboost", "lightgbm"]), ("bases", ["a", "b"]), ("folds", 2))
STACK = RunSettings("MES", 10, "stack", "stack", 0, False, "0" * 64, BASES)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path)


def run_of(workspace: Workspace, spec: RunSettings) -> RunFolder:
    return RunFolder(spec.run_id, workspace.results / spec.symbol / spec.run_id)


def save(workspace: Workspace, run_id: str, phase: str, **metrics) -> None:
    with open_run_checkpoints(workspace.checkpoints, RunFolder(run_id, Path())) as manager:
        assert manager.save_checkpoint(phase, {"a": 1}, force=True, metrics=metrics)


def done(run: RunFolder, name: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / name).touch()


def line(workspace: Workspace, spec: RunSettings) -> str:
    return format_run_status(workspace, run_of(workspace, spec), spec, finished=False)


# ---- folds ---------------------------------------------------------------------------------------------------------


def test_format_run_status_of_folds_includes_progress_in_current_fold(workspace):
    run = run_of(workspace, FOLDS)
    assert "Starts from the beginning" in line(workspace, FOLDS)
    save(workspace, run.run_id, "folds_lightgbm_0", reached="round 10")
    assert "unfinished at round 10 in the first fold (" in line(workspace, FOLDS)
    save(workspace, run.run_id, "folds_lightgbm", reached="fold 1 of 3", finished=1)
    assert "unfinished at fold 1 of 3 (" in line(workspace, FOLDS)  # what fold 0 had come to counts no more
    save(workspace, run.run_id, "folds_lightgbm_1", reached="round 5")
    assert "unfinished at fold 1 of 3, round 5 in the next (" in line(workspace, FOLDS)
    done(run, "forecasts-lightgbm.state")
    assert "unfinished at all folds (" in line(workspace, FOLDS)


def test_format_run_status_of_stack_lists_progress_per_base_model(workspace):
    run = run_of(workspace, STACK)
    done(run, "forecasts-xgboost.state")
    save(workspace, run.run_id, "folds_lightgbm_0", reached="round 10")
    assert "unfinished at xgboost: all folds; lightgbm: round 10 in the first fold (" in line(workspace, STACK)


# ---- runs beside ---------------------------------------------------------------------------------------------------


def test_format_run_status_names_changed_settings_or_data(workspace):
    run_of(workspace, FOLDS).begin(FOLDS)
    deeper = replace(FOLDS, settings=(*FOLDS.settings, ("depth", 4)))
    assert f"{FOLDS.run_id} is of other settings (depth as usual then, 4 now). Opens" in line(workspace, deeper)
    run_of(workspace, deeper).begin(deeper)
    printed = line(workspace, replace(FOLDS, data="1" * 64, settings=deeper.settings))
    assert f"{deeper.run_id} is of other data, and 1 earlier ones differ too. Opens" in printed
    run_of(workspace, STACK).begin(STACK)
    other = replace(STACK, settings=(*BASES[:1], ("bases", ["a", "c"]), BASES[2]))
    printed = line(workspace, other)
    assert "is of other settings (other bases). Opens" in printed


@pytest.mark.parametrize("spec", [TRAIN, FOLDS, STACK], ids=["train", "folds", "stack"])
def test_format_run_status_names_other_code_but_other_settings_first(workspace, spec):
    """Other code also changes the models that a stack is built on."""
    run = run_of(workspace, spec)
    run.begin(spec)
    path = run.folder / "run.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "sources": record["sources"] | {"seeding.py": "0" * 64}}))
    bases = tuple((name, ["c", "d"] if name == "bases" else one) for name, one in spec.settings)
    now = replace(spec, data="1" * 64, settings=bases)
    assert f"{spec.run_id} was begun with other code. Opens a new run" in line(workspace, now)
    deeper = replace(spec, settings=(*spec.settings, ("depth", 4)))
    assert f"{spec.run_id} is of other settings (depth as usual then, 4 now). Opens" in line(workspace, deeper)


@pytest.mark.parametrize("field", ["settings", "sources"])
@pytest.mark.parametrize("value", [[None, "a"], "text", 5])
def test_format_run_status_leaves_out_run_whose_record_is_damaged(workspace, field, value):
    run = run_of(workspace, FOLDS)
    run.begin(FOLDS)
    path = run.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), field: value}))
    assert run.run_id not in line(workspace, replace(FOLDS, settings=(*FOLDS.settings, ("depth", 4))))
