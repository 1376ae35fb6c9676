"""Fit a model on every fold, with checkpoints: finished folds are not fitted again after a kill."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.datasets.preprocessing import FittedStep
from ml_factory.ensemble.out_of_fold import OutOfFoldFit, merge_out_of_fold_forecasts, out_of_fold_forecasts
from ml_factory.errors import CheckpointError, FactoryError, FileError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.models.base import ModelBase
from ml_factory.models.registry import build_model
from ml_factory.run_folder import run_machine_facts
from ml_factory.seeding import derive_seed
from ml_factory.settings import RunSettings
from ml_factory.storage.files import files
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.targets.weights import WeightSpec
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_input_reader,
    dataset_sample_weights,
    fit_dataset_preprocessing,
    resolve_dataset_settings,
)
from ml_factory.workflows.unit_checkpoints import FoldCheckpoints, format_fold_progress


@dataclass(frozen=True)
class FoldOutcome:
    """Forecasts of the folds of `plan`.

    forecasts : for each fold float64 (test rows, 3), NaN where none, uncalibrated.
    calibrations : of each fold, fitted on training rows of the fold.
    resumed : number of folds that an earlier session had finished.
    nondeterminism : reasons why a fold may differ in its last bits; empty when it is exact.
    partial_progress : progress of the interrupted fit after those folds; "" where it starts now.
    """

    plan: FoldPlan
    forecasts: list[np.ndarray]
    calibrations: list[Calibration]
    resumed: int
    nondeterminism: tuple[str, ...]
    partial_progress: str = ""

    @property
    def progress(self) -> str:
        """Progress of the earlier sessions; "" where all folds were fitted now."""
        return format_fold_progress(
            f"fold {self.resumed} of {len(self.plan.folds)}" if self.resumed else "", self.partial_progress
        )

    @property
    def p_N3(self) -> np.ndarray:
        """Probabilities of the plan's rows, float64 (N, 3), NaN where none; for schemes that test each row once."""
        return merge_out_of_fold_forecasts(len(self.plan.rows), self.plan.folds, self.forecasts)

    @property
    def unfitted_folds(self) -> list[int]:
        """Numbers of folds without forecasts, since their training rows hold one class."""
        return [number for number, p in enumerate(self.forecasts) if not np.isfinite(p).any()]


@dataclass(frozen=True)
class FoldModel:
    """The model that every fold fits, with the settings that all fits share.

    spec : the run; the seed of each fold is derived from its seed.
    name : name in the registry; a stack has several models.
    settings : the model's own settings.
    weights : sample weights of the training rows.
    """

    spec: RunSettings
    name: str
    settings: Mapping
    weights: WeightSpec | None = None

    def build(self, data: PreparedDataset, fold: int) -> ModelBase:
        """Build an untrained model for this fold."""
        seed = derive_seed(self.spec.seed, self.name, "fold", fold)
        return build_model(self.name, seed=seed, **resolve_dataset_settings(data, self.settings))

    def fit_scaler(self, data: PreparedDataset, rows: np.ndarray) -> FittedStep:
        """Fit the preprocessing steps and the scaler on these rows of a fold: positions into the labels."""
        return fit_dataset_preprocessing(data, rows)


def fit_and_forecast_folds_or_raise(
    manager: CheckpointManager,
    data: PreparedDataset,
    plan: FoldPlan,
    model: FoldModel,
    results_path: Path | None = None,
) -> FoldOutcome:
    """Run `fit_and_forecast_folds`. Raises FactoryError when no fold has training rows of two classes."""
    outcome = fit_and_forecast_folds(manager, data, plan, model, results_path)
    if len(outcome.unfitted_folds) == len(plan.folds):
        raise FactoryError(
            "No fold has training rows of two classes",
            where=f"{len(plan.folds)} folds",
            got=f"one class in each fold, which {model.name} cannot learn from",
            next_step="prepare more bars, or set closer barriers: a smaller k_up, k_down",
        )
    return outcome


def fit_and_forecast_folds(
    manager: CheckpointManager,
    data: PreparedDataset,
    plan: FoldPlan,
    model: FoldModel,
    results_path: Path | None = None,
) -> FoldOutcome:
    """Fit the model once per fold and predict the fold's test rows. Scaler and weights too are fitted on the fold
    alone.

    results_path : file that keeps finished forecasts and is read instead of fitting again. The checkpoints
        are deleted then.
    """
    if results_path is not None and (found := _finished(results_path, plan)):
        return found
    reader = build_model(model.name, **resolve_dataset_settings(data, model.settings))
    checkpoints = FoldCheckpoints(manager, model.name, len(plan.folds), run_machine_facts(model.spec))

    def inputs(fit: np.ndarray):
        take = dataset_input_reader(data, model.fit_scaler(data, plan.rows[fit]), reader)
        return lambda positions: take(plan.rows[positions])

    fold_fit = OutOfFoldFit(
        plan.labels,
        lambda fold: model.build(data, fold),
        inputs,
        usable=plan.usable,
        weigh=lambda fit: dataset_sample_weights(data, plan.rows[fit], model.weights),
        fit_options=lambda fold: {"checkpoints": checkpoints.fold_fit_checkpoints(fold)},
        on_fold=checkpoints.record_nondeterminism,
        classes=tuple(data.classes.values()),
        horizon=data.horizon,
    )
    forecasts, calibrations = out_of_fold_forecasts(fold_fit, plan.folds, checkpoints.outer)
    elsewhere = checkpoints.outer.machine_differences
    if results_path is not None:
        write_state_file(
            results_path,
            {"p": forecasts, "calibrations": [one.to_dict() for one in calibrations], "elsewhere": elsewhere},
        )
    if results_path is not None and _finished(results_path, plan):  # read back: a mount may confirm a write and lose it
        checkpoints.release()
    return FoldOutcome(
        plan, forecasts, calibrations, checkpoints.resumed, tuple(elsewhere), checkpoints.partial_progress
    )


def _finished(results_path: Path, plan: FoldPlan) -> FoldOutcome | None:
    """Read the forecasts that an earlier run of these folds wrote; None where the file is missing, torn or
    incomplete.
    """
    try:
        state = read_state_file(results_path) if files.is_file(results_path) else {"p": []}
    except (FileError, CheckpointError):  # torn or damaged: made again
        return None
    forecasts = [np.array(p, dtype=np.float64) for p in state["p"]]
    if "calibrations" not in state or [p.shape for p in forecasts] != [(len(test), 3) for _, test in plan.folds]:
        return None
    calibrations = [Calibration.from_dict(one) for one in state["calibrations"]]
    return FoldOutcome(plan, forecasts, calibrations, len(forecasts), tuple(state["elsewhere"]))
