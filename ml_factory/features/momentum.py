"""Momentum and trend: where the price went, and how straight.

Sources: Wilder, New Concepts in Technical Trading Systems (1978) for RSI, ADX and DI; Appel for MACD; Lane for the
stochastic; Lambert for CCI; Chande for Aroon; Williams for the ultimate oscillator; Kaufman for the efficiency ratio;
Botes and Siepman for the vortex. Those that have a scale keep the one they are published with (RSI 0 to 100); prices
are divided by the average true range.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import Family
from ml_factory.features.windows import (
    HISTORY,
    bars_since_max,
    deviation,
    ratio,
    recursive_means,
    window_covariance,
    window_max,
    window_min,
    window_std,
    window_sum,
)

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


@njit(cache=True, nogil=True)
def _kernel(b, state, out, coarse):
    x = _means(b, state[:_MEANS])
    spread = deviation(b.ret, 48, b.t0, HISTORY)
    for place, n in enumerate((1, 4, 12)):
        normal_return(b.log_close, spread, n, out[place])
    rsi(x[_GAIN_14], x[_LOSS_14], out[3])
    second = _means_of_means(x, state[_MEANS : _MEANS + 2])
    macd(x[_EMA_12], x[_EMA_26], second[_SIGNAL], b.atr, out[4], out[5])
    out[6] = second[_DX, HISTORY:]  # ADX 14, in points of 100; 0 where nothing moved (TA-Lib ADX)
    directional(x[_PLUS], x[_MINUS], b.atr, out[7])
    cci(b.high, b.low, b.close, 20, b.t0, out[8])
    out[9] = stochastic(b, 14, HISTORY)[HISTORY:]
    efficiency(b.close, 24, b.t0, out[10])
    vortex(b, 14, out[11])
    if coarse:
        return
    for place, n in enumerate((2, 24, 48)):
        normal_return(b.log_close, spread, n, out[12 + place])
    rsi(x[_GAIN_5], x[_LOSS_5], out[15])
    out[16] = window_sum(stochastic(b, 14, HISTORY - 8), 3, b.t0, HISTORY)[HISTORY:] / 3.0
    out[17] = stochastic(b, 48, HISTORY)[HISTORY:]
    ultimate(b, out[18])
    out[19] = (100.0 / 25.0) * (bars_since_max(-b.low, 26, b.t0, HISTORY) - bars_since_max(b.high, 26, b.t0, HISTORY))[
        HISTORY:
    ]
    regression(b, 24, out[20], out[21])
    for i in range(HISTORY, len(b.close)):
        out[22, i - HISTORY] = (b.close[i] - x[_EMA_20, i]) / b.atr[i]
        out[23, i - HISTORY] = (x[_EMA_20, i] - x[_EMA_50, i]) / b.atr[i]
    streak(b.close, state[_STREAK], out[24])


FAMILY = Family(names=_names, kernel=_kernel, recursions=13)


@njit(cache=True, nogil=True)
def _means(b, state):
    """float64[_MEANS, M]: Wilder's means of gains, losses and directional moves, and exponential means of the close."""
    x = np.empty((_MEANS, len(b.close)))
    for i in range(HISTORY, len(b.close)):
        change = b.close[i] - b.close[i - 1]
        up, down = b.high[i] - b.high[i - 1], b.low[i - 1] - b.low[i]
        started = 0.0 * change  # NaN in the first row
        x[_GAIN_14, i] = x[_GAIN_5, i] = max(change, 0.0) + started
        x[_LOSS_14, i] = x[_LOSS_5, i] = max(-change, 0.0) + started
        x[_PLUS, i] = (up if up > down and up > 0.0 else 0.0) + started
        x[_MINUS, i] = (down if down > up and down > 0.0 else 0.0) + started
        x[_EMA_12, i] = x[_EMA_26, i] = x[_EMA_20, i] = x[_EMA_50, i] = b.close[i]
    n = np.array([14.0, 14.0, 14.0, 14.0, 5.0, 5.0, 12.0, 26.0, 20.0, 50.0])
    alpha = np.append(1.0 / n[:_EMA_12], 2.0 / (n[_EMA_12:] + 1.0))
    recursive_means(x, n, alpha, state)
    return x


@njit(cache=True, nogil=True)
def _means_of_means(x, state):
    """float64[2, M]: Wilder's mean of the directional index, and the exponential mean of the MACD line."""
    second = np.empty((2, x.shape[1]))
    for i in range(HISTORY, x.shape[1]):
        plus, minus = x[_PLUS, i], x[_MINUS, i]
        second[_DX, i] = 100.0 * ratio(abs(plus - minus), plus + minus, 0.0)
        second[_SIGNAL, i] = x[_EMA_12, i] - x[_EMA_26, i]
    recursive_means(second, np.array([14.0, 9.0]), np.array([1.0 / 14.0, 0.2]), state)
    return second


@njit(cache=True, nogil=True)
def normal_return(log_close, spread, n, out):
    """Log return over n bars in units of what n bars of the last 48 bars' deviation would give."""
    scale = math.sqrt(n)
    for i in range(HISTORY, len(log_close)):
        out[i - HISTORY] = (log_close[i] - log_close[i - n]) / (spread[i] * scale)


@njit(cache=True, nogil=True)
def rsi(gain, loss, out):
    """Relative strength index, 0 to 100, from Wilder's means; 50 where nothing moved (TA-Lib RSI)."""
    for i in range(HISTORY, len(gain)):
        out[i - HISTORY] = 100.0 * ratio(gain[i], gain[i] + loss[i], 0.5)


@njit(cache=True, nogil=True)
def macd(fast, slow, signal, atr, out_line, out_histogram):
    """(MACD, MACD minus its mean of 9) in ATRs, from the exponential means of 12 and 26 (TA-Lib MACD)."""
    for i in range(HISTORY, len(fast)):
        line = fast[i] - slow[i]
        out_line[i - HISTORY] = line / atr[i]
        out_histogram[i - HISTORY] = (line - signal[i]) / atr[i]


@njit(cache=True, nogil=True)
def directional(plus, minus, atr, out):
    """+DI minus -DI in points of 100; 0 where nothing moved (TA-Lib PLUS_DI, MINUS_DI)."""
    for i in range(HISTORY, len(plus)):
        out[i - HISTORY] = 100.0 * (plus[i] - minus[i]) / atr[i]


@njit(cache=True, nogil=True)
def cci(high, low, close, n, t0, out):
    """Commodity channel index of the typical price; 0 where the last n are all equal (TA-Lib CCI)."""
    typical = (high + low + close) / 3.0
    mean = window_sum(typical, n, t0, HISTORY)
    deviation = np.zeros(len(close))
    for i in range(HISTORY, len(close)):
        mean[i] /= n
    middle, total = mean[HISTORY:], deviation[HISTORY:]
    for k in range(n):
        older = typical[HISTORY - k :]
        for i in range(len(total)):
            total[i] += abs(older[i] - middle[i])
    for i in range(HISTORY, len(close)):
        moved = deviation[i] / n
        # A third of a sum is rounded: prices that are equal may deviate by their last bits, and that is no move.
        still = moved < 1e-12 * typical[i]
        out[i - HISTORY] = 0.0 if still else (typical[i] - mean[i]) / (0.015 * moved)


@njit(cache=True, nogil=True)
def stochastic(b, n, first):
    """Place of the close in the last n bars' range, 0 to 100; 50 where there is none (TA-Lib STOCHF %K)."""
    out = window_min(b.low, n, b.t0, first)
    top = window_max(b.high, n, b.t0, first)
    for i in range(first, len(out)):
        out[i] = 100.0 * ratio(b.close[i] - out[i], top[i] - out[i], 0.5)
    return out


@njit(cache=True, nogil=True)
def efficiency(close, n, t0, out):
    """Kaufman's efficiency ratio with its sign: net move over path length, -1 to 1."""
    step = np.empty(len(close))
    step[0] = np.nan
    step[1:] = np.abs(close[1:] - close[:-1])
    path = window_sum(step, n, t0, HISTORY)
    for i in range(HISTORY, len(close)):
        out[i - HISTORY] = ratio(close[i] - close[i - n], path[i], 0.0)


@njit(cache=True, nogil=True)
def vortex(b, n, out):
    """Positive minus negative vortex: (sum |high - low before| - sum |low - high before|) / sum of true ranges."""
    difference = np.empty(len(b.close))
    difference[0] = np.nan
    difference[1:] = np.abs(b.high[1:] - b.low[:-1]) - np.abs(b.low[1:] - b.high[:-1])
    moved, path = window_sum(difference, n, b.t0, HISTORY), window_sum(b.span, n, b.t0, HISTORY)
    for i in range(HISTORY, len(moved)):
        out[i - HISTORY] = ratio(moved[i], path[i], 0.0)


@njit(cache=True, nogil=True)
def ultimate(b, out):
    """Williams' ultimate oscillator of 7, 14 and 28 bars, 0 to 100 (TA-Lib ULTOSC)."""
    pressure = np.empty(len(b.close))
    pressure[0] = np.nan
    for i in range(1, len(pressure)):
        pressure[i] = b.close[i] - min(b.low[i], b.close[i - 1]) + 0.0 * b.close[i - 1]
    out[:] = 0.0
    for n, weight in ((7, 4.0), (14, 2.0), (28, 1.0)):
        bought, path = window_sum(pressure, n, b.t0, HISTORY), window_sum(b.span, n, b.t0, HISTORY)
        for i in range(HISTORY, len(pressure)):
            out[i - HISTORY] += weight * (100.0 / 7.0) * ratio(bought[i], path[i], 0.5)


@njit(cache=True, nogil=True)
def aroon(b, n, out):
    """Aroon up minus down over n + 1 bars, -100 to 100 (TA-Lib AROONOSC)."""
    since_low = bars_since_max(-b.low, n + 1, b.t0, HISTORY)
    since_high = bars_since_max(b.high, n + 1, b.t0, HISTORY)
    for i in range(HISTORY, len(since_low)):
        out[i - HISTORY] = 100.0 * (since_low[i] - since_high[i]) / n


@njit(cache=True, nogil=True)
def regression(b, n, out_slope, out_fit):
    """(slope per bar in ATRs, signed share of variance explained) of a line through n closes."""
    time = np.arange(len(b.close)) + 0.0
    together = window_covariance(b.close, time, n, b.t0, HISTORY)
    deviation = window_std(b.close, n, b.t0, HISTORY)
    spread = (n * n - 1) / 12.0  # population variance of n consecutive integers
    for i in range(HISTORY, len(time)):
        out_slope[i - HISTORY] = together[i] / (spread * b.atr[i])
        explained = ratio(together[i] * abs(together[i]), spread * deviation[i] * deviation[i], 0.0)
        out_fit[i - HISTORY] = min(max(explained, -1.0), 1.0)


@njit(cache=True, nogil=True)
def streak(close, state, out):
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
