"""Market-regime features. Fixed settings and forward filters only; nothing fitted, nothing smoothed.

Sources: Hamilton (1989), section 4, for the filters of two and three states; Adams and MacKay (2007), algorithm 1, for
the online change-point; Page (1954) for CUSUM; Lo and MacKinlay (1988) for the variance ratio. The filters read the
surprise of a bar: its log return in deviations of the 96 bars before it. Each runs over the rows from `first` on, and
a missing surprise leaves it as it is.
"""

import math
from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.features.engine import HISTORY, Block, Column
from ml_factory.features.windows import lag, window_max, window_min, window_moment, window_place

CALM, WILD, STAY = 0.7, 1.7, 0.95
"""Deviations of the two states in units of the usual one, and the probability of staying in a state for a bar."""
DRIFT, TREND_STAY = 0.3, 0.95
"""Mean standardized return of the rising and of the falling state, and the probability of staying in a state."""
RUNS, HAZARD = 8, 1.0 / 16.0
"""Run lengths distinguished (the longest means "as long or longer"), and the probability of a change at each bar."""


def regime(b: Block) -> Iterator[Column]:
    """Yield the columns; see the module."""
    surprise = b.ret / lag(b.return_std(96))
    yield "wild_probability", volatile_regime_probability(surprise, HISTORY, b.memory("wild", 0.5))
    yield "variance_ratio_4_48", _variance_ratio(b, 4, 48)
    yield "trend_probability", trend_regime_probability(surprise, HISTORY, b.memory("trend", 1.0 / 3.0, 1.0 / 3.0))
    if b.coarse:
        return

    yield "variance_ratio_12_96", _variance_ratio(b, 12, 96)
    spread = b.return_std(24)
    yield "deviation_place_192", window_place(spread, window_min(spread, 192), window_max(spread, 192))
    # Depth below the highest high, in the ATRs of as many bars.
    yield "drawdown_192", (b.close - window_max(b.high, 192)) / (b.atr * math.sqrt(192.0))
    yield "cusum", cusum(surprise, 0.25, 12.0, HISTORY, b.memory("cusum", 0.0, 0.0))
    # Before the first number a run of length 0 is certain.
    runs = b.memory("runs", 1.0, *[0.0] * (2 * RUNS - 1)).reshape(2, RUNS)
    changed, length = bayesian_change_point(surprise, HISTORY, runs)
    yield "change_probability", changed
    yield "run_length", length


def _variance_ratio(b: Block, q: int, n: int) -> np.ndarray:
    """Return the variance of the last n q-bar returns over q times that of the bars they cover, less 1.

    0 where nothing moved. Below 0 moves revert, above 0 they go on.
    """
    usual = window_moment(b.ret, n + q - 1, 2)
    many = window_moment(b.log_close - lag(b.log_close, q), n, 2)
    return np.where(usual < 1e-24, 0.0, many / (q * usual) - 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def volatile_regime_probability(surprise, first, state):
    """Probability of the wild of two states after each bar, by Hamilton's forward filter.

    The surprise is normal with deviation CALM or WILD. The filter works on log odds, so that no move is too large for
    it; it starts at even odds.
    """
    out, probability = np.full(len(surprise), np.nan), state[0]
    for i in range(first, len(surprise)):
        z2 = surprise[i] * surprise[i]
        if z2 == z2:
            before = probability * STAY + (1.0 - probability) * (1.0 - STAY)
            evidence = math.log(CALM / WILD) + 0.5 * z2 * (1.0 / (CALM * CALM) - 1.0 / (WILD * WILD))
            odds = before / (1.0 - before) * math.exp(min(evidence, 500.0))
            probability = odds / (1.0 + odds)
            out[i] = probability
    state[0] = probability
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def trend_regime_probability(surprise, first, state):
    """Probability of the rising less that of the falling of three states, by Hamilton's forward filter.

    The surprise is normal with deviation 1 and mean DRIFT, 0 or -DRIFT; even odds at the start.
    """
    out, up, down = np.full(len(surprise), np.nan), state[0], state[1]
    leave = (1.0 - TREND_STAY) / 2.0
    for i in range(first, len(surprise)):
        if surprise[i] == surprise[i]:
            push = DRIFT * min(max(surprise[i], -50.0), 50.0)
            rise = (TREND_STAY * up + leave * (1.0 - up)) * math.exp(push - 0.5 * DRIFT * DRIFT)
            fall = (TREND_STAY * down + leave * (1.0 - down)) * math.exp(-push - 0.5 * DRIFT * DRIFT)
            flat = 1.0 - up - down
            total = rise + fall + TREND_STAY * flat + leave * (1.0 - flat)
            up, down = rise / total, fall / total
            out[i] = up - down
    state[0], state[1] = up, down
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def cusum(surprise, allowance, limit, first, state):
    """Page's upper minus lower CUSUM of surprises, each held between 0 and `limit`.

    Sums that rest at 0 forget the past, and sums that are held at the limit do too: no alarm needs a restart.
    """
    out, up, down = np.full(len(surprise), np.nan), state[0], state[1]
    for i in range(first, len(surprise)):
        if surprise[i] == surprise[i]:
            up = min(max(up + surprise[i] - allowance, 0.0), limit)
            down = min(max(down - surprise[i] - allowance, 0.0), limit)
            out[i] = up - down
    state[0], state[1] = up, down
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def bayesian_change_point(surprise, first, state):
    """(Probability that the mean surprise changed within the last 2 bars, mean run length as a share of RUNS less 1/2).

    Adams and MacKay's recursion for normal surprises of deviation 1 whose mean is drawn from N(0, 1) at a change.
    state : [2, RUNS], of each run length the probability and the sum of the run's surprises; of runs of RUNS - 1 bars
    and more one mean sum is kept, shrunk to that many bars.
    """
    changed, length = np.full(len(surprise), np.nan), np.full(len(surprise), np.nan)
    chance, sums = state[0], state[1]
    for i in range(first, len(surprise)):
        if surprise[i] != surprise[i]:
            continue
        x = min(max(surprise[i], -8.0), 8.0)  # beyond that every run is equally unlikely: the new one wins anyway
        total = 0.0
        for r in range(RUNS):
            shrink = 1.0 / (r + 1.0)  # of the mean: the prior counts as one bar
            miss = x - sums[r] * shrink
            chance[r] *= math.exp(-0.5 / (1.0 + shrink) * miss * miss) / math.sqrt(1.0 + shrink)
            total += chance[r]
        oldest = chance[RUNS - 1] + chance[RUNS - 2]
        longest = chance[RUNS - 1] * sums[RUNS - 1] + chance[RUNS - 2] * sums[RUNS - 2]
        longest = longest / oldest if oldest > 0.0 else 0.0
        stay = (1.0 - HAZARD) / total
        for r in range(RUNS - 2, 0, -1):
            chance[r], sums[r] = stay * chance[r - 1], sums[r - 1] + x
        chance[RUNS - 1], sums[RUNS - 1] = stay * oldest, (longest + x) * (RUNS - 1.0) / RUNS
        chance[0], sums[0] = HAZARD, 0.0
        run = 0.0
        for r in range(1, RUNS):
            run += r * chance[r]
        changed[i], length[i] = chance[0] + chance[1] + chance[2], run / RUNS - 0.5
    return changed, length
