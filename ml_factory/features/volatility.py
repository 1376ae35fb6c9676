"""Volatility features: size and shape of price moves.

Sources: Wilder (1978) for ATR; Bollinger; Donchian; Carter (2005) for the squeeze; Dreiss for choppiness; Parkinson
(1980); Garman and Klass (1980); Rogers and Satchell (1991); Yang and Zhang (2000); RiskMetrics (1996) for the
exponential variance; Barndorff-Nielsen and Shephard (2004) and Andersen, Dobrev and Schaumburg (2012) for shares of
jumps; Barndorff-Nielsen, Kinnebrock and Shephard (2010) for the semivariance; Black (1976) for the leverage effect;
Ding, Granger and Engle (1993) for clustering. Estimators of one window say nearly the same thing, so each is stored
as the logarithm of its ratio to a simpler one.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.ewm import ewm_means
from ml_factory.features.rolling import (
    FLOOR,
    HISTORY,
    elementwise_abs,
    elementwise_difference,
    elementwise_product,
    lag,
    rolling_coefficient_of_variation,
    rolling_max,
    rolling_min,
    rolling_std,
    rolling_sum,
    safe_ratio,
    write_rolling_correlation,
)
from ml_factory.features.rolling_std_slope import (
    double_rolling_moments,
    rolling_moments_of_three,
    rolling_std_from_moments,
)
from ml_factory.features.vector_log import vectorized_log

COARSE = (
    "natr_14", "bollinger_place_20", "bollinger_width_20", "choppiness_14", "downside_share_48", "parkinson_ratio_24",
    "deviation_ratio_6_48",
)  # fmt: skip
BASE = (
    "garman_klass_ratio_24", "rogers_satchell_ratio_24", "yang_zhang_ratio_24", "deviation_ratio_24_96",
    "jump_share_48", "range_surprise_14", "range_dispersion_48", "skew_48", "kurtosis_48", "median_jump_share_48",
    "downside_share_12", "ewma_ratio_48", "deviation_dispersion_12_48", "squeeze_20", "channel_width_48",
    "range_asymmetry_24", "atr_place_96", "leverage_48", "clustering_48",
)  # fmt: skip

DECAY = 0.94
"""Weight of yesterday's variance in RiskMetrics' (1996) daily model; kept for bars of any length."""
_PARKINSON, _GARMAN_KLASS, _ROGERS_SATCHELL = range(3)


def _names(market, coarse):
    return COARSE if coarse else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    mean, spread = rolling_moments_of_three(b.ret, HISTORY - 105)
    mean, spread_6 = double_rolling_moments(mean, spread, 3, HISTORY - 102)
    mean, spread_12 = double_rolling_moments(
        mean, spread_6, 6, HISTORY - 96
    )  # a window of 48 of them looks back so far
    mean, spread_24 = double_rolling_moments(mean, spread_12, 12, HISTORY - 72)
    mean, spread_48 = double_rolling_moments(mean, spread_24, 24, HISTORY - 48)
    plain_24, plain_48 = (
        rolling_std_from_moments(spread_24, 24, HISTORY),
        rolling_std_from_moments(spread_48, 48, HISTORY),
    )
    variances, size = range_variance_estimators(b.log_open, b.log_high, b.log_low, b.log_close), elementwise_abs(b.ret)
    squares = elementwise_product(size, size)
    realised = rolling_sum(squares, 48, b.t0, HISTORY)
    spread_20 = rolling_std(b.close, 20, b.t0, HISTORY)
    parkinson = _deviation_from_variances(variances[_PARKINSON], 24, b.t0)
    _natr(b.atr, b.close, out[0])
    _bollinger_bands(b, 20, spread_20, out[1], out[2])
    _choppiness_index(b, 14, out[3])
    _downside_variance_share(b.ret, realised, 48, b.t0, out[4])
    _log_deviation_ratio(parkinson, plain_24, out[5])
    _log_deviation_ratio(rolling_std_from_moments(spread_6, 6, HISTORY), plain_48, out[6])
    if coarse:
        return
    _, spread_96 = double_rolling_moments(mean, spread_48, 48, HISTORY)
    garman_klass = _deviation_from_variances(variances[_GARMAN_KLASS], 24, b.t0)
    _log_deviation_ratio(garman_klass, parkinson, out[7])
    _log_deviation_ratio(_deviation_from_variances(variances[_ROGERS_SATCHELL], 24, b.t0), garman_klass, out[8])
    _log_deviation_ratio(_yang_zhang_volatility(b, variances[_ROGERS_SATCHELL], 24), plain_24, out[9])
    _log_deviation_ratio(plain_24, rolling_std_from_moments(spread_96, 96, HISTORY), out[10])
    _jump_variance_share(size, realised, 48, b.t0, out[11])
    _range_surprise(b, out[12])
    rolling_coefficient_of_variation(b.span, 48, b.t0, out[13])
    _return_skewness_and_kurtosis(b.ret, 48, b.t0, out[14], out[15])
    _median_jump_variance_share(size, realised, 48, b.t0, out[16])
    _downside_variance_share(b.ret, rolling_sum(squares, 12, b.t0, HISTORY), 12, b.t0, out[17])
    _ewma_volatility_ratio(squares, plain_48, 48, state[:1], out[18])
    rolling_coefficient_of_variation(rolling_std_from_moments(spread_12, 12, HISTORY - 96), 48, b.t0, out[19])
    _squeeze_and_channel_width(b, 48, spread_20, out[20], out[21])
    _bar_range_asymmetry(b, 24, out[22])
    _window_range_position(b.atr, 96, b.t0, out[23])
    before = lag(b.ret)
    write_rolling_correlation(before, size, 48, b.t0, out[24])
    write_rolling_correlation(elementwise_abs(before), size, 48, b.t0, out[25])


FAMILY = FeatureFamily(names=_names, kernel=_kernel, recursions=1)


@njit(cache=True, nogil=True, error_model="numpy")
def _log_deviation_ratio(a, b, out):
    """log(a / b) of two deviations, each at least FLOOR."""
    a, b, share = a[HISTORY:], b[HISTORY:], np.empty(len(out))
    for i in range(len(share)):
        share[i] = a[i] / b[i]
    vectorized_log(share, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _natr(atr, close, out):
    """ATR in percent of the price (TA-Lib NATR)."""
    atr, close = atr[HISTORY:], close[HISTORY:]
    for i in range(len(out)):
        out[i] = 100.0 * atr[i] / close[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _bollinger_bands(b, n, spread, out_place, out_width):
    """(%b - 1/2, band width over the middle) for bands of 2 deviations (TA-Lib BBANDS); 0 where the bands meet."""
    total, close, spread = rolling_sum(b.close, n, b.t0, HISTORY)[HISTORY:], b.close[HISTORY:], spread[HISTORY:]
    for i in range(len(close)):
        out_place[i] = safe_ratio(close[i] - total[i] / n, 4.0 * spread[i], 0.0)
        out_width[i] = 4.0 * n * spread[i] / total[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _choppiness_index(b, n, out):
    """log(sum of true ranges / range of the n bars) / log(n): 0 in one straight move, 1 going nowhere."""
    path, before = rolling_sum(b.span, n, b.t0, HISTORY)[HISTORY:], b.close[HISTORY - n :]
    top, bottom = rolling_max(b.high, n, b.t0, HISTORY)[HISTORY:], rolling_min(b.low, n, b.t0, HISTORY)[HISTORY:]
    scale, share = 1.0 / math.log(n), np.empty(len(path))
    for i in range(len(path)):
        share[i] = safe_ratio(path[i], max(top[i], before[i]) - min(bottom[i], before[i]), 1.0)
    vectorized_log(share, out)
    for i in range(len(path)):
        out[i] *= scale


@njit(cache=True, nogil=True, error_model="numpy")
def _downside_variance_share(ret, realised, n, t0, out):
    """Share of squared returns that came from falls, less 1/2; 0 where nothing moved.

    realised : sum of n squared returns. Barndorff-Nielsen, Kinnebrock and Shephard (2010): RS- / RV.
    """
    falls = np.empty(len(ret))
    for i in range(len(ret)):
        falls[i] = 0.0 if ret[i] > 0.0 else ret[i] * ret[i]
    falls, realised = rolling_sum(falls, n, t0, HISTORY)[HISTORY:], realised[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(falls[i], realised[i], 0.5) - 0.5


@njit(cache=True, nogil=True, error_model="numpy")
def range_variance_estimators(log_open, log_high, log_low, log_close):
    """float64[3, M]: the variance of a bar estimated from each bar alone, by the three range estimators.

    Parkinson (1980), eq. 4: log(h/l)^2 / (4 log 2). Garman and Klass (1980), eq. 20: log(h/l)^2 / 2 -
    (2 log 2 - 1) log(c/o)^2. Rogers and Satchell (1991), free of drift: u (u - c) + d (d - c).
    """
    out = np.empty((3, len(log_open)))
    for i in range(len(log_open)):
        up, down, body = log_high[i] - log_open[i], log_low[i] - log_open[i], log_close[i] - log_open[i]
        span = log_high[i] - log_low[i]
        out[_PARKINSON, i] = span * span / (4.0 * math.log(2.0))
        out[_GARMAN_KLASS, i] = 0.5 * span * span - (2.0 * math.log(2.0) - 1.0) * body * body
        out[_ROGERS_SATCHELL, i] = up * (up - body) + down * (down - body)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _deviation_from_variances(variance, n, t0):
    """Deviation per bar from n bars' variances, at least FLOOR; rounding may leave a variance a hair below 0."""
    out = rolling_sum(variance, n, t0, HISTORY)
    rows = out[HISTORY:]
    for i in range(len(rows)):
        rows[i] = _root(rows[i] / n)
    return out


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _root(variance):
    return math.sqrt(FLOOR * FLOOR if variance < FLOOR * FLOOR else variance)


@njit(cache=True, nogil=True, error_model="numpy")
def _yang_zhang_volatility(b, inner, n):
    """Yang and Zhang (2000), eq. 7: V(open jump) + k V(open to close) + (1 - k) V(Rogers-Satchell), alpha = 1.34."""
    body = rolling_std(elementwise_difference(b.log_close, b.log_open), n, b.t0, HISTORY)[HISTORY:]
    jump = rolling_std(elementwise_difference(b.log_open, lag(b.log_close)), n, b.t0, HISTORY)[HISTORY:]
    k, unbiased = 0.34 / (1.34 + (n + 1.0) / (n - 1.0)), n / (n - 1.0)
    out = rolling_sum(inner, n, b.t0, HISTORY)
    rows = out[HISTORY:]
    for i in range(len(rows)):
        rows[i] = _root(unbiased * (jump[i] * jump[i] + k * body[i] * body[i]) + (1.0 - k) * rows[i] / n)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _jump_variance_share(size, realised, n, t0, out):
    """1 - bipower over realised variance: near 0 in a diffusion, near 1 after one jump; 0 where nothing moved."""
    bipower, realised = (
        rolling_sum(elementwise_product(size, lag(size)), n - 1, t0, HISTORY)[HISTORY:],
        realised[HISTORY:],
    )
    for i in range(len(out)):
        out[i] = 1.0 - safe_ratio((math.pi / 2.0) * (n / (n - 1.0)) * bipower[i], realised[i], 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _median_jump_variance_share(size, realised, n, t0, out):
    """1 - MedRV over realised variance, Andersen, Dobrev and Schaumburg (2012): it bears two jumps in a row."""
    middle = np.full(len(size), np.nan)
    oldest, older, rows = size[:-2], size[1:-1], middle[2:]
    newest = size[2:]
    for i in range(len(rows)):
        a, b, c = oldest[i], older[i], newest[i]
        median = max(min(a, b), min(max(a, b), c)) + 0.0 * a  # a missing value stays missing
        rows[i] = median * median
    middle, realised = rolling_sum(middle, n - 2, t0, HISTORY)[HISTORY:], realised[HISTORY:]
    scale = math.pi / (6.0 - 4.0 * math.sqrt(3.0) + math.pi) * n / (n - 2.0)
    for i in range(len(out)):
        out[i] = 1.0 - safe_ratio(scale * middle[i], realised[i], 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _range_surprise(b, out):
    """True range over the ATR before it, less 1."""
    span, usual = b.span[HISTORY:], b.atr[HISTORY - 1 :]
    for i in range(len(out)):
        out[i] = span[i] / usual[i] - 1.0


@njit(cache=True, nogil=True, error_model="numpy")
def _return_skewness_and_kurtosis(x, n, t0, out_skewness, out_kurtosis):
    """(skewness, excess kurtosis) of the last n values, population moments; 0 where nothing moved."""
    first, second, third, fourth = _power_sums(x, n, t0)
    for i in range(len(out_skewness)):
        m1, m2, m3, m4 = first[i] / n, second[i] / n, third[i] / n, fourth[i] / n
        square = m1 * m1
        variance = m2 - square
        variance = 0.0 if variance < 0.0 else variance
        about3 = m3 - 3.0 * m1 * m2 + 2.0 * square * m1
        about4 = m4 - 4.0 * m1 * m3 + 6.0 * square * m2 - 3.0 * square * square
        out_skewness[i] = safe_ratio(about3, variance * math.sqrt(variance), 0.0)
        out_kurtosis[i] = safe_ratio(about4, variance * variance, 3.0) - 3.0


@njit(cache=True, nogil=True, error_model="numpy")
def _power_sums(x, n, t0):
    """Sums over n values of the first four powers, measured from the aligned block's first, as in `rolling_std`."""
    out = np.empty((4, len(x)))
    tail_1, tail_2, tail_3, tail_4 = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for start in range(HISTORY - t0 % n, len(x), n):
        older, newer, rows, origin = x[start - n : start], x[start : start + n], out[:, start : start + n], x[start]
        row_1, row_2, row_3, row_4 = rows[0], rows[1], rows[2], rows[3]
        s1, s2, s3, s4 = 0.0, 0.0, 0.0, 0.0
        for k in range(n - 1, 0, -1):
            d = older[k] - origin
            s1, s2, s3, s4 = s1 + d, s2 + d * d, s3 + d * d * d, s4 + d * d * d * d
            tail_1[k], tail_2[k], tail_3[k], tail_4[k] = s1, s2, s3, s4
        s1, s2, s3, s4 = 0.0, 0.0, 0.0, 0.0
        for k in range(len(newer)):
            d = newer[k] - origin
            s1, s2, s3, s4 = s1 + d, s2 + d * d, s3 + d * d * d, s4 + d * d * d * d
            row_1[k], row_2[k] = s1 + tail_1[k + 1], s2 + tail_2[k + 1]
            row_3[k], row_4[k] = s3 + tail_3[k + 1], s4 + tail_4[k + 1]
    return out[0, HISTORY:], out[1, HISTORY:], out[2, HISTORY:], out[3, HISTORY:]


@njit(cache=True, nogil=True, error_model="numpy")
def _ewma_volatility_ratio(squares, plain, n, state, out):
    """log of RiskMetrics' exponential deviation, started at the mean of n squared returns, over the plain one."""
    x = np.empty((1, len(squares)))
    x[0, HISTORY:] = squares[HISTORY:]
    ewm_means(x, np.full(1, float(n)), np.full(1, 1.0 - DECAY), state)
    rows = x[0, HISTORY:]
    for i in range(len(rows)):
        rows[i] = _root(rows[i])
    _log_deviation_ratio(x[0], plain, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _squeeze_and_channel_width(b, n, spread, out_squeeze, out_channel):
    """(Bollinger over Keltner width less 1, Donchian width over sqrt(bars) ATRs less 1).

    Carter's bands: 2 deviations of 20 closes, `spread`, against 1.5 ATRs.
    """
    top, bottom = rolling_max(b.high, n, b.t0, HISTORY)[HISTORY:], rolling_min(b.low, n, b.t0, HISTORY)[HISTORY:]
    spread, atr, path = spread[HISTORY:], b.atr[HISTORY:], math.sqrt(n)
    for i in range(len(atr)):
        out_squeeze[i] = 2.0 * spread[i] / (1.5 * atr[i]) - 1.0
        out_channel[i] = (top[i] - bottom[i]) / (path * atr[i]) - 1.0


@njit(cache=True, nogil=True, error_model="numpy")
def _bar_range_asymmetry(b, n, out):
    """Asymmetry of n bars around their opens: (sum up - sum down) / sum of ranges, -1 to 1."""
    both, more = (
        elementwise_difference(b.high, b.low),
        elementwise_difference(elementwise_difference(b.high, b.open), elementwise_difference(b.open, b.low)),
    )
    both, more = rolling_sum(both, n, b.t0, HISTORY)[HISTORY:], rolling_sum(more, n, b.t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(more[i], both[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _window_range_position(x, n, t0, out):
    """Place of x in the range of its last n values, less 1/2; 0 where it did not move."""
    top, bottom = rolling_max(x, n, t0, HISTORY)[HISTORY:], rolling_min(x, n, t0, HISTORY)[HISTORY:]
    x = x[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(x[i] - bottom[i], top[i] - bottom[i], 0.5) - 0.5
