"""Cross-validation of a model on purged folds of the prepared labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ml_factory.errors import SettingsError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan
from ml_factory.workflows.cross_validation.fold_scores import (
    UNCALIBRATED,
    fold_score_mean_gain,
    fold_score_table,
    labels_of_scored_folds,
    path_score_table,
    score_folds,
    verdict_of_fold_scores,
)
from ml_factory.workflows.cross_validation.folds import FoldModel, fit_and_forecast_folds_or_raise
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.runs.restore_run import restorable_snapshot, tracked_run
from ml_factory.workflows.unit_checkpoints import fold_forecasts_path, folds_phase_name


@dataclass(frozen=True)
class _CrossValidationScores:
    """Scores of a cross-validation.

    scores : DataFrame, a row per fold, block and forecast.
    table : DataFrame, a row per fold.
    paths : DataFrame of the paths of combinatorial folds; None otherwise.
    gain, gain_se : mean gain over the blocks and its standard error, nats per row.
    gain_uncalibrated : the mean without calibration.
    unfitted : numbers of folds without forecasts.
    resumed, progress, nondeterminism : as of `FoldOutcome`.
    verdict : over the blocks, as of `verdict_of_fold_scores`.
    """

    scores: pd.DataFrame
    table: pd.DataFrame
    paths: pd.DataFrame | None
    gain: float
    gain_se: float
    gain_uncalibrated: float
    unfitted: list[int]
    resumed: int
    progress: str
    nondeterminism: tuple[str, ...]
    verdict: ModelVerdict


def fit_and_score_folds(
    workspace: Workspace, data: PreparedDataset, plan: FoldPlan, run: RunFolder, model: FoldModel, *, mirror: str
) -> _CrossValidationScores:
    """Fit and evaluate every fold. Raises FactoryError when no fold has training rows of two classes."""
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        snapshot, owned = restorable_snapshot(manager, run), folds_phase_name(model.spec.model)
        with tracked_run(manager, run, model.spec.to_dict(), snapshot, mirror, owned=owned) as finish:
            results_path = fold_forecasts_path(run, model.name)
            outcome = fit_and_forecast_folds_or_raise(manager, data, plan, model, results_path)
            evaluated = score_folds(data, outcome, model.name)
            scores = fold_score_table(data, evaluated)
            gain, gain_se = fold_score_mean_gain(scores, model.name)
            finish({"gain_mean": gain, "gain_se": gain_se})
    return _CrossValidationScores(
        scores, plan.table().assign(**_fold_calibration_columns(outcome.calibrations)),
        path_score_table(data, plan, evaluated), gain=gain, gain_se=gain_se,
        gain_uncalibrated=fold_score_mean_gain(scores, model.name + UNCALIBRATED)[0],
        unfitted=outcome.unfitted_folds, resumed=outcome.resumed, progress=outcome.progress,
        nondeterminism=outcome.nondeterminism,
        verdict=verdict_of_fold_scores(data, scores, model.name, labels_of_scored_folds(data, evaluated)),
    )  # fmt: skip


def check_cross_validation_labels(data: PreparedDataset) -> None:
    """Raise SettingsError for labels whose barriers were searched on rows that some fold tests.

    A search sees the training rows of the chronological split, and every fold tests some of these.
    """
    for found in data.settings["data"].get("searched", ()):
        if found["labels"]["horizon"] == data.horizon:
            seen = found["seen_rows"]
            raise SettingsError(
                "The barriers of these labels were searched on rows that the folds test", where="search",
                got=f"barriers that saw {seen['count']:,} rows, {seen['first']} to {seen['last']}",
                wanted="barriers that no search chose",
                next_step="run prepare without searched= (--searched, --search)",
            )  # fmt: skip


def _fold_calibration_columns(calibrations: Sequence[Calibration]) -> dict[str, list[float]]:
    """Return columns of the fold table: temperature, and bias of the neutral class."""
    return {
        "temperature": [one.temperature for one in calibrations],
        "bias_neutral": [one.bias[1] for one in calibrations],
    }
