"""Realised return by decile of the forecast, and the information coefficient. N rows in time order."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.intervals import ConfidenceInterval, gain_interval

DECILES = 10
FEWEST = 100  # rows: ten a decile


@dataclass(frozen=True)
class DecileReturns:
    """Realised return by decile of p_long - p_short.

    table : index decile 1..10 (10: the most bullish forecasts); forecast (mean), ret_bp (mean log return to the
        barrier, basis points), low_bp and high_bp (95 %), rows.
    information : Spearman correlation of forecast and return, with its interval.
    """

    table: pd.DataFrame
    information: ConfidenceInterval


def decile_returns(forecast_N, ret_N, *, horizon: int = 1, times_N=None) -> DecileReturns | None:
    """Return the returns by decile; None with fewer than 100 rows with a return, or a constant forecast or return.

    A decile's mean is of returns alone, so it has no `by_outcome_NK`: forecasts only select its rows. Including the
    memory of that selection brought no interval nearer to 95 % on simulated series (docs/log.md).

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
    if len(ret) < FEWEST or np.ptp(forecast) == 0 or np.ptp(ret) == 0:
        return None
    place = np.empty(len(forecast), dtype=np.int64)
    place[np.argsort(forecast, kind="stable")] = np.arange(len(forecast)) * DECILES // len(forecast)
    rows = {}
    for decile in range(DECILES):
        in_decile = place == decile
        interval = gain_interval(1e4 * ret, in_decile.astype(float), horizon=horizon, times_N=times)
        rows[decile + 1] = {
            "forecast": forecast[in_decile].mean(), "ret_bp": interval.mean, "low_bp": interval.low,
            "high_bp": interval.high, "rows": int(in_decile.sum()),
        }  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("decile").astype({"rows": np.int64})
    return DecileReturns(table, information_coefficient(forecast, ret, horizon=horizon, times_N=times))


def information_coefficient(forecast_N, ret_N, *, horizon: int = 1, times_N=None) -> ConfidenceInterval:
    """Return Spearman's rank correlation of forecast and realised return, with a 95 % interval for dependent rows.

    The interval is that of the mean of the influence function of Spearman's correlation (Borkowf 2002, Computational
    Statistics & Data Analysis 39, section 2), so that overlapping labels count as in every other interval here. Its
    value by outcome is that for the lowest and for the highest return: the memory of slow forecasts counts.
    """
    f, g = _mid_ranks(forecast_N), _mid_ranks(ret_N)
    scale = f.std() * g.std()
    rho = float(np.mean((f - 0.5) * (g - 0.5)) / scale)
    below = _mean_above(f, g)
    influence = (f * g + below + _mean_above(g, f)) / scale
    # At ranks 0 and 1 of the return, without the last summand, which is the same in all rows.
    lowest_highest_N2 = np.column_stack([below, f + below]) / scale
    values = rho + influence - influence.mean()
    return gain_interval(values, horizon=horizon, times_N=times_N, by_outcome_NK=lowest_highest_N2)


def _mid_ranks(values) -> np.ndarray:
    """Return the share of rows below each value, ties counting half: float64 (N,) in (0, 1)."""
    _, level, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return ((np.cumsum(counts) - counts / 2) / len(level))[level]


def _mean_above(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return 1/N times the sum of `other` over the rows whose x is above each row's, ties counting half, (N,)."""
    _, level = np.unique(x, return_inverse=True)
    sums = np.bincount(level, weights=other)
    return ((sums.sum() - np.cumsum(sums) + sums / 2) / len(x))[level]
