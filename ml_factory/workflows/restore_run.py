"""Log a run to W&B, and restore a run from W&B when the workspace has no local state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import NotPreparedError
from ml_factory.run_folder import Run, open_checkpoints
from ml_factory.settings import RunSpec
from ml_factory.storage.artifact_registry import Registry
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking.log_upload import is_log_complete
from ml_factory.tracking.restore import restore_artifact, try_restore
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import mirror_mode
from ml_factory.workflows.run_status import progress_of
from ml_factory.workflows.unit_checkpoints import FINISHED_PARTS, nested_run


def snapshot_of(manager: CheckpointManager, run: Run, spec: RunSpec) -> RunSnapshot:
    """Return the resumable state of this run: its checkpoints, those of nested folds, and its finished parts."""
    settings = dict(spec.settings)
    nested = range(int(settings["folds"])) if "search" in settings else ()
    runs = (run.run_id, *(nested_run(run, fold).run_id for fold in nested))
    kept = tuple((str(run.folder), pattern) for pattern in FINISHED_PARTS)
    return RunSnapshot(run.run_id, str(manager.store.home_folder), runs, kept)


def open_tracker(run: Run, settings: dict, mirror: str, snapshot: RunSnapshot | None = None) -> Tracker:
    """Open the run's log; with a snapshot, the newest one is also uploaded to W&B."""
    return Tracker(run.run_id, settings, run.folder / "log", mirror=mirror, snapshot=snapshot)


@contextmanager
def tracked(
    manager: CheckpointManager, run: Run, settings: dict, snapshot: RunSnapshot, mirror: str, *, owned: str
) -> Iterator[Callable[[dict], None]]:
    """Log work that leaves no artifact; yields a function that takes the summary. A complete log is not written again.

    owned : phase to lock before the log is opened, so that a second session is refused before it writes anything.
    """
    if is_log_complete(run.folder / "log"):
        yield lambda summary: None
        return
    with manager.phase(owned).acquired(), open_tracker(run, settings, mirror, snapshot) as tracker:
        yield tracker.finish


def restore_from_wandb(
    workspace: Workspace, run: Run, spec: RunSpec, *, source: str, mirror: str, fresh: bool = False
) -> None:
    """Restore the artifact, or else the checkpoints, of this run from W&B.

    source : "wandb" loads the model from W&B whatever the registry has, and raises NotPreparedError where that fails;
        "registry" queries W&B only for a run without local state, and continues without an answer.
    fresh : the run begins again, so W&B is not queried.
    """
    online, registry = mirror_mode(mirror) == "online", Registry(workspace.models)
    kinds = {"train": ["model"], "stack": ["stack"]}.get(spec.task, [])
    if source == "wandb":
        where, step = f"run {run.run_id}", 'SOURCE = "registry" finds it here, or trains it'
        if not online:
            raise NotPreparedError("No W&B key to load a model from W&B", where=where, next_step=step)
        if restore_artifact(registry, kinds[0], run.run_id) is None:
            raise NotPreparedError("W&B has no such model", where=where, next_step=step)
    elif online and not fresh and (kinds or not run.ended):  # an ended run may have been cleaned up
        if kinds and registry.find(spec.symbol, kind=kinds[0], run_id=run.run_id):
            return
        if not progress_of(workspace, run, spec):
            with open_checkpoints(workspace.checkpoints, run) as manager:
                try_restore(manager, snapshot_of(manager, run, spec), registry, kinds)
