"""An artifact that a full drive did not take ends no run: its checkpoints stay, and W&B is asked where it is gone."""

import pytest

from ml_factory.checkpoints.slot_pool import Pool
from ml_factory.run_folder import Run, open_checkpoints
from ml_factory.settings import RunSpec
from ml_factory.storage.artifact_registry import Registry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import restore_run
from ml_factory.workflows.train import complete_log
from ml_factory.workflows.unit_checkpoints import fit_phase

TRAIN = RunSpec("MES", 10, "xgboost", "train", 0, False, "0" * 64)
STACK = RunSpec("MES", 10, "stack", "stack", 0, False, "0" * 64, (("base_models", ["xgboost", "linear"]),))


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Workspace(tmp_path / "workspace")


def run_of(workspace: Workspace, spec: RunSpec) -> Run:
    return Run("run", workspace.results / spec.symbol / "run")


@pytest.mark.parametrize("spec", [TRAIN, STACK], ids=["train", "stack"])
def test_only_an_artifact_in_the_workspace_ends_its_run(workspace, spec):
    run, registry = run_of(workspace, spec), Registry(workspace.models)
    with open_checkpoints(workspace.checkpoints, run) as manager:
        manager.save_checkpoint(fit_phase("xgboost"), {"a": 1}, force=True)

    def closed_with(place: Registry) -> tuple[bool, bool]:
        artifact = place.register("MES", "model", spec.model, {"a": 1}, {"run_id": "run"})
        complete_log(workspace, run, spec, artifact, mirror="off")
        return run.ended, all(slot.returned for slot in Pool(workspace.checkpoints).scan())

    assert closed_with(registry.local_fallback) == (False, False)
    assert closed_with(registry) == (True, spec is TRAIN)


@pytest.mark.parametrize("spec", [TRAIN, STACK], ids=["train", "stack"])
def test_an_ended_run_whose_artifact_is_gone_is_asked_for(workspace, monkeypatch, spec):
    run, asked = run_of(workspace, spec), []
    monkeypatch.setattr(restore_run, "mirror_mode", lambda mirror: "online")
    monkeypatch.setattr(restore_run, "try_restore", lambda manager, snapshot, *rest: asked.append(snapshot.run))
    run.end()
    restore_run.restore_from_wandb(workspace, run, spec, source="registry", mirror="auto")
    assert asked == ["run"]
    Registry(workspace.models).register("MES", spec.task.replace("train", "model"), "x", {"a": 1}, {"run_id": "run"})
    restore_run.restore_from_wandb(workspace, run, spec, source="registry", mirror="auto")
    assert asked == ["run"]
