"""A run that this workspace has nothing of, brought back from what W&B kept."""

from ml_factory.errors import NotPreparedError, SettingsError, did_you_mean
from ml_factory.experiment import Run, RunSpec, open_checkpoints
from ml_factory.runs.mirror import mirror_mode
from ml_factory.runs.recovery import recover_artifact, recover_quietly
from ml_factory.runs.registry import Registry
from ml_factory.runs.storage import is_folder
from ml_factory.runs.workspace import Workspace

SOURCES = ("registry", "wandb")


def check_source(source: str) -> str:
    """One of SOURCES, else SettingsError."""
    if source not in SOURCES:
        raise SettingsError(
            "Models do not come from there", where="SOURCE", got=repr(source), wanted=" or ".join(SOURCES),
            next_step=did_you_mean(str(source), SOURCES),
        )  # fmt: skip
    return source


def bring_back(workspace: Workspace, run: Run, spec: RunSpec, phase: str, *, source: str, mirror: str) -> None:
    """Fill the registry, or the checkpoints of `phase`, with what W&B kept of this run.

    source : "wandb" takes its model from there, whatever the registry has, and raises NotPreparedError where that
    fails; "registry" asks W&B only for a run that this workspace has nothing of, and goes on without an answer.
    """
    online, registry = mirror_mode(mirror) == "online", Registry(workspace.models)
    kind = "stack" if spec.task == "stack" else "model"
    if source == "wandb":
        where, step = f"run {run.run_id}", 'SOURCE = "registry" finds it here, or trains it'
        if not online:
            raise NotPreparedError("W&B is asked for a model, and there is no key for it", where=where, next_step=step)
        if recover_artifact(registry, kind, run.run_id) is None:
            raise NotPreparedError("W&B has no such model", where=where, next_step=step)
    elif online and not is_folder(run.folder):
        with open_checkpoints(workspace.checkpoints, run) as manager:
            here = registry.find(spec.symbol, kind=kind, run_id=run.run_id) or manager.phase(phase).glance()
            if not here:
                recover_quietly(registry, kind, manager, phase)
