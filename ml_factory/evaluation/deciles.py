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
    return DecileReturns(table, information_coefficient(forecast, ret, horizon=horizon, times_N=times))


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
