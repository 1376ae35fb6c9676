"""Metrics of class probabilities: (name, value) pairs, intervals of gains, returns by decile of the forecast.

Letters: N rows in time order, 3 classes in the order short, neutral, long (-1, 0, +1). Each row counts once.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import FactoryError
from ml_factory.evaluation.intervals import ConfidenceInterval, gain_interval, gain_interval_by_class
from ml_factory.models.rows import labels_to_class_index

PRIOR = "prior"
CLASS_NAMES = ("short", "neutral", "long")
PROBABILITIES = [f"p_{name}" for name in CLASS_NAMES]  # columns of every table of predictions
BINS = 15  # of the expected calibration error
FLOOR = float(np.finfo(np.float64).eps)  # a probability of 0 costs -log(2.2e-16) = 36 nats, as in scikit-learn

DECILES = 10
FEWEST_OF_DECILES = 100  # rows: ten a decile


def check_metric_rows(y, p_N3) -> tuple[np.ndarray, np.ndarray]:
    """Return class codes 0..2 (int64) and probabilities as float64, all checked.

    Raises
    ------
    FactoryError for other labels than -1, 0, +1, shapes that do not match, probabilities that are not finite, are
    negative or do not sum to 1 within 1e-4, or no rows at all.
    """
    y, p_N3 = np.asarray(y), np.asarray(p_N3, dtype=np.float64)
    if p_N3.ndim != 2 or p_N3.shape[1] != 3 or y.shape != (len(p_N3),):
        raise FactoryError(
            "Labels and probabilities differ in shape", got=f"shapes {y.shape}, {p_N3.shape}", wanted="(N,), (N, 3)"
        )
    code = labels_to_class_index(y)
    bad = (p_N3 < 0).any(axis=1) | ~(np.abs(p_N3.sum(axis=1) - 1) <= 1e-4)  # also where one is NaN or infinite
    if bad.any():
        row = int(np.argmax(bad))
        raise FactoryError(
            f"{int(bad.sum())} of {len(bad)} rows hold no probabilities",
            where=f"row {row}",
            got=p_N3[row].tolist(),
            wanted="three numbers from 0 to 1 that sum to 1",
            next_step="leave out the rows without a prediction",
        )
    if not len(code):
        raise FactoryError("No rows to evaluate", got="0 rows", wanted="1 row or more")
    return code, p_N3


def negative_log_probabilities(p_N3) -> np.ndarray:
    """Return -log of the probability of each class, float64 (N, 3): `row_log_loss` under each outcome; nats."""
    return -np.log(np.clip(np.asarray(p_N3, dtype=np.float64), FLOOR, 1.0))


def row_log_loss(y, p_N3) -> np.ndarray:
    """Return -log of the probability of the outcome, per row: float64 (N,), in nats."""
    code, p_N3 = check_metric_rows(y, p_N3)
    return negative_log_probabilities(p_N3)[np.arange(len(code)), code]


def direction_loss_by_class(p_N3) -> np.ndarray:
    """Return the directional part of the log loss under each outcome, float64 (N, 3), 0 for neutral; nats.

    -log p(label) = -log P(neutral or not) - log P(side | not neutral), by the chain rule. The touch of any barrier
    follows the hour and the volatility, and is easy to predict; a position needs the side.
    """
    p_N3 = np.asarray(p_N3, dtype=np.float64)
    side = np.clip(p_N3, FLOOR, 1.0) / np.maximum(p_N3[:, [0]] + p_N3[:, [2]], FLOOR)
    return np.where(np.arange(3) == 1, 0.0, -np.log(np.clip(side, FLOOR, 1.0)))


def classification_metrics(y, p_N3) -> Iterator[tuple[str, float]]:
    """Yield (name, value): log_loss, brier, accuracy, ece.

    log_loss in nats; brier is the sum of squares over the three classes (Brier 1950), from 0 to 2; ece as in
    `expected_calibration_error`.
    """
    code, p_N3 = check_metric_rows(y, p_N3)
    yield "log_loss", float(row_log_loss(y, p_N3).mean())
    yield "brier", float(((p_N3 - np.eye(3)[code]) ** 2).sum(axis=1).mean())
    yield "accuracy", float((p_N3.argmax(axis=1) == code).mean())
    yield "ece", expected_calibration_error(y, p_N3)


def expected_calibration_error(y, p_N3) -> float:
    """Return the mean over the rows' confidence bins of |accuracy - confidence| of the top class (Guo et al. 2017, eq.
    3).
    """
    code, p_N3 = check_metric_rows(y, p_N3)
    confidence = p_N3.max(axis=1)
    which = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)  # bins (low, high], as there
    miss = np.bincount(which, weights=(p_N3.argmax(axis=1) == code) - confidence, minlength=BINS)
    return float(np.abs(miss).sum() / len(code))


# ---- the table -------------------------------------------------------------------------------------------------


def compute_forecast_metrics(
    probabilities: Mapping[str, np.ndarray], y, *, best: str = PRIOR,
    horizon: int = 1, effective_rows: float | None = None, times=None,
) -> pd.DataFrame:  # fmt: skip
    """Return all metrics of all forecasts on the same rows, and each one's gain in log loss over the class prior.

    Parameters
    ----------
    probabilities : name -> (N, 3), all on the rows of `y`, in time order; `prior` is one of them.
    best : name of the best baseline, chosen on other rows.
    horizon, times : rows over which one label reaches, and when each row is known; see `intervals.gain_interval`.
    effective_rows : `targets.weights.effective_sample_size` of these rows; default: as if no two labels overlapped.

    Returns
    -------
    DataFrame indexed by name: those of `classification_metrics`, then `log_loss_gain` (the prior's minus this one:
    positive is better), `gain_se`, `gain_low` and `gain_high` (95 %); `best_baseline`, `gain_best`, the
    gain over it, `gain_best_low` and `gain_best_high`; `direction_gain`, the directional part of `log_loss_gain`
    (`direction_loss_by_class`), `direction_low` and `direction_high`; `rows` and `effective_rows`.
    """
    table = {}

    def gain_over(other: str, loss: Callable, p_N3: np.ndarray) -> ConfidenceInterval:
        gain_N3 = loss(probabilities[other]) - loss(p_N3)
        return gain_interval_by_class(gain_N3, y, horizon=horizon, times_N=times)

    for name, p_N3 in probabilities.items():
        gain = gain_over(PRIOR, negative_log_probabilities, p_N3)
        over = gain if best == PRIOR else gain_over(best, negative_log_probabilities, p_N3)
        side = gain_over(PRIOR, direction_loss_by_class, p_N3)
        table[name] = dict(classification_metrics(y, p_N3)) | {
            "log_loss_gain": gain.mean, "gain_se": gain.standard_error, "gain_low": gain.low, "gain_high": gain.high,
            "best_baseline": best, "gain_best": over.mean, "gain_best_low": over.low, "gain_best_high": over.high,
            "direction_gain": side.mean, "direction_low": side.low, "direction_high": side.high,
            "rows": len(y), "effective_rows": float(len(y)) if effective_rows is None else effective_rows,
        }  # fmt: skip
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("name")


# ---- returns by decile -----------------------------------------------------------------------------------------


def decile_returns(
    forecast_N, ret_N, *, horizon: int = 1, times_N=None
) -> tuple[pd.DataFrame, ConfidenceInterval] | None:
    """Return realised returns by decile of the forecast, and their rank correlation; None below 100 rows with a return,
    and for a constant forecast or return.

    A decile's mean is of returns alone, so it has no `by_outcome_NK`: forecasts only select its rows. Including the
    memory of that selection brought no interval nearer to 95 % on simulated series (docs/log.md).

    The table has the index decile 1..10 (10: the most bullish forecasts); forecast (mean), ret_bp (mean log return to
    the barrier, basis points), low_bp and high_bp (95 %), rows.

    Parameters
    ----------
    forecast_N : p_long - p_short.
    ret_N : realised log return; NaN where there is none.
    horizon, times_N : as of `intervals.gain_interval`.
    """
    forecast, ret = np.asarray(forecast_N, dtype=np.float64), np.asarray(ret_N, dtype=np.float64)
    known = np.isfinite(ret)
    times = None if times_N is None else np.asarray(times_N, dtype="datetime64[ns]")[known]
    forecast, ret = forecast[known], ret[known]
    if len(ret) < FEWEST_OF_DECILES or np.ptp(forecast) == 0 or np.ptp(ret) == 0:
        return None
    place = forecast.argsort(kind="stable").argsort() * DECILES // len(forecast)
    rows = {}
    for decile in range(DECILES):
        in_decile = place == decile
        interval = gain_interval(1e4 * ret, in_decile.astype(float), horizon=horizon, times_N=times)
        rows[decile + 1] = {
            "forecast": forecast[in_decile].mean(), "ret_bp": interval.mean, "low_bp": interval.low,
            "high_bp": interval.high, "rows": int(in_decile.sum()),
        }  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("decile").astype({"rows": np.int64})
    return table, information_coefficient(forecast, ret, horizon=horizon, times_N=times)


def information_coefficient(forecast_N, ret_N, *, horizon: int = 1, times_N=None) -> ConfidenceInterval:
    """Return Spearman's rank correlation of forecast and realised return, with a 95 % interval for dependent rows.

    It is the mean of the products of standardised ranks, whose interval is that of every other mean here, so that
    overlapping labels count. The value by outcome is that for the lowest and for the highest return: the memory of slow
    forecasts counts. That ranks are of a sample is left out, as no correlation makes it matter.
    """
    f, g = (
        pd.Series(values).rank().to_numpy() / len(values) - (len(values) + 1) / (2 * len(values))
        for values in (forecast_N, ret_N)
    )
    scale = f.std() * g.std()
    lowest_highest_N2 = np.outer(f, [-0.5, 0.5]) / scale
    return gain_interval(f * g / scale, horizon=horizon, times_N=times_N, by_outcome_NK=lowest_highest_N2)
