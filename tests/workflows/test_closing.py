"""A run with an artifact ends, and W&B is asked where the artifact is gone."""

import pytest

from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.settings import RunSettings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.runs import restore_run
from ml_factory.workflows.train import complete_train_log
from ml_factory.workflows.unit_checkpoints import fit_phase_name

TRAIN = RunSettings("MES", 10, "xgboost", "train", 0, False, "0" * 64)
STACK = RunSettings("MES", 10, "stack", "stack", 0, False, "0" * 64, (("base_models", ["xgboost", "linear"]),))


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Workspace(tmp_path / "workspace")


def run_of(workspace: Workspace, spec: RunSettings) -> RunFolder:
    return RunFolder("run", workspace.results / spec.symbol / "run")


@pytest.mark.parametrize("spec", [TRAIN, STACK], ids=["train", "stack"])
def test_completed_log_ends_run_and_releases_checkpoints(workspace, spec):
    run, registry = run_of(workspace, spec), ArtifactRegistry(workspace.models)
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        manager.save_checkpoint(fit_phase_name("xgboost"), {"a": 1}, force=True)

    artifact = registry.register("MES", "model", spec.model, {"a": 1}, {"run_id": "run"})
    complete_train_log(workspace, run, spec, artifact, mirror="off")
    assert (run.ended, not list(workspace.checkpoints.rglob("*.ckpt"))) == (True, spec is TRAIN)


@pytest.mark.parametrize("spec", [TRAIN, STACK], ids=["train", "stack"])
def test_restore_from_wandb_requests_ended_run_with_missing_artifact(workspace, monkeypatch, spec):
    run, asked = run_of(workspace, spec), []
    monkeypatch.setattr(restore_run, "wandb_mirror_mode", lambda mirror: "online")
    monkeypatch.setattr(
        restore_run, "try_restore_from_wandb", lambda manager, snapshot, *rest: asked.append(snapshot.run)
    )
    run.end()
    restore_run.restore_run_from_wandb(workspace, run, spec, source="registry", mirror="auto")
    assert asked == ["run"]
    ArtifactRegistry(workspace.models).register(
        "MES", spec.task.replace("train", "model"), "x", {"a": 1}, {"run_id": "run"}
    )
    restore_run.restore_run_from_wandb(workspace, run, spec, source="registry", mirror="auto")
    assert asked == ["run"]
