"""One model on the chronological split: fit, calibrate, keep, and the probabilities of every row."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ml_factory.errors import FactoryError, WorkspaceError
from ml_factory.evaluation.calibration import Temperature, log_probabilities
from ml_factory.experiment import Run, RunSpec, machine, open_checkpoints
from ml_factory.inference.bundle import Bundle, library_versions
from ml_factory.models.contract import Estimator, FitResult, merged
from ml_factory.models.importances import importance_table
from ml_factory.models.registry import build_model
from ml_factory.runs.checkpoints import PhaseCheckpoints
from ml_factory.runs.registry import Artifact, Registry
from ml_factory.runs.tracking import Tracker, read_log
from ml_factory.runs.workspace import Workspace
from ml_factory.targets.weights import WeightSpec
from ml_factory.units.dataset import Dataset, limit_rows, model_inputs, weighted
from ml_factory.units.keeping import Kept, history_of, reached_by_fit

Callback = Callable[[int, dict], None]


def fit_holdout(
    workspace: Workspace, data: Dataset, run: Run, spec: RunSpec, *, callbacks: Sequence[Callback], mirror: str
) -> Artifact:
    """Train on the training rows, stop early and calibrate on validation rows, and register the bundle."""
    started = time.perf_counter()
    settings = dict(spec.settings)
    weights = WeightSpec(**settings.pop("weights", {}))
    model = build_model(spec.model, seed=spec.seed, **settings)
    train, validation, limited = _teachers(data, model, spec.quick)
    take = model_inputs(data, data.scaler, model.lookback)
    (train, w_train), (validation, w_validation) = weighted(data, train, weights), weighted(data, validation)
    held_out = (take(validation), data.y[validation], w_validation)
    run.begin(spec)
    with (
        open_checkpoints(workspace.checkpoints, run) as manager,
        # Before the record is opened: a second process on this run is refused, and has touched nothing of it.
        manager.phase(fit_phase(spec.model)).claimed() as phase,
        _record(run, spec, mirror) as tracker,
    ):
        checkpoints = _RecordFirst(phase, machine(spec), tracker)
        result = model.fit(
            take(train), data.y[train], w_train, validation=held_out,
            callbacks=(tracker.log, *callbacks), checkpoints=checkpoints,
        )  # fmt: skip
        temperature = Temperature.fit(log_probabilities(model.predict_proba(held_out[0])), held_out[1], w_validation)
        inexact = merged(result.inexact, checkpoints.elsewhere)
        facts = _facts(data, run, spec, result, inexact, limited, time.perf_counter() - started)
        # On validation rows: those that judge are for nothing else.
        worth = importance_table(model, data.features.columns, *held_out).reset_index() if model.lookback <= 1 else None
        facts["importances"] = [] if worth is None else worth.to_dict("records")
        bundle = _bundle(data, model, temperature, facts)
        artifact = Registry(workspace.models).register(data.symbol, "model", spec.model, bundle.to_state(), facts)
        tracker.finish(_summary(artifact))
        run.end()
        phase.finish()
    return artifact


def close_record(run: Run, spec: RunSpec, artifact: Artifact, *, mirror: str) -> None:
    """The record of a run whose artifact is there, made whole where a kill came between the two."""
    history, log = artifact.facts["history"], run.folder / "log"
    if (log / "summary.json").is_file() and not _untold(log, history):
        return
    with _record(run, spec, mirror) as tracker:
        _tell(tracker, _untold(log, history))
        tracker.finish(_summary(artifact))
    run.end()


def fit_phase(model: str) -> str:
    """The name of the checkpoints of a model's fit."""
    return f"train_{model}"


def _record(run: Run, spec: RunSpec, mirror: str) -> Tracker:
    return Tracker(run.run_id, spec.to_dict(), run.folder / "log", mirror=mirror)


def _summary(artifact: Artifact) -> dict:
    return {"artifact": artifact.hash, "best_epoch": artifact.facts["best_epoch"]}


def _untold(log: Path, history: Sequence[dict]) -> list[dict]:
    """Epochs from the first on that the record lacks: a cloud may have lost what was logged before a checkpoint."""
    try:
        told = set(read_log(log)["step"])
    except WorkspaceError:  # damaged: all of it is told again
        told = set()
    first = next((number for number, epoch in enumerate(history) if epoch["epoch"] not in told), len(history))
    return list(history[first:])


def _tell(tracker: Tracker, history: Sequence[dict]) -> None:
    for epoch in history:
        tracker.log(epoch["epoch"], {name: value for name, value in epoch.items() if name != "epoch"})


def _teachers(data: Dataset, model: Estimator, quick: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """Training and validation rows this model can read; at least one of each."""
    usable = data.usable(model.lookback)
    parts = {name: rows[usable[rows]] for name, rows in data.splits.items()}
    for name, rows in parts.items():
        if not len(rows):
            raise FactoryError(
                f"No {name} row has a full input window", where=model.name, got=f"a look-back of {model.lookback} rows",
                wanted="sessions longer than that", next_step="use a shorter lookback, or more bars",
            )  # fmt: skip
    train, limited = limit_rows(parts["train"], quick)
    return train, parts["validation"], limited


class _RecordFirst(Kept):
    """Checkpoints that are never ahead of the log: what was logged is closed and copied before each save.

    An epoch is saved before it is told, so a run killed between the two tells it first when it goes on.
    """

    def __init__(self, checkpoints: PhaseCheckpoints, here: Mapping, tracker: Tracker):
        super().__init__(checkpoints, here, reached_by_fit)
        self._tracker = tracker

    def load(self) -> dict | None:
        found = super().load()
        if found is not None:
            history = history_of(found["state"])
            # The last one always: what an earlier attempt told of later ones is void from there on.
            _tell(self._tracker, _untold(self._tracker.folder, history) or history[-1:])
        return found

    def save(self, state: Mapping, metrics: Mapping | None = None, force: bool = False) -> dict | None:
        if not force and not self.due():
            return None
        self._tracker.close_segment()
        return super().save(state, metrics=metrics, force=force)


def _facts(
    data: Dataset, run: Run, spec: RunSpec, result: FitResult, inexact: list[str], limited: dict, seconds: float
) -> dict:
    limits = {name: value for name, value in dict(spec.settings).items() if name in ("epochs", "rounds")}
    return {
        "run_id": run.run_id,
        "symbol": data.symbol,
        "horizon": data.horizon,
        "model": spec.model,
        "data": data.fingerprint,
        "run": spec.to_dict(),
        "history": result.history,
        "best_epoch": result.best_epoch,
        "resumed_from": result.resumed_from,
        "exact": not inexact,
        "inexact": inexact,
        "limited": limited | limits if spec.quick else {},
        "seconds": seconds,
        "versions": library_versions(),
    }


def _bundle(data: Dataset, model: Estimator, temperature: Temperature, facts: dict) -> Bundle:
    """Nothing in it depends on the clock or on an interruption: the same run gives the same bytes."""
    kept = ("run_id", "symbol", "horizon", "model", "data")
    return Bundle(
        model_state=model.get_state(),
        scaler=data.scaler.to_dict(),
        feature_names=tuple(data.features.columns),
        spec=data.settings,
        temperature=temperature.to_dict(),
        lookback=model.lookback if model.lookback > 1 else 0,
        facts={name: facts[name] for name in kept},
    )
