"""Train one model on the chronological split: fit, calibrate, register."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration, condition_on_classes, floored_log_probabilities
from ml_factory.evaluation.metrics import classification_metrics
from ml_factory.inference.predict import TrainedModel, installed_library_versions, times_of_splits
from ml_factory.models.base import ModelBase, ModelFitResult, merge_inexact_reasons
from ml_factory.models.importances import feature_importance_table
from ml_factory.models.registry import build_model, find_model_spec
from ml_factory.run_folder import RunFolder, open_run_checkpoints, run_machine_facts
from ml_factory.settings import QuickLimits, RunSettings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.weights import WeightSpec
from ml_factory.tracking.run_log import count_run_log_steps, is_log_complete
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_input_reader,
    dataset_rows_with_weight,
    limit_training_rows,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.runs.restore_run import open_run_tracker, restorable_snapshot
from ml_factory.workflows.unit_checkpoints import LoggedCheckpoints, fit_phase_name, history_log_steps

Callback = Callable[[int, dict], None]


def train_with_holdout(
    workspace: Workspace, data: PreparedDataset, run: RunFolder, spec: RunSettings, *, callbacks: Sequence[Callback],
    mirror: str, estimator: ModelBase | None = None,
) -> Artifact:  # fmt: skip
    """Train on the training rows, stop early and calibrate on validation rows, and register the bundle.

    estimator : the model to fit, as returned by `open_training`; None builds one.
    """
    started, training = time.perf_counter(), build_fit_inputs(data, spec)
    model, held_out, quick_limits = (
        check_given_estimator(training.model, estimator),
        training.held_out,
        training.quick_limits,
    )
    run.begin(spec)
    with (
        open_run_checkpoints(workspace.checkpoints, run) as manager,
        # Locked before the log is opened: a second process on this run is refused before it writes anything.
        manager.phase(fit_phase_name(spec.model)).acquired() as phase,
        open_run_tracker(run, spec.to_dict(), mirror, restorable_snapshot(manager, run)) as tracker,
    ):
        checkpoints = LoggedCheckpoints(phase, run_machine_facts(spec), tracker, model.trained_on)
        result = model.fit(
            *training.train, validation=held_out,
            callbacks=(tracker.log, *callbacks), checkpoints=checkpoints,
        )  # fmt: skip
        phase.wait_uploaded()
        p_N3 = condition_on_classes(model.predict_proba(held_out[0]), data.classes.values())
        calibration = Calibration.fit(floored_log_probabilities(p_N3), held_out[1], horizon=data.horizon)
        nondeterminism = merge_inexact_reasons(result.nondeterminism, checkpoints.machine_differences)
        facts = _facts(data, run, spec, result, nondeterminism, quick_limits, time.perf_counter() - started)
        # Calibrated, each row once; epoch and calibration were chosen on these rows, so test rows will be worse.
        facts["validation"] = dict(classification_metrics(held_out[1], calibration.apply(p_N3)))
        # On validation rows: test rows are for the verdict alone.
        worth = (
            feature_importance_table(model, data.features.columns, *held_out).reset_index()
            if model.lookback <= 1
            else None
        )
        facts["importances"] = [] if worth is None else worth.to_dict("records")
        bundle = _bundle(data, model, calibration, facts)
        made_from = {"run": run.run_id, "data": data.fingerprint}
        registry = ArtifactRegistry(workspace.models)
        artifact = registry.register(data.symbol, "model", spec.model, bundle.to_state(), facts, made_from)
        tracker.finish(training_log_summary(artifact), artifact=artifact)
        phase.remove_files()
        run.end()
    return artifact


@dataclass(frozen=True)
class _TrainingData:
    """An untrained model and its data: (inputs, labels, weights) of the training rows and of the held-out rows."""

    model: ModelBase
    train: tuple
    held_out: tuple
    quick_limits: dict


def build_fit_inputs(data: PreparedDataset, spec: RunSettings) -> _TrainingData:
    """Return the model and the rows of a run's settings; equal in every process of the training."""
    model, train, validation, quick_limits = build_untrained_model(data, spec)
    weights = WeightSpec(**dict(spec.settings).get("weights", {}))
    take = dataset_input_reader(data, data.scaler, model)
    (train, w_train), (validation, w_validation) = (
        dataset_rows_with_weight(data, train, weights),
        dataset_rows_with_weight(data, validation),
    )
    held_out = (take(validation), data.y[validation], w_validation)
    return _TrainingData(model, (take(train), data.y[train], w_train), held_out, quick_limits)


def build_untrained_model(data: PreparedDataset, spec: RunSettings) -> tuple[ModelBase, np.ndarray, np.ndarray, dict]:
    """Build an unfitted model by a run's settings; return it, its training rows, its validation rows, and limits of
    QUICK.

    Raises SettingsError for settings it does not take, FactoryError where no row has a full window.
    """
    settings = {name: value for name, value in spec.settings if name != "weights"}
    model = build_model(spec.model, seed=spec.seed, **resolve_dataset_settings(data, settings))
    model.trained_on = {"symbol": data.symbol, "horizon": data.horizon, "features": list(data.features.columns)}
    return model, *_train_validation_rows(data, model, spec.quick)


def check_given_estimator(wanted: ModelBase, given: ModelBase | None) -> ModelBase:
    """Return the given model if it equals the one that the run trains; the wanted one without any.

    Settings of the machine (threads, device, accumulate) do not identify a run and are not in the checkpoint of an
    unfinished one, so a model that was loaded from there gets those of the run.

    Raises SettingsError where name, settings, network or rows differ.
    """
    compared = ("name", "settings", "network_spec", "trained_on", "lookback", "offset_column", "offset_bars")
    for what in compared:
        expected, actual = (_comparable_value(model, what) for model in (wanted, given))
        if given is not None and expected != actual:
            shown = ("other rows", "those of this run") if what == "trained_on" else (actual, expected)
            raise SettingsError(
                "Not the model that the run trains", where=f"estimator.{what}", got=shown[0],
                wanted=shown[1], next_step="take the model that pipeline.open_training gives for the same arguments",
            )  # fmt: skip
    if given is None:
        return wanted
    given.settings = wanted.settings
    return given


def _comparable_value(model: ModelBase | None, what: str) -> object:
    value = getattr(model, what, None)
    return value.identity() if what == "settings" and value is not None else value


def complete_train_log(
    workspace: Workspace, run: RunFolder, spec: RunSettings, artifact: Artifact, *, mirror: str
) -> None:
    """Complete the log of a run whose artifact exists, after a kill or a late upload between the two.

    Once the artifact is persisted, the run's checkpoints are deleted.
    """
    history = history_log_steps(artifact.facts.get("history", ()))
    log = run.folder / "log"
    if not is_log_complete(log) or count_run_log_steps([step for step, _ in history], log) < len(history):
        with open_run_tracker(run, spec.to_dict(), mirror) as tracker:
            tracker.log_missing(history)
            tracker.finish(training_log_summary(artifact), artifact=artifact)
    if not run.ended:
        if spec.task == "train":
            with (
                suppress(CheckpointError),  # the process that works on it releases them
                open_run_checkpoints(workspace.checkpoints, run) as manager,
                manager.phase(fit_phase_name(spec.model)).acquired() as phase,
            ):
                phase.remove_files()
        run.end()


def training_log_summary(artifact: Artifact) -> dict:
    """Return the summary of the run's log."""
    facts = artifact.facts
    metrics = {f"validation_{name}": value for name, value in facts.get("validation", {}).items()}
    return {"artifact": artifact.hash, "best_epoch": facts.get("best_epoch"), **metrics}


def _train_validation_rows(data: PreparedDataset, model: ModelBase, quick: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """Return the training and validation rows this model can read, at least one of each, and limits of QUICK."""
    usable = data.full_window_mask(model.lookback)
    parts = {name: rows[usable[rows]] for name, rows in data.splits.items()}
    for name, rows in parts.items():
        if not len(rows):
            raise FactoryError(
                f"No {name} row has a full input window", where=model.name, got=f"a look-back of {model.lookback} rows",
                wanted="sessions longer than that", next_step="use a shorter lookback, or more bars",
            )  # fmt: skip
    limit = quick_row_limit(model.name, quick)
    train, quick_limits = limit_training_rows(parts["train"], limit)
    held_out, fewer = limit_training_rows(parts["validation"], limit)
    for number in fewer.values():
        quick_limits["validation rows of stopping and calibration"] = number
    return train, held_out, quick_limits


def _facts(
    data: PreparedDataset,
    run: RunFolder,
    spec: RunSettings,
    result: ModelFitResult,
    nondeterminism: list[str],
    quick_limits: dict,
    seconds: float,
) -> dict:
    # Limits that the user's own settings equal are QUICK's only where the values agree.
    expected = QuickLimits().settings_for(find_model_spec(spec.model).family)
    limits = {name: value for name, value in dict(spec.settings).items() if expected.get(name) == value}
    return {
        "run_id": run.run_id,
        "symbol": data.symbol,
        "horizon": data.horizon,
        "model": spec.model,
        "data": data.fingerprint,
        "run": spec.to_dict(),
        "split_times": times_of_splits(data.labels.index, data.splits),
        "history": result.history,
        "best_epoch": result.best_epoch,
        "resumed_from": result.resumed_from,
        "machine": result.machine | {"compiles": result.compiles} if result.machine else {},
        "exact": not nondeterminism,
        "inexact": nondeterminism,
        "limited": quick_limits | limits if spec.quick else {},
        "seconds": seconds,
        "versions": installed_library_versions(),
    }


def _bundle(data: PreparedDataset, model: ModelBase, calibration: Calibration, facts: dict) -> TrainedModel:
    """Build the bundle, independent of the clock and of interruptions: the same run gives the same bytes."""
    kept = ("run_id", "symbol", "horizon", "model", "data")
    return TrainedModel(
        model_state=model.get_state(),
        scaler=data.scaler.to_dict(),
        feature_names=tuple(data.features.columns),
        spec=data.settings,
        calibration=calibration.to_dict(),
        lookback=model.lookback if model.lookback > 1 else 0,
        facts={name: facts[name] for name in kept},
    )
