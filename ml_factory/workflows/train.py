"""`train`: fit one model on the chronological split, calibrate, register and evaluate it."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.datasets.preprocessing import FittedStep
from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration, condition_on_classes, floored_log_probabilities
from ml_factory.evaluation.metrics import classification_metrics
from ml_factory.features.custom import own_features_line
from ml_factory.inference.predict import TrainedModel, times_of_splits
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import ModelBase, ModelFitResult, installed_library_versions, merge_inexact_reasons
from ml_factory.models.registry import build_model, check_registered_model_settings, find_model_spec
from ml_factory.models.tabular import feature_importance_table
from ml_factory.process_identity import process_rank
from ml_factory.result import Result
from ml_factory.runs import (
    FitCheckpoints,
    Run,
    RunOptions,
    history_log_steps,
    newest_run_folder,
    open_run,
    open_run_checkpoints,
)
from ml_factory.settings import QuickLimits, RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.tracking.run_log import count_run_log_steps, is_log_complete
from ml_factory.workflows import report
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.prepared_dataset import (
    InputReader,
    PreparedDataset,
    dataset_input_reader,
    dataset_rows_with_weight,
    limit_training_rows,
    load_certified_dataset,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.train_ranks import broadcast_fit_decision, worker_rank

Callback = Callable[[int, dict], None]
plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def train(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *, callbacks: Sequence[Callback] = (),
    model_settings: Mapping | None = None, estimator: ModelBase | None = None, **options: Any,
) -> Result | None:  # fmt: skip
    """Train one model on the training rows, stop early and calibrate on validation rows, evaluate on test rows.

    A finished run is found and loaded; an unfinished one resumes from its last checkpoint.

    callbacks : each is called (epoch, metrics) after every epoch or booster block, and with the model as third argument
        where it takes one.
    model_settings : settings of the model by name.
    estimator : the model that `open_training` returned for the same arguments. It is the one that is fitted, so that a
        callback may read its state, and it holds the finished model afterwards.
    options : fields of `RunOptions`: seed, quick, fresh, run, source, mirror, uncertified, on_status.

    The result has the facts of `report.model_result`, and

    history : a row per epoch or booster block: epoch, train_loss, val_loss, seconds; best_epoch is the final model's.
    importances : of trees and the linear model, `feature_importance_table`.
    ran_on : device, memory and speed of a network's training, in the session that ended it; empty for a booster.

    Of several processes that torchrun started rank 0 does all of this; the others take part in a network's fit, write
    nothing and return None.  Raises SettingsError, NotPreparedError, FactoryError.
    """
    started = time.perf_counter()
    trained = train_or_load(
        workspace, symbol, horizon, model, callbacks, model_settings, estimator, RunOptions.of(options)
    )
    return None if trained is None else trained.reported(started)


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training: its run, data and artifact; found: its status in a sentence; reused: finished before."""

    run: Run
    data: PreparedDataset
    artifact: Artifact
    found: str
    reused: bool

    def reported(self, started: float) -> Result:
        """Evaluate it, write its report, and return the result of `train`, which began at `started`."""
        data, artifact, facts = self.data, self.artifact, self.artifact.facts
        model, history = facts["model"], pd.DataFrame(facts["history"])
        evaluated = evaluate_artifacts(self.run.workspace, data, {model: artifact})
        begun = f"resumed after {facts['reached']}" if facts["reached"] else "trained from the start"
        how = "was finished before; loaded" if self.reused else begun
        return report.model_result(
            self.run, data, artifact, evaluated, started, f"{model} on {data.symbol}, horizon {data.horizon}: {how}",
            found=self.found, reused=self.reused,
            figure=lambda: plots.plot_learning_curves(
                history, best_epoch=facts["best_epoch"], resumed_from=facts["resumed_from"],
                prior=evaluated.prior_loss,
            ),
            also={"history": history, "ran_on": _ran_on(facts["machine"])}, model=model,
            best_epoch=facts["best_epoch"], artifact_hash=artifact.hash, machine=facts["machine"],
            importances=pd.DataFrame(facts["importances"]) if facts["importances"] else None,
        )  # fmt: skip


def train_or_load(
    workspace: Workspace, symbol: str, horizon: int, model: str, callbacks: Sequence[Callback],
    model_settings: Mapping | None, estimator: ModelBase | None, options: RunOptions,
) -> FinishedTraining | None:  # fmt: skip
    """Train, resume or load as `train`, and write no report; None in a further process of torchrun."""
    data, spec = _load_training(workspace, symbol, horizon, model, model_settings, options)
    if process_rank():
        _fit_in_further_rank(data, spec)
        return None
    with open_run(workspace, spec, options) as run:
        artifact = run.artifact()
        reused = artifact is not None
        if not reused:
            build_untrained_model(data, spec)  # a refusal is not announced as a start
        found = run.status(finished=reused)
        options.on_status(found)
        broadcast_fit_decision(spec, fitting=not reused)
        if artifact is None:
            artifact = train_with_holdout(data, run, callbacks=callbacks, mirror=options.mirror, estimator=estimator)
        else:
            complete_log(run, artifact, options.mirror)
            if estimator is not None:
                given = check_given_estimator(build_untrained_model(data, spec)[0], estimator)
                given.load_state(artifact.load_state()["model_state"])
    return FinishedTraining(run, data, artifact, found, reused)


def open_training(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *,
    model_settings: Mapping | None = None, **options: Any,
) -> tuple[ModelBase, CheckpointManager]:  # fmt: skip
    """Return the model that `train` fits with these arguments, not fitted yet, and the checkpoints of its run.

    Pass the model to `train(..., estimator=model)`. `load_latest_checkpoint(phase=f"train_{name}")` of the manager
    finds the newest checkpoint of this training. States of `save_checkpoint`, also from a callback, are files of their
    own and never change the resumed state; choose another phase name for them, since under the training's it is the
    training's newest that is loaded. When the training has ended and its model is registered, its own checkpoints are
    deleted.
    """
    workspace = Workspace(workspace)
    chosen = RunOptions.of(options, unused=("run", "source", "mirror", "on_status"))
    data, spec = _load_training(workspace, symbol, horizon, model, model_settings, chosen)
    run = newest_run_folder(workspace.results / symbol, spec.run_id, chosen.fresh)
    return build_untrained_model(data, spec)[0], open_run_checkpoints(workspace, run, during_training=True)


def _load_training(
    workspace: Workspace, symbol: str, horizon: int, model: str, model_settings: Mapping | None, options: RunOptions
) -> tuple[PreparedDataset, RunSettings]:  # fmt: skip
    """Return the certified data and the run settings of a training."""
    check_horizon(horizon)  # before the model: the two are easily swapped
    settings = check_registered_model_settings(model, model_settings)
    data = load_data_of_run(workspace, symbol, horizon, options)
    spec = make_run_settings(
        symbol, horizon, model, task="train", seed=options.seed, quick=options.quick, data=data.fingerprint,
        settings=settings,
    )  # fmt: skip
    return data, spec


def load_data_of_run(workspace: Workspace, symbol: str, horizon: int, options: RunOptions) -> PreparedDataset:
    """Load certified data, and report in one line which of its features are not built-in."""
    data = load_certified_dataset(workspace, symbol, horizon, options.uncertified)
    if names := data.settings["data"]["features"]["custom"]:
        options.on_status(own_features_line(names))
    return data


# ---- the fit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitOnRows:
    """A fit on some rows of a data set: its result and calibration, how inputs are read, and what was held out.

    take : positions into the labels -> inputs of the model.
    held_out : inputs, labels and weights of the rows of early stopping and calibration.
    p_N3 : uncalibrated probabilities of the held-out rows.
    """

    result: ModelFitResult
    calibration: Calibration
    take: InputReader
    held_out: tuple
    p_N3: np.ndarray


def fit_on_rows(
    data: PreparedDataset, model: ModelBase, train: np.ndarray, held_out: np.ndarray,
    scaler: Callable[[np.ndarray], FittedStep], *, observe: Callable[[dict], object] | None = None, **options: Any,
) -> FitOnRows:  # fmt: skip
    """Fit the model on training rows, and stop it early and calibrate it on held-out rows, all of positive weight.

    train, held_out : positions into the labels.
    scaler : from the training rows of positive weight to the preprocessing.
    observe : called before the fit with what the model is given, by name: train (rows of positive weight), scaler,
        inputs_train (a copy), y.
    options : callbacks and checkpoints, as of `ModelBase.fit`.
    """
    rows, fitted, take, learnt, validation = fit_inputs(data, model, train, held_out, scaler)
    if observe is not None:
        observe({"train": rows, "scaler": fitted, "inputs_train": np.array(learnt[0]), "y": learnt[1]})
    result = model.fit(*learnt, validation=validation, **options)
    p_N3 = condition_on_classes(model.predict_proba(validation[0]), data.classes.values())
    calibration = Calibration.fit(floored_log_probabilities(p_N3), validation[1], horizon=data.horizon)
    return FitOnRows(result, calibration, take, validation, p_N3)


def fit_inputs(
    data: PreparedDataset, model: ModelBase, train: np.ndarray, held_out: np.ndarray,
    scaler: Callable[[np.ndarray], FittedStep],
) -> tuple[np.ndarray, FittedStep, InputReader, tuple, tuple]:  # fmt: skip
    """Return the training rows of positive weight, the preprocessing, the reader of inputs, and (inputs, labels,
    weights) of these rows and of the held-out rows.
    """
    (train, w_train), (held_out, w_held) = (
        dataset_rows_with_weight(data, train),
        dataset_rows_with_weight(data, held_out),
    )
    fitted = scaler(train)
    take = dataset_input_reader(data, fitted, model)
    return train, fitted, take, (take(train), data.y[train], w_train), (take(held_out), data.y[held_out], w_held)


def train_with_holdout(
    data: PreparedDataset, run: Run, *, callbacks: Sequence[Callback] = (), mirror: str = "off",
    estimator: ModelBase | None = None,
) -> Artifact:  # fmt: skip
    """Train on the training rows, stop early and calibrate on validation rows, and register the model.

    estimator : the model to fit, as returned by `open_training`; None builds one.
    """
    started, spec = time.perf_counter(), run.settings
    model, train_rows, validation, quick_limits = build_untrained_model(data, spec)
    model = check_given_estimator(model, estimator)
    run.begin()
    # Locked before the log is opened: a second process on this run is refused before it writes anything.
    with run.phase.acquired() as phase, run.log(mirror) as tracker:
        checkpoints = FitCheckpoints(phase, run.machine, tracker, model.trained_on)
        fitted = fit_on_rows(
            data, model, train_rows, validation, lambda rows: data.scaler,
            callbacks=(tracker.log, *callbacks), checkpoints=checkpoints,
        )  # fmt: skip
        phase.wait_uploaded()
        inexact = merge_inexact_reasons(fitted.result.nondeterminism, checkpoints.machine_differences)
        facts = _facts(data, run, fitted.result, inexact, quick_limits) | {"seconds": time.perf_counter() - started}
        # Calibrated, each row once; epoch and calibration were chosen on these rows, so test rows will be worse.
        held_out = fitted.held_out
        facts["validation"] = dict(classification_metrics(held_out[1], fitted.calibration.apply(fitted.p_N3)))
        # On validation rows: test rows are for the verdict alone.
        tabular = model.lookback <= 1
        facts["importances"] = (
            feature_importance_table(model, data.features.columns, *held_out).reset_index().to_dict("records")
            if tabular else []
        )  # fmt: skip
        # Independent of the clock and of interruptions: the same run gives the same bytes.
        made = TrainedModel(
            model_state=model.get_state(), scaler=data.scaler.to_dict(), feature_names=tuple(data.features.columns),
            spec=data.settings, calibration=fitted.calibration.to_dict(), lookback=0 if tabular else model.lookback,
            facts={name: facts[name] for name in ("run_id", "symbol", "horizon", "model", "data")},
        )  # fmt: skip
        artifact = ArtifactRegistry(run.workspace.models).register(
            data.symbol, "model", spec.model, made.to_state(), facts, {"run": run.run_id, "data": data.fingerprint}
        )
        tracker.finish(log_summary(artifact), artifact=artifact)
        phase.remove_files()
        run.end()
    return artifact


def _facts(
    data: PreparedDataset, run: Run, result: ModelFitResult, inexact: list[str], quick_limits: dict
) -> dict[str, Any]:
    spec = run.settings
    unit = "epoch" if find_model_spec(spec.model).windowed else "block"
    limits = settings_limited_by_quick(spec.model, dict(spec.settings))
    return run_facts(data, run) | {
        "history": result.history, "best_epoch": result.best_epoch, "resumed_from": result.resumed_from,
        "reached": "" if result.resumed_from is None else f"{unit} {result.resumed_from}",
        "machine": result.machine | {"compiles": result.compiles} if result.machine else {},
        "exact": not inexact, "inexact": inexact, "limited": quick_limits | limits if spec.quick else {},
    }  # fmt: skip


def settings_limited_by_quick(model: str, settings: Mapping) -> dict:
    """Return those of a model's settings that have the values of QUICK; a user's own value is no limit of QUICK."""
    limits = QuickLimits().settings_for(find_model_spec(model).family)
    return {name: value for name, value in settings.items() if limits.get(name) == value}


def run_facts(data: PreparedDataset, run: Run) -> dict[str, Any]:
    """Return the facts of an artifact about its run and its data."""
    return {
        "run_id": run.run_id, "symbol": data.symbol, "horizon": data.horizon, "model": run.settings.model,
        "data": data.fingerprint, "run": run.settings.to_dict(),
        "split_times": times_of_splits(data.labels.index, data.splits), "versions": installed_library_versions(),
    }  # fmt: skip


def build_untrained_model(data: PreparedDataset, spec: RunSettings) -> tuple[ModelBase, np.ndarray, np.ndarray, dict]:
    """Build an unfitted model by a run's settings; return it, its training rows, its validation rows, and limits of
    QUICK; equal in every process of the training.

    Raises SettingsError for settings it does not take, FactoryError where no row of a split has a full window.
    """
    model = build_model(spec.model, seed=spec.seed, **resolve_dataset_settings(data, dict(spec.settings)))
    model.trained_on = {"symbol": data.symbol, "horizon": data.horizon, "features": list(data.features.columns)}
    usable = data.full_window_mask(model.lookback)
    parts = {name: rows[usable[rows]] for name, rows in data.splits.items()}
    for name, rows in parts.items():
        if not len(rows):
            raise FactoryError(
                f"No {name} row has a full input window", where=model.name, got=f"a look-back of {model.lookback} rows",
                wanted="sessions longer than that", next_step="use a shorter lookback, or more bars",
            )  # fmt: skip
    limit = quick_row_limit(model.name, spec.quick)
    train_rows, quick_limits = limit_training_rows(parts["train"], limit)
    held_out, fewer = limit_training_rows(parts["validation"], limit)
    for number in fewer.values():
        quick_limits["validation rows of stopping and calibration"] = number
    return model, train_rows, held_out, quick_limits


def _fit_in_further_rank(data: PreparedDataset, spec: RunSettings) -> None:
    """Take part in the fit of rank 0, if there is one, and keep nothing of it."""
    if broadcast_fit_decision(spec):
        model, train_rows, held_out, _ = build_untrained_model(data, spec)
        *_, learnt, validation = fit_inputs(data, model, train_rows, held_out, lambda rows: data.scaler)
        with worker_rank():
            model.fit(*learnt, validation=validation)


def check_given_estimator(wanted: ModelBase, given: ModelBase | None) -> ModelBase:
    """Return the given model if it equals the one that the run trains; the wanted one without any.

    Settings of the machine (threads, device, accumulate) do not identify a run and are not in the checkpoint of an
    unfinished one, so a model that was loaded from there gets those of the run.

    Raises SettingsError where name, settings, network or rows differ.
    """
    if given is None:
        return wanted
    for what in ("name", "settings", "network_spec", "trained_on"):
        expected, actual = (getattr(model, what, None) for model in (wanted, given))
        if what == "settings":
            expected, actual = (value and value.identity() for value in (expected, actual))
        if expected != actual:
            shown = ("other rows", "those of this run") if what == "trained_on" else (actual, expected)
            raise SettingsError(
                "Not the model that the run trains", where=f"estimator.{what}", got=shown[0],
                wanted=shown[1], next_step="take the model that pipeline.open_training gives for the same arguments",
            )  # fmt: skip
    given.settings = wanted.settings
    return given


# ---- the log and the result ----------------------------------------------------------------------------------------


def complete_log(run: Run, artifact: Artifact, mirror: str) -> None:
    """Complete the log of a run whose artifact exists, after a kill or a late upload between the two.

    Once the artifact is persisted, the run's checkpoints are deleted.
    """
    history, log = history_log_steps(artifact.facts.get("history", ())), run.folder / "log"
    if not is_log_complete(log) or count_run_log_steps([step for step, _ in history], log) < len(history):
        with run.log(mirror, resumable=False) as tracker:
            tracker.log_missing(history)
            tracker.finish(log_summary(artifact), artifact=artifact)
    if not run.ended:
        with suppress(CheckpointError), run.phase.acquired() as phase:  # the process that works on it releases them
            phase.remove_files()
        run.end()


def log_summary(artifact: Artifact) -> dict:
    """Return the summary of the run's log."""
    facts = artifact.facts
    metrics = {f"validation_{name}": value for name, value in facts.get("validation", {}).items()}
    return {"artifact": artifact.hash, "best_epoch": facts.get("best_epoch"), **metrics}


def _ran_on(machine: Mapping[str, Any]) -> pd.DataFrame:
    """Return device, memory and speed of a network's training; empty for a booster."""
    peak, compiles = machine.get("peak_bytes"), machine.get("compiles")
    shown = {
        "device": machine.get("device"),
        "threads of the host": machine.get("threads"),
        "precision of the steps": machine.get("precision"),
        "parameters": f"{machine.get('parameters', 0):,}",
        "peak memory": f"{peak / 1e6:,.0f} MB" if peak else "unknown",
        "compiles": ", ".join(f"{name} {count}" for name, count in (compiles or {}).items()) or "none",
        "samples a second": f"{machine.get('rows_per_second', 0):,.0f}, validation included",
    }
    return pd.DataFrame({"value": shown if machine else {}}, dtype=object).rename_axis("training")
