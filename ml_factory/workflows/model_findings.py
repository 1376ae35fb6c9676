"""Findings on a finished model, from its predictions of training, validation and test rows."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.evaluation.findings import (
    PARTS,
    Finding,
    baseline_finding,
    calibration_finding,
    concentration_finding,
    few_rows_finding,
    overfit_finding,
    sort_findings,
    too_good_finding,
    trials_finding,
    unchecked_note,
)
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.workflows.dataset_evaluation import dataset_calibration_by_class, prepared_dataset_baselines
from ml_factory.workflows.prepared_dataset import PreparedDataset


def find_model_issues(
    data: PreparedDataset, verdict: ModelVerdict, predicted: Mapping[str, tuple[np.ndarray, np.ndarray]],
    months: pd.DataFrame, trials: int,
) -> tuple[Finding, ...]:  # fmt: skip
    """Return the findings on a model, the most severe first, and a note of what was not checked.

    predicted : "train", "validation", "test" -> positions and float64 (N, 3) probabilities.
    months : as of `gain_by_month`.
    trials : `count_trials` of this symbol.
    """
    train_rows, (rows, p_N3) = data.splits["train"], predicted["test"]
    gains = {part: _mean(_row_gains(data, train_rows, *predicted[part], "prior")) for part in ("train", "validation")}
    return sort_findings([
        baseline_finding(verdict), too_good_finding(verdict), few_rows_finding(verdict),
        overfit_finding(gains["train"], gains["validation"]), concentration_finding("month", months["gain"]),
        calibration_finding(dataset_calibration_by_class(data, rows, {verdict.model: p_N3})),
        trials_finding(verdict, trials),
        unchecked_note({
            "overfitting": "" if len(predicted["train"][0]) else "QUICK predicted no training row",
            "one month that carries the gain": "" if len(months) >= PARTS else f"the test rows are of {len(months)}",
        }),
    ])  # fmt: skip


def gain_by_month(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray, p_N3: np.ndarray, baseline: str
) -> pd.DataFrame:
    """Return rows and gain over a baseline, summed nats, by calendar month (UTC) of the unambiguous ones of `rows`.

    train_rows : those that the baseline is counted on.
    """
    gain_N = _row_gains(data, train_rows, rows, p_N3, baseline)
    months = data.labels.index[rows][data.unambiguous_mask[rows]].strftime("%Y-%m")
    return pd.Series(gain_N).groupby(np.asarray(months)).agg(rows="size", gain="sum").rename_axis("month")


def _row_gains(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray, p_N3: np.ndarray, baseline: str
) -> np.ndarray:
    """Return the gain over a baseline, counted on `train_rows`, of each unambiguous one of `rows`, in nats."""
    clear = data.unambiguous_mask[rows]
    other = prepared_dataset_baselines(data, train_rows, rows[clear])[baseline]
    return row_log_loss(data.y[rows[clear]], other) - row_log_loss(data.y[rows[clear]], p_N3[clear])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
