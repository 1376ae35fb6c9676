"""Trend-scanning labels: the sign of the strongest trend that starts at a row.

Lopez de Prado, *Machine Learning for Asset Managers*, 2020, section 5.4: log closes from the row on are regressed on
time over every horizon from `shortest` to `LabelSpec.horizon` bars; the horizon whose slope has the largest |t| is
chosen, and the sign of that slope is the label.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.targets.barrier_kernels import SESSION, VERTICAL
from ml_factory.targets.label_table import (
    build_label_table,
    find_labelable_rows,
    simulate_label_exits,
    unreachable_barriers,
)
from ml_factory.targets.labels import LabelSpec


def trend_scanning_labels(
    base: ResampledBars,
    spec: LabelSpec,
    market: MarketSpec,
    *,
    shortest: int = 5,
    least_t: float = 0.0,
    session_close: np.ndarray | None = None,
) -> pd.DataFrame:
    """Label rows by the sign of the trend with the largest |t| among those of `shortest` to `spec.horizon` bars.

    Returns the columns of `triple_barrier_labels` without up and down, and t_value and trend_bars, the chosen trend's
    length; ret, mae and mfe are the trend's. The choice needs every horizon, so a label lives, for overlap and for its
    proof, until the longest is known. (The book's t1 is the trend's own end; purged by it, rows would train on later
    information.)

    Parameters
    ----------
    spec : horizon and session_end are used; a row with fewer than `shortest` bars left in its segment has no label
    shortest : bars of the shortest trend, at least 2 (a line through two points has no residual)
    least_t : a trend with a smaller |t| gets label 0. The book has 0, so that only a constant price is neutral

    Raises
    ------
    SettingsError : settings that leave no trend
    BarsError : a price that is not positive
    """
    if isinstance(shortest, bool) or not isinstance(shortest, int | np.integer) or not 2 <= shortest <= spec.horizon:
        raise SettingsError(
            "Trends cannot be scanned like this",
            where="shortest",
            got=repr(shortest),
            wanted=f"a whole number of bars from 2 to the horizon, {spec.horizon}",
            next_step="use shortest=5 and a horizon of 20",
        )
    if isinstance(least_t, bool) or not isinstance(least_t, int | float) or not 0 <= least_t < np.inf:
        raise SettingsError(
            "Trends cannot be scanned like this",
            where="least_t",
            got=repr(least_t),
            wanted="a finite number, 0 or more",
            next_step="use least_t=0 for the sign of every trend",
        )
    entry, last = find_labelable_rows(base, spec.session_end)
    longest = np.minimum(entry + spec.horizon, last)
    chosen, t_value = strongest_trend(base.close, entry, longest, int(shortest))
    rows = simulate_label_exits(base, None, entry, last, chosen, *unreachable_barriers(base), market, spec.horizon)
    whole = np.where(longest == entry + spec.horizon, VERTICAL, SESSION).astype(np.int8)
    rows = replace(rows, exit_bar=longest, barrier=whole)
    label = np.where(np.abs(t_value) >= least_t, np.sign(t_value), 0).astype(np.int8)
    facts = {"t_value": t_value, "trend_bars": chosen - entry}
    return build_label_table(base, rows, label, spec, market, session_close, facts, kept=last - entry >= shortest)


@njit(cache=True, nogil=True)
def strongest_trend(close, entry, longest, shortest):
    """Return (last bar int64[R], t-value float64[R]) of the strongest trend that starts on each row `entry`.

    Horizons end on bars entry + shortest to longest, int64[R]; of equals the shortest is chosen; of none, `longest`
    with 0. Each further bar costs O(1): slope and mean are updated, and the residual sum of squares grows by the square
    of the recursive residual (Brown, Durbin and Evans 1975, lemma 2), so nothing cancels and only the row's own bars
    are used. A constant price has t = 0, a perfect line an infinite one.
    """
    n = len(close)
    log_close = np.empty(n)
    for i in range(n):
        log_close[i] = np.log(close[i])
    chosen, t_value = np.empty(len(entry), np.int64), np.empty(len(entry))
    for r in range(len(entry)):
        i = entry[r]
        slope = log_close[i + 1] - log_close[i]
        mean, residual, strongest, best, best_end = 0.5 * slope, 0.0, -1.0, 0.0, longest[r]
        for bar in range(i + 2, longest[r] + 1):
            points = float(bar - i)  # before this one, at times 0 to points - 1
            spread = points * (points * points - 1.0) / 12.0  # sum of squares of the times about their mean
            ahead = 0.5 * (points + 1.0)  # from their mean to this point's time
            y = log_close[bar] - log_close[i]
            innovation = y - (mean + slope * ahead)
            variance = 1.0 + 1.0 / points + ahead * ahead / spread
            residual += innovation * innovation / variance
            slope += innovation * ahead / (spread * variance)
            mean += (y - mean) / (points + 1.0)
            if bar < i + shortest:
                continue
            spread = (points + 1.0) * ((points + 1.0) * (points + 1.0) - 1.0) / 12.0
            error = np.sqrt(residual / ((points - 1.0) * spread))
            t = slope / error if error > 0.0 else (np.inf * slope if slope != 0.0 else 0.0)
            if abs(t) > strongest:
                strongest, best, best_end = abs(t), t, bar
        chosen[r], t_value[r] = best_end, best
    return chosen, t_value
