"""Log a run to W&B, and restore a run from W&B when the workspace has no local state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import NotPreparedError
from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.settings import RunSettings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking.run_log import is_log_complete
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import wandb_mirror_mode
from ml_factory.tracking.wandb_restore import restore_wandb_artifact, try_restore_from_wandb
from ml_factory.workflows.runs.run_status import unfinished_run_progress
from ml_factory.workflows.unit_checkpoints import FINISHED_PARTS


def restorable_snapshot(manager: CheckpointManager, run: RunFolder) -> RunSnapshot:
    """Return the resumable state of this run: its checkpoints, and its finished parts."""
    kept = tuple((str(run.folder), pattern) for pattern in FINISHED_PARTS)
    return RunSnapshot(run.run_id, str(manager.folder.folder), kept)


def open_run_tracker(run: RunFolder, settings: dict, mirror: str, snapshot: RunSnapshot | None = None) -> Tracker:
    """Open the run's log; with a snapshot, the newest one is also uploaded to W&B."""
    return Tracker(run.run_id, settings, run.folder / "log", mirror=mirror, snapshot=snapshot)


@contextmanager
def tracked_run(
    manager: CheckpointManager, run: RunFolder, settings: dict, snapshot: RunSnapshot, mirror: str, *, owned: str
) -> Iterator[Callable[[dict], None]]:
    """Log work that leaves no artifact; yields a function that takes the summary. A complete log is not written again.

    owned : phase to lock before the log is opened, so that a second session is refused before it writes anything.
    """
    if is_log_complete(run.folder / "log"):
        yield lambda summary: None
        return
    with manager.phase(owned).acquired(), open_run_tracker(run, settings, mirror, snapshot) as tracker:
        yield tracker.finish


def restore_run_from_wandb(
    workspace: Workspace, run: RunFolder, spec: RunSettings, *, source: str, mirror: str, fresh: bool = False
) -> None:
    """Restore the artifact, or else the checkpoints, of this run from W&B.

    source : "wandb" loads the model from W&B whatever the registry has, and raises NotPreparedError where that fails;
        "registry" queries W&B only for a run without local state, and continues without an answer.
    fresh : the run begins again, so W&B is not queried.
    """
    online, registry = wandb_mirror_mode(mirror) == "online", ArtifactRegistry(workspace.models)
    kinds = {"train": ["model"], "stack": ["stack"]}.get(spec.task, [])
    if source == "wandb":
        where, step = f"run {run.run_id}", 'SOURCE = "registry" finds it here, or trains it'
        if not online:
            raise NotPreparedError("No W&B key to load a model from W&B", where=where, next_step=step)
        if restore_wandb_artifact(registry, kinds[0], run.run_id) is None:
            raise NotPreparedError("W&B has no such model", where=where, next_step=step)
    elif online and not fresh and (kinds or not run.ended):  # an ended run may have been cleaned up
        if kinds and registry.find(spec.symbol, kind=kinds[0], run_id=run.run_id):
            return
        if not unfinished_run_progress(workspace, run, spec):
            with open_run_checkpoints(workspace.checkpoints, run) as manager:
                try_restore_from_wandb(manager, restorable_snapshot(manager, run), registry, kinds)
