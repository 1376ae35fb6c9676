"""Momentum and trend features: direction and straightness of price moves.

Sources: Wilder, New Concepts in Technical Trading Systems (1978) for RSI, ADX and DI; Appel for MACD; Lane for the
stochastic; Lambert for CCI; Chande for Aroon; Williams for the ultimate oscillator; Kaufman for the efficiency ratio;
Botes and Siepman for the vortex. Those that have a scale keep the one they are published with (RSI 0 to 100); prices
are divided by the average true range.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.ewm import ewm_means
from ml_factory.features.rolling import (
    HISTORY,
    bars_since_rolling_max,
    doubled_window_sum,
    elementwise_abs,
    elementwise_difference,
    lag,
    rolling_max,
    rolling_min,
    rolling_sum,
    safe_ratio,
)
from ml_factory.features.rolling_std_slope import rolling_slope_sums_24, rolling_std_48

COARSE = (
    "return_1", "return_4", "return_12", "rsi_14", "macd_12_26", "macd_histogram_9", "adx_14", "di_14", "cci_20",
    "stochastic_14", "efficiency_24", "vortex_14",
)  # fmt: skip
BASE = (
    "return_2", "return_24", "return_48", "rsi_5", "stochastic_slow_14_3", "channel_48", "ultimate_7_14_28",
    "aroon_25", "slope_24", "slope_fit_24", "ema_gap_20", "ema_gap_20_50", "streak",
)  # fmt: skip

# Places of the recursions in the state.
_GAIN_14, _LOSS_14, _PLUS, _MINUS, _GAIN_5, _LOSS_5, _EMA_12, _EMA_26, _EMA_20, _EMA_50 = range(10)
_MEANS, _STREAK = 10, 12
_DX, _SIGNAL = range(2)


def _names(market, coarse):
    return COARSE if coarse else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    x = _means(b, state[:_MEANS])
    # One division each instead of six: rows times these are returns in deviations and prices in ATRs.
    per_spread, per_atr = _inverse_after_history(rolling_std_48(b.ret, HISTORY)), _inverse_after_history(b.atr)
    for place, n in enumerate((1, 4, 12)):
        _volatility_scaled_momentum(b.log_close, per_spread, n, out[place])
    rsi(x[_GAIN_14], x[_LOSS_14], out[3])
    second = _means_of_means(x, state[_MEANS : _MEANS + 2])
    _macd(x[_EMA_12], x[_EMA_26], second[_SIGNAL], per_atr, out[4], out[5])
    out[6] = second[_DX, HISTORY:]  # ADX 14, in points of 100; 0 where nothing moved (TA-Lib ADX)
    _directional_indicator_difference(x[_PLUS], x[_MINUS], per_atr, out[7])
    cci(b.high, b.low, b.close, 20, b.t0, out[8])
    place_14 = _stochastic_oscillator(b, 14, HISTORY - 8)
    out[9] = place_14[HISTORY:]
    _kaufman_efficiency_ratio(b.close, 24, b.t0, out[10])
    _vortex_indicator(b, 14, out[11])
    if coarse:
        return
    for place, n in enumerate((2, 24, 48)):
        _volatility_scaled_momentum(b.log_close, per_spread, n, out[12 + place])
    rsi(x[_GAIN_5], x[_LOSS_5], out[15])
    out[16] = rolling_sum(place_14, 3, b.t0, HISTORY)[HISTORY:] / 3.0
    out[17] = _stochastic_oscillator(b, 48, HISTORY)[HISTORY:]
    ultimate_oscillator(b, out[18])
    aroon(b, 25, out[19])
    _linear_trend_slope_and_fit(b.close, per_atr, out[20], out[21])
    close, ema_20, ema_50 = b.close[HISTORY:], x[_EMA_20, HISTORY:], x[_EMA_50, HISTORY:]
    gap, trend = out[22], out[23]
    for i in range(len(close)):
        gap[i] = (close[i] - ema_20[i]) * per_atr[i]
        trend[i] = (ema_20[i] - ema_50[i]) * per_atr[i]
    _close_streak(b.close, state[_STREAK], out[24])


FAMILY = FeatureFamily(names=_names, kernel=_kernel, recursions=13)


@njit(cache=True, nogil=True, error_model="numpy")
def _means(b, state):
    """float64[_MEANS, M]: Wilder's means of gains, losses and directional moves, and exponential means of the close."""
    x = np.empty((_MEANS, len(b.close)))
    close, high, low = b.close[HISTORY:], b.high[HISTORY:], b.low[HISTORY:]
    before, high_before, low_before = b.close[HISTORY - 1 :], b.high[HISTORY - 1 :], b.low[HISTORY - 1 :]
    gain, loss, plus, minus = x[_GAIN_14, HISTORY:], x[_LOSS_14, HISTORY:], x[_PLUS, HISTORY:], x[_MINUS, HISTORY:]
    for i in range(len(close)):
        change = close[i] - before[i]
        started = 0.0 * change  # NaN in the first row
        gain[i] = max(change, 0.0) + started
        loss[i] = max(-change, 0.0) + started
    for i in range(len(close)):
        up, down, started = high[i] - high_before[i], low_before[i] - low[i], 0.0 * before[i]
        plus[i] = (up if (up > down) & (up > 0.0) else 0.0) + started
        minus[i] = (down if (down > up) & (down > 0.0) else 0.0) + started
    x[_GAIN_5], x[_LOSS_5] = x[_GAIN_14], x[_LOSS_14]
    x[_EMA_12], x[_EMA_26], x[_EMA_20], x[_EMA_50] = b.close, b.close, b.close, b.close
    n = np.array([14.0, 14.0, 14.0, 14.0, 5.0, 5.0, 12.0, 26.0, 20.0, 50.0])
    alpha = np.append(1.0 / n[:_EMA_12], 2.0 / (n[_EMA_12:] + 1.0))
    ewm_means(x, n, alpha, state)
    return x


@njit(cache=True, nogil=True, error_model="numpy")
def _means_of_means(x, state):
    """float64[2, M]: Wilder's mean of the directional index, and the exponential mean of the MACD line."""
    second = np.empty((2, x.shape[1]))
    plus, minus, fast, slow = x[_PLUS, HISTORY:], x[_MINUS, HISTORY:], x[_EMA_12, HISTORY:], x[_EMA_26, HISTORY:]
    index, line = second[_DX, HISTORY:], second[_SIGNAL, HISTORY:]
    for i in range(len(index)):
        index[i] = 100.0 * safe_ratio(abs(plus[i] - minus[i]), plus[i] + minus[i], 0.0)
        line[i] = fast[i] - slow[i]
    ewm_means(second, np.array([14.0, 9.0]), np.array([1.0 / 14.0, 0.2]), state)
    return second


@njit(cache=True, nogil=True, error_model="numpy")
def _inverse_after_history(x):
    """1 / x of the rows after the history."""
    x = x[HISTORY:]
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = 1.0 / x[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _volatility_scaled_momentum(log_close, per_spread, n, out):
    """Log return over n bars in units of what n bars of the last 48 bars' deviation would give."""
    scale, now, before = 1.0 / math.sqrt(n), log_close[HISTORY:], log_close[HISTORY - n :]
    for i in range(len(out)):
        out[i] = (now[i] - before[i]) * (per_spread[i] * scale)


@njit(cache=True, nogil=True, error_model="numpy")
def rsi(gain, loss, out):
    """Relative strength index, 0 to 100, from Wilder's means; 50 where nothing moved (TA-Lib RSI)."""
    gain, loss = gain[HISTORY:], loss[HISTORY:]
    for i in range(len(out)):
        out[i] = 100.0 * safe_ratio(gain[i], gain[i] + loss[i], 0.5)


@njit(cache=True, nogil=True, error_model="numpy")
def _macd(fast, slow, signal, per_atr, out_line, out_histogram):
    """(MACD, MACD minus its mean of 9) in ATRs, from the exponential means of 12 and 26 (TA-Lib MACD)."""
    fast, slow, signal = fast[HISTORY:], slow[HISTORY:], signal[HISTORY:]
    for i in range(len(fast)):
        line = fast[i] - slow[i]
        out_line[i] = line * per_atr[i]
        out_histogram[i] = (line - signal[i]) * per_atr[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _directional_indicator_difference(plus, minus, per_atr, out):
    """+DI minus -DI in points of 100; 0 where nothing moved (TA-Lib PLUS_DI, MINUS_DI)."""
    plus, minus = plus[HISTORY:], minus[HISTORY:]
    for i in range(len(out)):
        out[i] = 100.0 * (plus[i] - minus[i]) * per_atr[i]


@njit(cache=True, nogil=True, error_model="numpy")
def cci(high, low, close, n, t0, out):
    """Commodity channel index of the typical price, n a multiple of 4; 0 where the last n are equal (TA-Lib CCI)."""
    typical = np.empty(len(close))
    for i in range(len(typical)):
        typical[i] = (high[i] + low[i] + close[i]) / 3.0
    mean, now = rolling_sum(typical, n, t0, HISTORY)[HISTORY:], typical[HISTORY:]
    for i in range(len(mean)):
        mean[i] /= n
    # Rows in parts: their sums stay in the nearest cache while the n older values come by.
    for begin in range(0, len(mean), 512):
        middle = mean[begin : begin + 512]
        total = np.zeros(len(middle))
        for k in range(0, n, 4):
            a, b, c, d = (
                typical[HISTORY - k + begin :], typical[HISTORY - k - 1 + begin :],
                typical[HISTORY - k - 2 + begin :], typical[HISTORY - k - 3 + begin :],
            )  # fmt: skip
            for i in range(len(total)):
                near, far = abs(a[i] - middle[i]) + abs(b[i] - middle[i]), abs(c[i] - middle[i]) + abs(d[i] - middle[i])
                total[i] += near + far
        part, rows = now[begin : begin + 512], out[begin : begin + 512]
        for i in range(len(total)):
            moved = total[i] / n
            # A third of a sum is rounded: prices that are equal may deviate by their last bits, and that is no move.
            still = moved < 1e-12 * part[i]
            rows[i] = 0.0 if still else (part[i] - middle[i]) / (0.015 * moved)


@njit(cache=True, nogil=True, error_model="numpy")
def _stochastic_oscillator(b, n, first):
    """Place of the close in the last n bars' range, 0 to 100; 50 where there is none (TA-Lib STOCHF %K)."""
    out = rolling_min(b.low, n, b.t0, first)
    top, rows, close = rolling_max(b.high, n, b.t0, first)[first:], out[first:], b.close[first:]
    for i in range(len(rows)):
        rows[i] = 100.0 * safe_ratio(close[i] - rows[i], top[i] - rows[i], 0.5)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _kaufman_efficiency_ratio(close, n, t0, out):
    """Kaufman's efficiency ratio with its sign: net move over path length, -1 to 1."""
    step = elementwise_abs(elementwise_difference(close, lag(close)))
    path, now, before = rolling_sum(step, n, t0, HISTORY)[HISTORY:], close[HISTORY:], close[HISTORY - n :]
    for i in range(len(out)):
        out[i] = safe_ratio(now[i] - before[i], path[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _vortex_indicator(b, n, out):
    """Positive minus negative vortex: (sum |high - low before| - sum |low - high before|) / sum of true ranges."""
    moved = np.full(len(b.close), np.nan)
    high, low, high_before, low_before, rows = b.high[1:], b.low[1:], b.high[:-1], b.low[:-1], moved[1:]
    for i in range(len(rows)):
        rows[i] = abs(high[i] - low_before[i]) - abs(low[i] - high_before[i])
    moved, path = rolling_sum(moved, n, b.t0, HISTORY)[HISTORY:], rolling_sum(b.span, n, b.t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(moved[i], path[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def ultimate_oscillator(b, out):
    """Williams' ultimate oscillator of 7, 14 and 28 bars, 0 to 100 (TA-Lib ULTOSC)."""
    pressure = np.full(len(b.close), np.nan)
    close, low, before, rows = b.close[1:], b.low[1:], b.close[:-1], pressure[1:]
    for i in range(len(rows)):
        rows[i] = close[i] - min(low[i], before[i]) + 0.0 * before[i]
    bought_7, path_7 = rolling_sum(pressure, 7, b.t0, HISTORY - 21), rolling_sum(b.span, 7, b.t0, HISTORY - 21)
    bought_14, path_14 = doubled_window_sum(bought_7, 7, HISTORY - 14), doubled_window_sum(path_7, 7, HISTORY - 14)
    bought_28, path_28 = (
        doubled_window_sum(bought_14, 14, HISTORY)[HISTORY:],
        doubled_window_sum(path_14, 14, HISTORY)[HISTORY:],
    )
    bought_7, path_7, bought_14, path_14 = bought_7[HISTORY:], path_7[HISTORY:], bought_14[HISTORY:], path_14[HISTORY:]
    for i in range(len(out)):
        short, middle = safe_ratio(bought_7[i], path_7[i], 0.5), safe_ratio(bought_14[i], path_14[i], 0.5)
        out[i] = (100.0 / 7.0) * (4.0 * short + 2.0 * middle + safe_ratio(bought_28[i], path_28[i], 0.5))


@njit(cache=True, nogil=True, error_model="numpy")
def aroon(b, n, out):
    """Aroon up minus down over n + 1 bars, -100 to 100 (TA-Lib AROONOSC)."""
    since_low = bars_since_rolling_max(-b.low, n + 1, b.t0, HISTORY)[HISTORY:]
    since_high = bars_since_rolling_max(b.high, n + 1, b.t0, HISTORY)[HISTORY:]
    scale = 100.0 / n
    for i in range(len(out)):
        out[i] = scale * (since_low[i] - since_high[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _linear_trend_slope_and_fit(close, per_atr, out_slope, out_fit):
    """(slope per bar in ATRs, signed share of variance explained) of a line through 24 closes."""
    rise, _, spread = rolling_slope_sums_24(close, HISTORY)
    rise, spread, times = rise[HISTORY:], spread[HISTORY:], 24.0 * (24.0 * 24.0 - 1.0) / 12.0
    for i in range(len(out_slope)):
        out_slope[i] = rise[i] * (1.0 / times) * per_atr[i]
        explained = safe_ratio(rise[i] * abs(rise[i]), times * spread[i], 0.0)
        out_fit[i] = min(max(explained, -1.0), 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _close_streak(close, state, out):
    """Closes in a row that rose (positive) or fell (negative); 0 after an unchanged one."""
    run = state[0]
    for i in range(HISTORY, len(close)):
        if close[i] > close[i - 1]:
            run = max(run, 0.0) + 1.0
        elif close[i] < close[i - 1]:
            run = min(run, 0.0) - 1.0
        else:
            run = 0.0
        out[i - HISTORY] = run
    state[0] = run
