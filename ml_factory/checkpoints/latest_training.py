"""The newest checkpoint that a training saved in this workspace, for a manager that has no run of its own.

A training that is under way has its checkpoints in the pool. One that has ended gave them back when its model was
registered, so it is found in the registry: model, last epoch and history are the same there.
"""

import importlib
import logging

from ml_factory.checkpoints.phase import PhaseCheckpoints
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.artifact_registry import Artifact, Registry
from ml_factory.storage.atomic_files import names_in
from ml_factory.storage.workspace import legal_symbol

PREFIX = "train_"  # of a training's phase; its runs begin with "train-"
_MODELS = "ml_factory.models.registry"
_log = logging.getLogger("ml_factory")


def is_training_run(run: str, phase: str) -> bool:
    """Whether `pipeline.train` saves under these names."""
    return run.startswith("train-") and phase.startswith(PREFIX)


def latest_training(manager, phase: str, run: str = "") -> dict | None:
    """What `CheckpointManager.load_latest_checkpoint` gives of the newest training with this phase; None without one.

    run : of this run alone, else of all runs in the workspace.

    `state` has the keys `model_state`, for `load_state` of the model, and `epoch`, how many were finished, beside what
    the training saved. One line in the log names run, symbol, horizon and epoch.
    """
    saved = [one for one in manager.list_trainings(phase) if run in ("", one["run"])]
    ended = [one for one in _registered(manager, phase, needed=not saved) if run in ("", one.facts.get("run_id"))]
    over = {one.facts.get("run_id") for one in ended}
    found = [(one["saved_at"], one) for one in saved if one["run"] not in over]
    found += [(one.registered_at, one) for one in ended]
    for _, one in sorted(found, key=lambda pair: pair[0], reverse=True):
        checkpoint = _of_artifact(one, phase) if isinstance(one, Artifact) else _of_slots(manager, phase, one["run"])
        if checkpoint is not None:
            names = (checkpoint[name] for name in ("run", "symbol", "horizon", "saved_at"))
            line = "Checkpoint of %s: run %s, symbol %s, horizon %s, saved at %s, %d epochs finished"
            _log.warning(line, phase, *names, checkpoint["state"]["epoch"])
            return checkpoint
    return None


def _registered(manager, phase: str, needed: bool) -> list[Artifact]:
    """The finished models of this phase's name, of every symbol, in the workspace that these checkpoints are of.

    needed : a folder that cannot be read is an error, not an empty one.
    """
    registry = Registry(manager.folder.parent / "models")
    try:
        symbols = [name for name in names_in(registry.folder) if legal_symbol(name) == name]
        found = [one for symbol in symbols for one in registry.list(symbol)]
    except WorkspaceError as error:
        if needed:
            raise
        _log.warning("Finished models are not looked at: %s", error)
        return []
    return [one for one in found if (one.kind, PREFIX + one.name) == ("model", phase)]


def _of_slots(manager, phase: str, run: str) -> dict | None:
    """Of a training under way; None where none of its checkpoints is whole."""
    found = PhaseCheckpoints(manager, phase, run).latest()
    if found is None:
        return None
    state, about = found["state"], found["state"].get("carried", {}).get("trained_on", {})
    models = importlib.import_module(_MODELS)
    history = state["history"] if "history" in state else state["memory"]["history"]
    state = {**state, "model_state": models.state_in_training(state, about), "epoch": len(history)}
    return {**found, "state": state, "symbol": about.get("symbol"), "horizon": about.get("horizon")}


def _of_artifact(artifact: Artifact, phase: str) -> dict | None:
    """Of a finished training; None, with a line in the log, where its file is not whole."""
    try:
        model_state = artifact.load_state()["model_state"]
    except CheckpointError as error:
        _log.warning("A finished model is passed over: %s", error)
        return None
    facts, history = artifact.facts, list(artifact.facts.get("history", ()))
    state = {"model_state": model_state, "epoch": len(history), "history": history}
    metrics = {name: value for name, value in history[-1].items() if name != "epoch"} if history else {}
    return {
        "state": state, "run": facts.get("run_id"), "symbol": artifact.symbol, "horizon": facts.get("horizon"),
        "phase": phase, "sequence": artifact.sequence, "saved_at": artifact.registered_at, "metrics": metrics,
        "path": str(artifact.path), "hash": artifact.hash, "skipped": [],
    }  # fmt: skip
