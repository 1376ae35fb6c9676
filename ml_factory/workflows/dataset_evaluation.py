"""Baselines, metrics, calibration and verdict of forecasts on rows of a prepared data set.

Everything fitted here (class prior, clock) sees the training rows that the caller names, and no other.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from ml_factory.evaluation.baselines import (
    BASELINES,
    ClockBaseline,
    last_move_baseline_probabilities,
    prior_baseline_probabilities,
)
from ml_factory.evaluation.calibration import calibration_by_class, condition_on_classes
from ml_factory.evaluation.intervals import gain_interval_by_class
from ml_factory.evaluation.metrics import compute_forecast_metrics, negative_log_probabilities, row_log_loss
from ml_factory.evaluation.verdict import ModelVerdict, describe_missing_classes, model_verdict, verdict_gains_of_rows
from ml_factory.targets.labels import expected_label_classes
from ml_factory.targets.weights import effective_sample_size
from ml_factory.workflows.prepared_dataset import PreparedDataset, dataset_rows_with_weight


def dataset_metrics_with_baselines(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray, forecasts: dict[str, np.ndarray], best: str
) -> pd.DataFrame:
    """Compute metrics of `forecasts` on `rows` and of the four baselines, all counted on `train_rows`.

    train_rows, rows : positions that every forecast can read, so that all forecasts have the same population.
    best : the best baseline, chosen by `best_baseline` on validation rows.
    """
    return prepared_dataset_metrics(data, rows, forecasts | prepared_dataset_baselines(data, train_rows, rows), best)


def dataset_best_baseline(data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray) -> str:
    """Return the name of the baseline, counted on `train_rows`, with the smallest log loss on the unambiguous ones of
    `rows`.

    rows : validation rows, or the early-stopping rows of a fold; never test rows. "prior" where all are ambiguous.
    """
    rows = rows[data.unambiguous_mask[rows]]
    if not len(rows):
        return BASELINES[0]
    losses = {
        name: row_log_loss(data.y[rows], p).mean()
        for name, p in prepared_dataset_baselines(data, train_rows, rows).items()
    }
    return min(losses, key=losses.get)


def prepared_dataset_verdict(
    data: PreparedDataset,
    train_rows: np.ndarray,
    rows: np.ndarray,
    name: str,
    p_N3: np.ndarray,
    best: str,
    lacking: str,
) -> ModelVerdict:
    """Compute the verdict on the forecasts `p_N3` of `rows`, each unambiguous row once.

    best : as of `dataset_metrics_with_baselines`.
    lacking : missing classes or weeks that rule out a verdict, as of `dataset_missing_classes`.
    """
    clear, times = data.unambiguous_mask[rows].astype(float), data.labels.index[rows]
    counted = prepared_dataset_baselines(data, train_rows, rows)
    gains = verdict_gains_of_rows(data.y[rows], p_N3, counted, clear, horizon=data.horizon, times_N=times)
    effective = effective_sample_size(data.labels.iloc[rows], clear)
    return model_verdict(
        name, gains, best, rows=int(clear.sum()), effective_rows=effective, kind=data.kind, lacking=lacking
    )


def dataset_missing_classes(data: PreparedDataset, parts: Mapping[str, np.ndarray]) -> str:
    """Describe the classes that no unambiguous row of a split has; "" for none.

    parts : "train", "validation", "test" -> positions.
    """
    labels = {name: data.y[rows[data.unambiguous_mask[rows]]] for name, rows in parts.items()}
    return describe_missing_classes(labels, expected_label_classes(data.kind))


def prepared_dataset_baselines(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute forecasts of the BASELINES for `rows`, counted on `train_rows`: name -> float64 (len(rows), 3).

    Rows count as in the metrics, each unambiguous row once. With training weights, under which long neutral labels
    count less, the prior was mostly worse than the uniform forecast (docs/log.md).
    """
    train_rows = train_rows[data.unambiguous_mask[train_rows]]
    y = data.y[train_rows]
    fitted = fit_dataset_clock_baseline(data, train_rows)
    found = {
        "prior": prior_baseline_probabilities(y, None, len(rows)),
        "last_move": last_move_baseline_probabilities(data.last_move[train_rows], y, data.last_move[rows]),
        "clock": fitted.predict(data.clock.take(rows)),
        "clock_volatility": fitted.predict(data.clock.take(rows), data.volatility[rows]),
    }
    return {name: condition_on_classes(p_N3, data.classes.values()) for name, p_N3 in found.items()}


def fit_dataset_clock_baseline(data: PreparedDataset, train_rows: np.ndarray) -> ClockBaseline:
    """Fit the clock baseline, with volatility, on the unambiguous ones of these rows, in time order."""
    rows = np.sort(train_rows[data.unambiguous_mask[train_rows]])
    minutes, bars = np.diff(data.labels.index[rows].as_unit("ns").asi8) / MINUTE_NS, np.diff(data.row[rows])
    bar_minutes = float(np.median(minutes / bars)) if len(rows) > 1 else 1.0
    return ClockBaseline.fit(
        data.clock.take(rows), data.y[rows], horizon=data.horizon, bar_minutes=bar_minutes,
        volatility=data.volatility[rows],
    )  # fmt: skip


def prepared_dataset_metrics(
    data: PreparedDataset, rows: np.ndarray, forecasts: dict[str, np.ndarray], best: str
) -> pd.DataFrame:
    """Compute metrics of each forecast on `rows`, each unambiguous row once.

    `effective_rows` is reduced by the overlap of the rows' labels.
    """
    clear = data.unambiguous_mask[rows].astype(float)
    effective = effective_sample_size(data.labels.iloc[rows], clear)
    times = data.labels.index[rows]
    return compute_forecast_metrics(
        forecasts, data.y[rows], clear, best=best, horizon=data.horizon, effective_rows=effective, times=times
    )


def dataset_calibration_by_class(
    data: PreparedDataset, rows: np.ndarray, forecasts: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Compute `calibration_by_class` of each forecast on the unambiguous ones of `rows`.

    forecasts : name -> float64 (len(rows), 3).

    Returns
    -------
    DataFrame with a row per forecast (`name`) and class.
    """
    clear, tables = data.unambiguous_mask[rows], []
    options = {"horizon": data.horizon, "times_N": data.labels.index[rows][clear], "classes": data.classes}
    for name, p_N3 in forecasts.items():
        table = calibration_by_class(data.y[rows][clear], p_N3[clear], **options)
        table.insert(0, "name", name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def dataset_gain_over_forecast(
    data: PreparedDataset, rows: np.ndarray, p_N3: np.ndarray, other: np.ndarray
) -> tuple[float, float, float]:
    """Compute the gain in log loss of `p_N3` over `other` on the unambiguous ones of `rows`: (gain, low, high), 95 %,
    nats.

    The interval is that of the row-wise differences, so errors that both share cancel.
    """
    by_class, clear = (
        negative_log_probabilities(other) - negative_log_probabilities(p_N3),
        data.unambiguous_mask[rows].astype(float),
    )
    times = data.labels.index[rows]
    gain = gain_interval_by_class(by_class, data.y[rows], clear, horizon=data.horizon, times_N=times)
    return gain.mean, gain.low, gain.high


def dataset_weighted_prior_loss(data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray) -> float:
    """Compute the log loss of the class prior on `rows` with training weights, as the loss of a training is measured.

    Comparable with the losses of a history; metrics count each row once instead.
    """
    train_rows, train_weights = dataset_rows_with_weight(data, train_rows)
    rows, weights = dataset_rows_with_weight(data, rows)
    p_N3 = condition_on_classes(
        prior_baseline_probabilities(data.y[train_rows], train_weights, len(rows)), data.classes.values()
    )
    return float(np.average(row_log_loss(data.y[rows], p_N3), weights=weights))


def baseline_training_rows(data: PreparedDataset, predicted: np.ndarray) -> np.ndarray:
    """Return the training rows whose windows are as long as those of all predicted rows, on which baselines are counted
    (QUICK predicts only some of them): later rows of a session have another class balance.

    predicted : positions of rows in any split.
    """
    first = np.flatnonzero(np.diff(data.segment, prepend=data.segment[0] - 1))  # bar of each segment
    bars = data.row[predicted]
    lookback = int((bars - first[np.searchsorted(first, bars, side="right") - 1]).min()) + 1
    train = data.splits["train"]
    return train[data.full_window_mask(lookback)[train]]
