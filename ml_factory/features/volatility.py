"""Volatility: how far prices swing, and in which manner.

Sources: Wilder (1978) for ATR; Bollinger; Parkinson (1980); Garman and Klass (1980); Rogers and Satchell (1991); Yang
and Zhang (2000); Barndorff-Nielsen and Shephard (2004) for the jump share; Dreiss for choppiness. Range estimators of
one window say nearly the same thing, so each is stored as the logarithm of its ratio to a simpler one.
"""

import math

import numpy as np

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import FLOOR, lag, log, ratio, rolling_max, rolling_mean, rolling_min, rolling_sum


def volatility(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; the shorter list where `coarse`."""
    high, low, close = bars.high, bars.low, bars.close
    place, width = bollinger(close, 20)
    plain = rolling.deviation(close, 24)
    parkinson_24 = parkinson(high, low, 24)
    columns = {
        "natr_14": 100.0 * rolling.wilder(rolling.true_range(high, low, close), 14) / close,
        "bollinger_place_20": place,
        "bollinger_width_20": width,
        "choppiness_14": choppiness(high, low, close, 14),
        "downside_share_48": downside_share(close, 48),
        "parkinson_ratio_24": log(parkinson_24 / plain),
        "deviation_ratio_6_48": log(rolling.deviation(close, 6) / rolling.deviation(close, 48)),
    }
    if coarse:
        return columns
    skewness, kurtosis = shape(close, 48)
    span = rolling.true_range(high, low, close)
    garman_klass_24 = garman_klass(bars.open, high, low, close, 24)
    return columns | {
        "garman_klass_ratio_24": log(garman_klass_24 / parkinson_24),
        "rogers_satchell_ratio_24": log(rogers_satchell(bars.open, high, low, close, 24) / garman_klass_24),
        "yang_zhang_ratio_24": log(yang_zhang(bars.open, high, low, close, 24) / plain),
        "deviation_ratio_24_96": log(plain / rolling.deviation(close, 96)),
        "jump_share_48": jump_share(close, 48),
        "range_surprise_14": ratio(span, lag(rolling.average_true_range(high, low, close), 1)) - 1.0,
        "range_dispersion_48": ratio(rolling.rolling_std(span, 48), rolling_mean(span, 48)),
        "skew_48": skewness,
        "kurtosis_48": kurtosis,
    }


def bollinger(close: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(%b - 1/2, band width over the middle) for bands of 2 deviations (TA-Lib BBANDS); 0 where the bands meet."""
    middle, deviation = rolling_mean(close, n), rolling.rolling_std(close, n)
    return ratio(close - middle, 4.0 * deviation), 4.0 * deviation / middle


def choppiness(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """log(sum of true ranges / range of the n bars) / log(n): 0 in one straight move, 1 going nowhere."""
    path = rolling_sum(rolling.true_range(high, low, close), n)
    reach = np.maximum(rolling_max(high, n), lag(close, n)) - np.minimum(rolling_min(low, n), lag(close, n))
    return log(ratio(path, reach, empty=1.0)) / math.log(n)


def downside_share(close: np.ndarray, n: int) -> np.ndarray:
    """Share of squared returns that came from falls, less 1/2; 0 where nothing moved."""
    returns = rolling.log_returns(close)
    falls = np.minimum(returns, 0.0)
    return ratio(rolling_sum(falls * falls, n), rolling_sum(returns * returns, n), empty=0.5) - 0.5


def _root_mean(variance: np.ndarray, n: int) -> np.ndarray:
    """Deviation from n bars' variances, at least FLOOR; rounding may leave a variance a hair below 0."""
    return np.maximum(np.sqrt(np.maximum(rolling_mean(variance, n), 0.0)), FLOOR)


def parkinson(high: np.ndarray, low: np.ndarray, n: int) -> np.ndarray:
    """Parkinson (1980), eq. 4: sqrt(mean log(high / low)^2 / (4 log 2)); per bar, at least FLOOR."""
    return _root_mean(log(high / low) ** 2 / (4.0 * math.log(2.0)), n)


def garman_klass(open_: np.ndarray, high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Garman and Klass (1980), eq. 20: log(h/l)^2 / 2 - (2 log 2 - 1) log(c/o)^2; per bar, at least FLOOR."""
    return _root_mean(0.5 * log(high / low) ** 2 - (2.0 * math.log(2.0) - 1.0) * log(close / open_) ** 2, n)


def _rogers_satchell_variance(open_, high, low, close):
    up, down, body = log(high / open_), log(low / open_), log(close / open_)
    return up * (up - body) + down * (down - body)


def rogers_satchell(open_: np.ndarray, high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Rogers and Satchell (1991), free of drift: mean of u (u - c) + d (d - c); per bar, at least FLOOR."""
    return _root_mean(_rogers_satchell_variance(open_, high, low, close), n)


def yang_zhang(open_: np.ndarray, high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Yang and Zhang (2000), eq. 7: V(open jump) + k V(open to close) + (1 - k) V(Rogers-Satchell), alpha = 1.34."""
    k = 0.34 / (1.34 + (n + 1.0) / (n - 1.0))
    jump, body = log(open_ / lag(close, 1)), log(close / open_)
    unbiased = n / (n - 1.0)
    variance = unbiased * (rolling.rolling_covariance(jump, jump, n) + k * rolling.rolling_covariance(body, body, n))
    variance += (1.0 - k) * rolling_mean(_rogers_satchell_variance(open_, high, low, close), n)
    return np.maximum(np.sqrt(np.maximum(variance, 0.0)), FLOOR)


def jump_share(close: np.ndarray, n: int) -> np.ndarray:
    """1 - bipower over realised variance: near 0 in a diffusion, near 1 after one jump; 0 where nothing moved."""
    size = np.abs(rolling.log_returns(close))
    bipower = (math.pi / 2.0) * (n / (n - 1.0)) * rolling_sum(size * lag(size, 1), n - 1)
    return 1.0 - ratio(bipower, rolling_sum(size * size, n), empty=1.0)


def shape(close: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(skewness, excess kurtosis) of n log returns, population moments; 0 where nothing moved."""
    returns = rolling.log_returns(close)
    mean, spread = rolling_mean(returns, n), rolling.rolling_std(returns, n)
    second, third, fourth = (rolling_mean(returns**power, n) for power in (2, 3, 4))
    about3 = third - 3.0 * mean * second + 2.0 * mean**3
    about4 = fourth - 4.0 * mean * third + 6.0 * mean**2 * second - 3.0 * mean**4
    return ratio(about3, spread**3), ratio(about4, spread**4, empty=3.0) - 3.0
