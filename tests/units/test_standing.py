"""What the one line says of a run, from made-up checkpoints and records: nothing is trained here."""

from dataclasses import replace
from pathlib import Path

import pytest

from ml_factory.experiment import Run, RunSpec, open_checkpoints
from ml_factory.runs.workspace import Workspace
from ml_factory.units.standing import standing_line

FOLDS = RunSpec("MES", 10, "lightgbm", "folds", 0, False, "0" * 64, (("folds", 3), ("rounds", 20)))
BASES = (("base_models", ["xgboost", "lightgbm"]), ("bases", ["a", "b"]), ("folds", 2))
STACK = RunSpec("MES", 10, "stack", "stack", 0, False, "0" * 64, BASES)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path)


def run_of(workspace: Workspace, spec: RunSpec) -> Run:
    return Run(spec.run_id, workspace.results / spec.symbol / spec.run_id)


def save(workspace: Workspace, run_id: str, phase: str, **metrics) -> None:
    with open_checkpoints(workspace.checkpoints, Run(run_id, Path())) as manager:
        assert manager.save_checkpoint(phase, {"a": 1}, force=True, metrics=metrics)


def done(run: Run, name: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / name).touch()


def line(workspace: Workspace, spec: RunSpec) -> str:
    return standing_line(workspace, run_of(workspace, spec), spec, finished=False)


# ---- folds ---------------------------------------------------------------------------------------------------------


def test_folds_tell_of_the_fit_inside_the_one_they_go_on_with(workspace):
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


def test_nested_folds_are_looked_for_where_they_keep_theirs(workspace):
    spec = replace(FOLDS, settings=(*FOLDS.settings, ("search", {"trials": 5})))
    run = run_of(workspace, spec)
    assert "Starts from the beginning" in line(workspace, spec)
    save(workspace, f"{run.run_id}-fold0", "barriers", reached="trial 4 of 5")
    assert "unfinished at trial 4 of 5 in the first fold (" in line(workspace, spec)
    done(run, "forecasts-lightgbm-0.state")
    assert "unfinished at fold 1 of 3 (" in line(workspace, spec)
    done(run, "trials-1.json")  # whose slots may hold another's work by now
    assert "unfinished at fold 1 of 3, trial 5 of 5 in the next (" in line(workspace, spec)
    save(workspace, f"{run.run_id}-fold1", "folds_lightgbm_0", reached="round 10")
    assert "unfinished at fold 1 of 3, round 10 in the next (" in line(workspace, spec)


def test_a_stack_tells_of_each_of_its_models(workspace):
    run = run_of(workspace, STACK)
    done(run, "forecasts-xgboost.state")
    save(workspace, run.run_id, "folds_lightgbm_0", reached="round 10")
    assert "unfinished at xgboost: all folds; lightgbm: round 10 in the first fold (" in line(workspace, STACK)
