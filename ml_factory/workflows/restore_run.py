"""What a run tells and leaves with W&B, and a run that this workspace has nothing of, brought back from there."""

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
    """All that this run can go on from: its checkpoints, those of folds nested in it, and its finished parts."""
    settings = dict(spec.settings)
    nested = range(int(settings["folds"])) if "search" in settings else ()
    runs = (run.run_id, *(nested_run(run, fold).run_id for fold in nested))
    kept = tuple((str(run.folder), pattern) for pattern in FINISHED_PARTS)
    return RunSnapshot(run.run_id, str(manager.home_folder), runs, kept)


def open_tracker(run: Run, settings: dict, mirror: str, snapshot: RunSnapshot | None = None) -> Tracker:
    """The run's record; with a keepsake the newest of that is also kept at W&B."""
    return Tracker(run.run_id, settings, run.folder / "log", mirror=mirror, snapshot=snapshot)


@contextmanager
def tracked(
    manager: CheckpointManager, run: Run, settings: dict, snapshot: RunSnapshot, mirror: str, *, owned: str
) -> Iterator[Callable[[dict], None]]:
    """Work that leaves no artifact, recorded; inside, a function that takes its summary. One told before is not again.

    owned : the phase that is owned before the record is opened: a second session is refused, and has touched nothing.
    """
    if is_log_complete(run.folder / "log"):
        yield lambda summary: None
        return
    with manager.phase(owned).acquired(), open_tracker(run, settings, mirror, snapshot) as tracker:
        yield tracker.finish


def restore_from_wandb(
    workspace: Workspace, run: Run, spec: RunSpec, *, source: str, mirror: str, fresh: bool = False
) -> None:
    """Fill the registry, or else the pool of checkpoints, with what W&B kept of this run.

    source : "wandb" takes its model from there, whatever the registry has, and raises NotPreparedError where that
    fails; "registry" asks W&B only for a run that this workspace has nothing of, and goes on without an answer.
    fresh : the run is to begin anew, so it is not asked for.
    """
    online, registry = mirror_mode(mirror) == "online", Registry(workspace.models)
    kinds = {"train": ["model"], "stack": ["stack"]}.get(spec.task, [])
    if source == "wandb":
        where, step = f"run {run.run_id}", 'SOURCE = "registry" finds it here, or trains it'
        if not online:
            raise NotPreparedError("W&B is asked for a model, and there is no key for it", where=where, next_step=step)
        if restore_artifact(registry, kinds[0], run.run_id) is None:
            raise NotPreparedError("W&B has no such model", where=where, next_step=step)
    elif online and not fresh and (kinds or not run.ended):  # what an ended run left may be gone
        if kinds and registry.find(spec.symbol, kind=kinds[0], run_id=run.run_id):
            return
        if not progress_of(workspace, run, spec):
            with open_checkpoints(workspace.checkpoints, run) as manager:
                try_restore(manager, snapshot_of(manager, run, spec), registry, kinds)
