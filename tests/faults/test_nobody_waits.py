"""A mount that hangs in every call: each call fails within its deadline, and no user-visible call waits longer."""

from functools import partial

import numpy as np
import pytest

from ml_factory import doctor, run_folder
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import UnresponsiveMountError
from ml_factory.run_folder import RunFolder, open_run_folder
from ml_factory.settings import RunSettings
from ml_factory.storage import mounts
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking.run_log import count_run_log_steps
from ml_factory.workflows.runs.restore_run import restore_run_from_wandb
from ml_factory.workflows.runs.run_status import format_run_status
from tests.tracking.metrics_table import read_log

SPEC = RunSettings("DEMO", 5, "xgboost", "train", 0, False, "data")


@pytest.fixture
def silent(mount, tmp_path, monkeypatch):
    """(workspace, artifact, manager) on a drive that answered until now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mounts, "DEADLINE", 2.0)
    monkeypatch.setattr(mounts, "RETRY_DEADLINE", 0.5)
    patient = partial(CheckpointManager, tiers=StorageTiers(deadline_seconds=2))
    monkeypatch.setattr(run_folder, "CheckpointManager", patient)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("ML_FACTORY_WANDB", raising=False)
    drive = mount()
    workspace = Workspace(drive.path / "ml_factory")
    artifact = ArtifactRegistry(workspace.models).register(
        "DEMO", "model", "xgboost", {"a": np.ones(3)}, {"horizon": 5}
    )
    manager = CheckpointManager(workspace.checkpoints, run="run", tiers=StorageTiers(deadline_seconds=2))
    assert manager.store.mount is not None
    manager.save_checkpoint("p", {"value": 1}, force=True)
    assert manager.wait(60)
    drive.fault("hang")
    yield workspace, artifact, manager
    drive.unmount()
    manager.close(0)


@pytest.mark.soak
def test_calls_on_hanging_mount_fail_within_deadline(silent, capsys):
    workspace, artifact, manager = silent
    registry, folder = ArtifactRegistry(workspace.models), workspace.results / "DEMO"
    for query in (
        lambda: registry.list("DEMO"),
        lambda: registry.find("DEMO", 5),
        artifact.is_intact,
        artifact.load_state,
        lambda: Workspace(workspace.root),
        lambda: open_run_folder(workspace.results, "DEMO", SPEC, False),
        lambda: RunFolder("run", folder / "run").begin(SPEC),
        lambda: restore_run_from_wandb(
            workspace, RunFolder("run", folder / "run"), SPEC, source="registry", mirror="auto"
        ),
        lambda: read_log(folder / "run" / "log"),
    ):
        with pytest.raises(UnresponsiveMountError):
            query()
    assert not registry.is_persisted(registry.register("DEMO", "model", "toy", {"a": 1}))  # kept here
    assert count_run_log_steps([1, 2], folder / "run" / "log") == 0
    line = format_run_status(workspace, RunFolder("run-2", folder / "run-2"), SPEC, finished=False)
    assert line.startswith("Status of xgboost on DEMO, horizon 5 unknown: the mount does not answer")
    assert not doctor.run_doctor_checks(workspace)[-1].good
    assert [one["sequence"] for one in manager.list_checkpoints()] == [1]  # what is here as well
    manager.save_checkpoint("p", {"value": 2}, force=True)
    assert not manager.safe_stop(1).safe
    assert "saved locally" in capsys.readouterr().out
