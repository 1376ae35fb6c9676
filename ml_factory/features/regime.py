"""Regime: what kind of market this is. Fixed settings and forward filters only; nothing fitted, nothing smoothed.

Sources: Hamilton (1989), section 4, for the two-state filter; Page (1954) for CUSUM; Lo and MacKinlay (1988) for the
variance ratio; Bandt and Pompe (2002) for permutation entropy; Hosking (1981) for fractional differences.
"""

import math

import numpy as np
from numba import njit

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import lag, ratio

CALM, WILD, STAY = 0.7, 1.7, 0.95
"""Deviations of the two states in units of the usual one, and the chance to stay in a state for another bar."""


def regime(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; the shorter list where `coarse`."""
    close = bars.close
    surprise = rolling.log_returns(close) / lag(rolling.deviation(close, 96), 1)
    columns = {
        "wild_probability": wild_probability(surprise),
        "variance_ratio_4_48": variance_ratio(close, 4, 48),
    }
    if coarse:
        return columns
    return columns | {
        "variance_ratio_12_96": variance_ratio(close, 12, 96),
        "deviation_rank_240": rolling.rolling_rank(rolling.deviation(close, 24), 240) - 0.5,
        "cusum": cusum(surprise, 0.25, 12.0),
        "entropy_48": permutation_entropy(close, 48),
        "fractional_40": fractional_difference(close, 0.4, 96) / rolling.deviation(close, 96),
    }


def variance_ratio(close: np.ndarray, q: int, n: int) -> np.ndarray:
    """Variance of the last n q-bar returns over q times that of the bars they cover, less 1; 0 where nothing moved.

    Below 0 moves revert, above 0 they go on.
    """
    one, many = rolling.log_returns(close), rolling.log_returns(close, q)
    covered = n + q - 1
    spread = rolling.rolling_covariance(one, one, covered)
    return ratio(rolling.rolling_covariance(many, many, n), q * spread, empty=1.0) - 1.0


def fractional_weights(order: float, n: int) -> np.ndarray:
    """Weights of (1 - L)^order, newest first, cut off after n terms (Hosking 1981, eq. 2.3)."""
    weights = np.ones(n)
    for k in range(1, n):
        weights[k] = weights[k - 1] * (k - 1 - order) / k
    return weights


def fractional_difference(close: np.ndarray, order: float, n: int) -> np.ndarray:
    """(1 - L)^order of n log prices measured from the newest one.

    The cut-off weights do not sum to 0, so the plain form would carry the price's level; from the newest price it
    does not. Written over returns: the return k bars ago lies between the newest price and all older than k.
    """
    older = fractional_weights(order, n)[::-1].cumsum()[::-1][1:]  # sum of the weights of prices older than k bars
    return rolling.weighted_sum(rolling.log_returns(close), -older)


@njit(cache=True)
def wild_probability(surprise):
    """Probability of the wild of two states after each bar, by Hamilton's forward filter.

    surprise : returns in units of the usual deviation, normal with deviation CALM or WILD. The filter works on log
    odds, so that no move is too large for it; it starts at even odds at the first number.
    """
    out = np.full(len(surprise), np.nan)
    probability = 0.5
    for i in range(len(surprise)):
        z2 = surprise[i] * surprise[i]
        if math.isnan(z2):
            continue
        before = probability * STAY + (1.0 - probability) * (1.0 - STAY)
        evidence = math.log(CALM / WILD) + 0.5 * z2 * (1.0 / (CALM * CALM) - 1.0 / (WILD * WILD))
        odds = math.log(before / (1.0 - before)) + evidence
        probability = 1.0 / (1.0 + math.exp(-min(odds, 500.0)))
        out[i] = probability
    return out


@njit(cache=True)
def cusum(surprise, allowance, limit):
    """Page's upper minus lower CUSUM of standardised returns, each held between 0 and `limit`.

    Sums that rest at 0 forget the past, and sums that are held at the limit do too: no alarm needs a restart.
    """
    out = np.full(len(surprise), np.nan)
    up, down = 0.0, 0.0
    for i in range(len(surprise)):
        if math.isnan(surprise[i]):
            continue
        up = min(max(up + surprise[i] - allowance, 0.0), limit)
        down = min(max(down - surprise[i] - allowance, 0.0), limit)
        out[i] = up - down
    return out


@njit(cache=True)
def permutation_entropy(close, n):
    """Entropy of the orders of 3 successive closes among the last n such triples, 0 to 1 (equal counts as rising)."""
    out = np.full(len(close), np.nan)
    codes = np.zeros(len(close), np.int64)
    counts = np.zeros(8, np.int64)
    for i in range(2, len(close)):
        a, b, c = close[i - 2], close[i - 1], close[i]
        codes[i] = (a > b) + 2 * (b > c) + 4 * (a > c)
        counts[codes[i]] += 1
        if i >= n + 2:
            counts[codes[i - n]] -= 1
        if i >= n + 1:
            entropy = 0.0
            for count in counts:
                if count > 0:
                    entropy -= count / n * math.log(count / n)
            out[i] = entropy / math.log(6.0)
    return out
