"""Market-regime features. Fixed settings and forward filters only; nothing fitted, nothing smoothed.

Sources: Hamilton (1989), section 4, for the filters of two and three states; Adams and MacKay (2007), algorithm 1, for
the online change-point; Page (1954) for CUSUM; Lo and MacKinlay (1988) for the variance ratio. The filters read the
surprise of a bar: its log return in deviations of the 96 bars before it.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import (
    HISTORY,
    rolling_covariance,
    rolling_max,
    rolling_min,
    rolling_return_std,
    safe_ratio,
)

COARSE = ("wild_probability", "variance_ratio_4_48", "trend_probability")
BASE = (
    "variance_ratio_12_96", "deviation_place_192", "drawdown_192", "cusum", "change_probability", "run_length",
)  # fmt: skip

CALM, WILD, STAY = 0.7, 1.7, 0.95
"""Deviations of the two states in units of the usual one, and the probability of staying in a state for a bar."""
DRIFT, TREND_STAY = 0.3, 0.95
"""Mean standardized return of the rising and of the falling state, and the probability of staying in a state."""
RUNS, HAZARD = 8, 1.0 / 16.0
"""Run lengths distinguished (the longest means "as long or longer"), and the probability of a change at each bar."""


def _names(market, coarse):
    return COARSE if coarse else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    surprise = _standardized_returns(b)
    volatile_regime_probability(surprise, state[0], out[0])
    _variance_ratio(b, 4, 48, out[1])
    trend_regime_probability(surprise, state[1], out[2])
    if coarse:
        return
    _variance_ratio(b, 12, 96, out[3])
    _volatility_regime_position(b, 24, 192, out[4])
    _drawdown(b, 192, out[5])
    cusum(surprise, 0.25, 12.0, state[2], out[6])
    bayesian_change_point(surprise, state[3:], out[7], out[8])


FAMILY = FeatureFamily(names=_names, kernel=_kernel, recursions=3 + RUNS)


@njit(cache=True, nogil=True, error_model="numpy")
def _standardized_returns(b):
    """Log returns in deviations of the 96 bars before each."""
    spread = rolling_return_std(b.ret, 96, b.t0, HISTORY - 1)
    out = np.full(len(spread), np.nan)
    for i in range(HISTORY, len(spread)):
        out[i] = b.ret[i] / spread[i - 1]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _variance_ratio(b, q, n, out):
    """Variance of the last n q-bar returns over q times that of the bars they cover, less 1; 0 where nothing moved.

    Below 0 moves revert, above 0 they go on.
    """
    many = np.full(len(b.ret), np.nan)
    for i in range(q, len(many)):
        many[i] = b.log_close[i] - b.log_close[i - q]
    covered = n + q - 1
    variance = rolling_covariance(many, many, n, b.t0, HISTORY)
    usual = rolling_covariance(b.ret, b.ret, covered, b.t0, HISTORY)
    for i in range(HISTORY, len(many)):
        still = usual[i] < 1e-24
        out[i - HISTORY] = 0.0 if still else variance[i] / (q * usual[i]) - 1.0


@njit(cache=True, nogil=True, error_model="numpy")
def _volatility_regime_position(b, n, window, out):
    """Place of the deviation of n bars between its own lowest and highest of `window` bars, less 1/2."""
    spread = rolling_return_std(b.ret, n, b.t0, HISTORY - 2 * window)
    bottom, top = rolling_min(spread, window, b.t0, HISTORY), rolling_max(spread, window, b.t0, HISTORY)
    for i in range(HISTORY, len(spread)):
        out[i - HISTORY] = safe_ratio(spread[i] - bottom[i], top[i] - bottom[i], 0.5) - 0.5


@njit(cache=True, nogil=True, error_model="numpy")
def _drawdown(b, n, out):
    """Depth below the highest high of n bars, in ATRs of as many bars."""
    top = rolling_max(b.high, n, b.t0, HISTORY)
    for i in range(HISTORY, len(top)):
        out[i - HISTORY] = (b.close[i] - top[i]) / (b.atr[i] * math.sqrt(n))


@njit(cache=True, nogil=True, error_model="numpy")
def volatile_regime_probability(surprise, state, out):
    """Probability of the wild of two states after each bar, by Hamilton's forward filter.

    The surprise is normal with deviation CALM or WILD. The filter works on log odds, so that no move is too large for
    it; it starts at even odds at the first number.
    """
    probability = state[0] if state[1] else 0.5
    for i in range(HISTORY, len(surprise)):
        z2 = surprise[i] * surprise[i]
        if math.isnan(z2):
            out[i - HISTORY] = np.nan
            continue
        state[1] = 1.0
        before = probability * STAY + (1.0 - probability) * (1.0 - STAY)
        evidence = math.log(CALM / WILD) + 0.5 * z2 * (1.0 / (CALM * CALM) - 1.0 / (WILD * WILD))
        odds = before / (1.0 - before) * math.exp(min(evidence, 500.0))
        probability = odds / (1.0 + odds)
        out[i - HISTORY] = probability
    state[0] = probability


@njit(cache=True, nogil=True, error_model="numpy")
def trend_regime_probability(surprise, state, out):
    """Probability of the rising less that of the falling of three states, by Hamilton's forward filter.

    The surprise is normal with deviation 1 and mean DRIFT, 0 or -DRIFT; even odds at the first number.
    """
    up, down = (state[0], state[1]) if state[2] else (1.0 / 3.0, 1.0 / 3.0)
    leave = (1.0 - TREND_STAY) / 2.0
    for i in range(HISTORY, len(surprise)):
        if math.isnan(surprise[i]):
            out[i - HISTORY] = np.nan
            continue
        state[2] = 1.0
        push = DRIFT * min(max(surprise[i], -50.0), 50.0)
        rise = (TREND_STAY * up + leave * (1.0 - up)) * math.exp(push - 0.5 * DRIFT * DRIFT)
        fall = (TREND_STAY * down + leave * (1.0 - down)) * math.exp(-push - 0.5 * DRIFT * DRIFT)
        flat = 1.0 - up - down
        total = rise + fall + TREND_STAY * flat + leave * (1.0 - flat)
        up, down = rise / total, fall / total
        out[i - HISTORY] = up - down
    state[0], state[1] = up, down


@njit(cache=True, nogil=True, error_model="numpy")
def cusum(surprise, allowance, limit, state, out):
    """Page's upper minus lower CUSUM of surprises, each held between 0 and `limit`.

    Sums that rest at 0 forget the past, and sums that are held at the limit do too: no alarm needs a restart.
    """
    up, down = state[0], state[1]
    for i in range(HISTORY, len(surprise)):
        if math.isnan(surprise[i]):
            out[i - HISTORY] = np.nan
            continue
        up = min(max(up + surprise[i] - allowance, 0.0), limit)
        down = min(max(down - surprise[i] - allowance, 0.0), limit)
        out[i - HISTORY] = up - down
    state[0], state[1] = up, down


@njit(cache=True, nogil=True, error_model="numpy")
def bayesian_change_point(surprise, state, out_change, out_run):
    """(Probability that the mean surprise changed within the last 2 bars, mean run length as a share of RUNS less 1/2).

    Adams and MacKay's recursion for normal surprises of deviation 1 whose mean is drawn from N(0, 1) at a change.
    state : a row a run length r, (probability, sum of the run's surprises); of runs of RUNS - 1 bars and more one mean
    sum is kept, shrunk to that many bars.
    """
    if state[:, 0].sum() == 0.0:
        state[0, 0] = 1.0  # before the first number a run of length 0 is certain
    shrink = 1.0 / np.arange(1.0, RUNS + 1.0)  # of the mean: the prior counts as one bar
    scale, factor = 1.0 / np.sqrt(1.0 + shrink), -0.5 / (1.0 + shrink)
    for i in range(HISTORY, len(surprise)):
        x = min(max(surprise[i], -8.0), 8.0)  # beyond that every run is equally unlikely: the new one wins anyway
        if math.isnan(surprise[i]):
            out_change[i - HISTORY] = out_run[i - HISTORY] = np.nan
            continue
        total = 0.0
        for r in range(RUNS):
            miss = x - state[r, 1] * shrink[r]
            state[r, 0] *= scale[r] * math.exp(factor[r] * miss * miss)
            total += state[r, 0]
        oldest = state[RUNS - 1, 0] + state[RUNS - 2, 0]
        longest = state[RUNS - 1, 0] * state[RUNS - 1, 1] + state[RUNS - 2, 0] * state[RUNS - 2, 1]
        longest = longest / oldest if oldest > 0.0 else 0.0
        stay = (1.0 - HAZARD) / total
        for r in range(RUNS - 2, 0, -1):
            state[r, 0] = stay * state[r - 1, 0]
            state[r, 1] = state[r - 1, 1] + x
        state[RUNS - 1, 0] = stay * oldest
        state[RUNS - 1, 1] = (longest + x) * (RUNS - 1.0) / RUNS
        state[0, 0], state[0, 1] = HAZARD, 0.0
        run = 0.0
        for r in range(1, RUNS):
            run += r * state[r, 0]
        out_change[i - HISTORY] = state[0, 0] + state[1, 0] + state[2, 0]
        out_run[i - HISTORY] = run / RUNS - 0.5
