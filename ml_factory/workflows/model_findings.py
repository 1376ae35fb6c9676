"""Findings on a finished model, from its predictions of training, validation and test rows."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.evaluation.findings import (
    Finding,
    baseline_finding,
    calibration_finding,
    drift_finding,
    few_rows_finding,
    month_finding,
    overfit_finding,
    sort_findings,
    too_good_finding,
    trials_finding,
)
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.evaluation.verdict import NOT_ENOUGH, ModelVerdict
from ml_factory.workflows.dataset_evaluation import prepared_dataset_baselines
from ml_factory.workflows.prepared_dataset import PreparedDataset


def find_model_issues(
    data: PreparedDataset, verdict: ModelVerdict, metrics: pd.DataFrame,
    predicted: Mapping[str, tuple[np.ndarray, np.ndarray]], trials: int,
) -> tuple[Finding, ...]:  # fmt: skip
    """Return the findings on a model, the most severe first.

    metrics : of the test rows, index the name of the forecast.
    predicted : "train", "validation", "test" -> positions and float64 (N, 3) probabilities.
    trials : finished runs on this symbol.
    """
    train_rows = data.splits["train"]
    gains = {part: _row_gains(data, train_rows, *predicted[part], "prior") for part in ("train", "validation")}
    rows, p_N3 = predicted["test"]
    clear, enough = data.unambiguous_mask[rows], verdict.status != NOT_ENOUGH
    gain_N = _row_gains(data, train_rows, rows, p_N3, verdict.best_baseline)
    return sort_findings([
        baseline_finding(verdict), too_good_finding(verdict), few_rows_finding(verdict),
        overfit_finding(*(_mean(gains[part]) for part in ("train", "validation"))),
        month_finding(gain_N, data.labels.index[rows][clear]),
        calibration_finding(float(metrics.loc[verdict.model, "ece_debiased"])),
        # A few weeks are another regime for slow features in any case.
        drift_finding(data.x_NF[data.row[train_rows]], data.x_NF[data.row[rows]], list(data.features.columns))
        if enough else None,
        trials_finding(verdict, trials),
    ])  # fmt: skip


def _row_gains(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray, p_N3: np.ndarray, baseline: str
) -> np.ndarray:
    """Return the gain over a baseline, counted on `train_rows`, of each unambiguous one of `rows`, in nats."""
    clear = data.unambiguous_mask[rows]
    other = prepared_dataset_baselines(data, train_rows, rows[clear])[baseline]
    return row_log_loss(data.y[rows[clear]], other) - row_log_loss(data.y[rows[clear]], p_N3[clear])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
