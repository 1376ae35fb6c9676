"""The newest checkpoint of any training in a workspace, for a manager without a run of its own.

A training under way has its checkpoints in files. A finished training deleted them when its model was registered, so it
is found in the registry: model, last epoch and history are the same there.
"""

import importlib
import logging
from collections.abc import Mapping

from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.errors import CheckpointError
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.workspace import nearest_legal_symbol

PREFIX = "train_"  # of a training's phase; its runs begin with "train-"
_MODELS = "ml_factory.models.registry"
_log = logging.getLogger("ml_factory")


def latest_training_checkpoint(folder: CheckpointFolder, phase: str, run: str = "") -> dict | None:
    """Return the newest training's checkpoint with this phase, as of `CheckpointManager.load_latest_checkpoint`, or
    None.

    Parameters
    ----------
    folder : the workspace's checkpoints.
    phase : such as "train_lstm".
    run : only this run; "" for all runs in the workspace.

    `state` has the training's own keys, `model_state` for the model's `load_state`, and `epoch`, the number of finished
    epochs. One log line names run, symbol, horizon and epoch.
    """
    if not phase.startswith(PREFIX) or (run and not run.startswith("train-")):
        return None
    saved = [entry for entry in folder.list_trainings(phase) if run in ("", entry["run"])]
    finished = [entry for entry in _registered(folder, phase) if run in ("", entry.facts.get("run_id"))]
    finished_runs = {entry.facts.get("run_id") for entry in finished}
    found: list[tuple[str, dict | Artifact]] = [
        *((entry["saved_at"], entry) for entry in saved if entry["run"] not in finished_runs),
        *((entry.registered_at, entry) for entry in finished),
    ]
    for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True):
        checkpoint = (
            _from_artifact(entry, phase) if isinstance(entry, Artifact) else _from_files(folder, phase, entry["run"])
        )
        if checkpoint is not None:
            names = (checkpoint[name] for name in ("run", "symbol", "horizon", "saved_at"))
            line = "Checkpoint of %s: run %s, symbol %s, horizon %s, saved at %s, %d epochs finished"
            _log.warning(line, phase, *names, checkpoint["state"]["epoch"])
            return checkpoint
    return None


def _registered(folder: CheckpointFolder, phase: str) -> list[Artifact]:
    """List the finished models of this phase, of every symbol, in the workspace of these checkpoints."""
    registry = ArtifactRegistry(folder.folder.parent / "models")
    symbols = [name for name in files.names(registry.folder) if nearest_legal_symbol(name) == name]
    found = [artifact for symbol in symbols for artifact in registry.list(symbol)]
    return [artifact for artifact in found if (artifact.kind, PREFIX + artifact.name) == ("model", phase)]


def _from_files(folder: CheckpointFolder, phase: str, run: str) -> dict | None:
    """Return the checkpoint of a training under way; None where none of its checkpoints is intact."""
    found = folder.load(run, phase)
    if found is None:
        return None
    state, trained_on = found["state"], found["state"].get("carried", {}).get("trained_on", {})
    models = importlib.import_module(_MODELS)
    model_state, epoch = models.model_state_from_checkpoint(state, trained_on), len(checkpoint_history(state))
    state = {**state, "model_state": model_state, "epoch": epoch}
    return {**found, "state": state, "symbol": trained_on.get("symbol"), "horizon": trained_on.get("horizon")}


def checkpoint_history(state: Mapping) -> list[dict]:
    """Return the history of finished epochs or blocks in the state of a fit's checkpoint."""
    return list(state["history"] if "history" in state else state["memory"]["history"])


def _from_artifact(artifact: Artifact, phase: str) -> dict | None:
    """Return the checkpoint of a finished training; None, with a warning, where its file is torn."""
    try:
        model_state = artifact.load_state()["model_state"]
    except CheckpointError as error:
        _log.warning("A finished model is skipped: %s", error)
        return None
    facts, history = artifact.facts, list(artifact.facts.get("history", ()))
    state = {"model_state": model_state, "epoch": len(history), "history": history}
    metrics = {name: value for name, value in history[-1].items() if name != "epoch"} if history else {}
    return {
        "state": state, "run": facts.get("run_id"), "symbol": artifact.symbol, "horizon": facts.get("horizon"),
        "phase": phase, "sequence": artifact.sequence, "saved_at": artifact.registered_at, "metrics": metrics,
        "path": str(artifact.path), "hash": artifact.hash, "skipped": [],
    }  # fmt: skip
