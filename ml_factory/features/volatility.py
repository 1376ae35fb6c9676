"""Volatility features: size and shape of price moves.

Sources: Wilder (1978) for ATR; Bollinger; Donchian; Carter (2005) for the squeeze; Dreiss for choppiness; Parkinson
(1980); Garman and Klass (1980); Rogers and Satchell (1991); Yang and Zhang (2000); RiskMetrics (1996) for the
exponential variance; Barndorff-Nielsen and Shephard (2004) and Andersen, Dobrev and Schaumburg (2012) for shares of
jumps; Barndorff-Nielsen, Kinnebrock and Shephard (2010) for the semivariance; Black (1976) for the leverage effect;
Ding, Granger and Engle (1993) for clustering. Estimators of one window say nearly the same thing, so each is stored
as the logarithm of its ratio to a simpler one.
"""

import math
from collections.abc import Iterator

import numpy as np

from ml_factory.features.engine import Block, Column
from ml_factory.features.windows import (
    FLOOR,
    lag,
    ratio,
    window_correlation,
    window_max,
    window_mean,
    window_min,
    window_moment,
    window_place,
    window_std,
    window_sum,
    window_variation,
)

DECAY = 0.94
"""Weight of yesterday's variance in RiskMetrics' (1996) daily model; kept for bars of any length."""


def volatility(b: Block) -> Iterator[Column]:
    """Yield the columns; see the module."""
    parkinson_variance, garman_klass_variance, inner = range_variances(b.log_open, b.log_high, b.log_low, b.log_close)
    size, before, squares = abs(b.ret), lag(b.ret), b.ret * b.ret
    parkinson, realised = _root_mean(parkinson_variance, 24), window_sum(squares, 48)
    mean, spread_20 = window_mean(b.close, 20), window_std(b.close, 20)

    yield "natr_14", 100.0 * b.atr / b.close  # TA-Lib NATR
    yield "bollinger_place_20", ratio(b.close - mean, 4.0 * spread_20)  # TA-Lib BBANDS of 2 deviations
    yield "bollinger_width_20", 4.0 * spread_20 / mean
    yield "choppiness_14", _choppiness(b, 14)
    yield "downside_share_48", _downside_share(b.ret, realised, 48)
    yield "parkinson_ratio_24", np.log(parkinson / b.return_std(24))
    yield "deviation_ratio_6_48", np.log(b.return_std(6) / b.return_std(48))
    if b.coarse:
        return

    garman_klass = _root_mean(garman_klass_variance, 24)
    yield "garman_klass_ratio_24", np.log(garman_klass / parkinson)
    yield "rogers_satchell_ratio_24", np.log(_root_mean(inner, 24) / garman_klass)
    yield "yang_zhang_ratio_24", np.log(_yang_zhang(b, inner, 24) / b.return_std(24))
    yield "deviation_ratio_24_96", np.log(b.return_std(24) / b.return_std(96))
    bipower = (math.pi / 2.0) * (48.0 / 47.0) * window_sum(size * lag(size), 47)
    yield "jump_share_48", 1.0 - ratio(bipower, realised, 1.0)  # near 0 in a diffusion, near 1 after one jump
    yield "range_surprise_14", b.span / lag(b.atr) - 1.0
    yield "range_dispersion_48", window_variation(b.span, 48)
    variance, third, fourth = (window_moment(b.ret, 48, power) for power in (2, 3, 4))
    yield "skew_48", ratio(third, variance * np.sqrt(variance))
    yield "kurtosis_48", ratio(fourth, variance * variance, 3.0) - 3.0
    # MedRV of Andersen, Dobrev and Schaumburg (2012) bears two jumps in a row.
    middle = np.maximum(np.minimum(size, lag(size)), np.minimum(np.maximum(size, lag(size)), lag(size, 2)))
    scale = math.pi / (6.0 - 4.0 * math.sqrt(3.0) + math.pi) * 48.0 / 46.0
    yield "median_jump_share_48", 1.0 - ratio(scale * window_sum(middle * middle, 46), realised, 1.0)
    yield "downside_share_12", _downside_share(b.ret, window_sum(squares, 12), 12)
    # RiskMetrics' deviation starts at the mean of 48 squared returns.
    yield "ewma_ratio_48", np.log(_root(b.mean("ewma", squares, 48, 1.0 - DECAY)) / b.return_std(48))
    yield "deviation_dispersion_12_48", window_variation(b.return_std(12), 48)
    yield "squeeze_20", 2.0 * spread_20 / (1.5 * b.atr) - 1.0  # Carter: Bollinger's width over Keltner's of 1.5 ATRs
    # Donchian's width in the ATRs of as many bars.
    yield "channel_width_48", (window_max(b.high, 48) - window_min(b.low, 48)) / (math.sqrt(48.0) * b.atr) - 1.0
    above, below = b.high - b.open, b.open - b.low
    yield "range_asymmetry_24", ratio(window_sum(above - below, 24), window_sum(b.high - b.low, 24))
    yield "atr_place_96", window_place(b.atr, window_min(b.atr, 96), window_max(b.atr, 96))
    yield "leverage_48", window_correlation(before, size, 48)
    yield "clustering_48", window_correlation(abs(before), size, 48)


def range_variances(
    log_open: np.ndarray, log_high: np.ndarray, log_low: np.ndarray, log_close: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the variance of a bar estimated from each bar alone, by the three range estimators.

    Parkinson (1980), eq. 4: log(h/l)^2 / (4 log 2). Garman and Klass (1980), eq. 20: log(h/l)^2 / 2 -
    (2 log 2 - 1) log(c/o)^2. Rogers and Satchell (1991), free of drift: u (u - c) + d (d - c).
    """
    up, down, body, span = log_high - log_open, log_low - log_open, log_close - log_open, log_high - log_low
    return (
        span * span / (4.0 * math.log(2.0)),
        0.5 * span * span - (2.0 * math.log(2.0) - 1.0) * body * body,
        up * (up - body) + down * (down - body),
    )


def _root(variance: np.ndarray) -> np.ndarray:
    """Return the deviation, at least FLOOR; rounding may leave a variance a hair below 0."""
    return np.sqrt(np.maximum(variance, FLOOR * FLOOR))


def _root_mean(variance: np.ndarray, n: int) -> np.ndarray:
    """Return the deviation per bar from n bars' variances."""
    return _root(window_sum(variance, n) / n)


def _yang_zhang(b: Block, inner: np.ndarray, n: int) -> np.ndarray:
    """Yang and Zhang (2000), eq. 7: V(open jump) + k V(open to close) + (1 - k) V(Rogers-Satchell), alpha = 1.34."""
    jump = window_moment(b.log_open - lag(b.log_close), n, 2)
    body = window_moment(b.log_close - b.log_open, n, 2)
    k, unbiased = 0.34 / (1.34 + (n + 1.0) / (n - 1.0)), n / (n - 1.0)
    return _root(unbiased * (jump + k * body) + (1.0 - k) * window_sum(inner, n) / n)


def _choppiness(b: Block, n: int) -> np.ndarray:
    """Return log(sum of true ranges / range of the n bars) / log(n): 0 in one straight move, 1 going nowhere."""
    before = lag(b.close, n)
    top, bottom = np.maximum(window_max(b.high, n), before), np.minimum(window_min(b.low, n), before)
    return np.log(ratio(b.sum("span", n), top - bottom, 1.0)) / math.log(n)


def _downside_share(ret: np.ndarray, realised: np.ndarray, n: int) -> np.ndarray:
    """Return the share of squared returns that came from falls, less 1/2; 0 where nothing moved.

    realised : sum of n squared returns. Barndorff-Nielsen, Kinnebrock and Shephard (2010): RS- / RV.
    """
    falls = np.minimum(ret, 0.0)
    return ratio(window_sum(falls * falls, n), realised, 0.5) - 0.5
