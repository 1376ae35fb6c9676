"""Sixty standard indicators twice: by TA-Lib, and as two families of the feature engine, written as a user would."""

import math
from collections.abc import Callable

import numpy as np
import talib
from numba import njit

from ml_factory.data.resample import ResampledBars
from ml_factory.features import momentum
from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import (
    HISTORY,
    rolling_correlation,
    rolling_max,
    rolling_min,
    rolling_sum,
    safe_ratio,
)
from ml_factory.features.rolling_std_slope import (
    double_rolling_moments,
    double_rolling_slope_sums,
    rolling_slope_sums_24,
)
from ml_factory.features.volume import money_flow_direction, money_flow_index

_GAIN_14, _LOSS_14, _PLUS, _MINUS, _GAIN_5, _LOSS_5, _EMA_12, _EMA_26, _EMA_20, _EMA_50 = range(10)
_DX, _SIGNAL = 10, 11

TREND = (
    "rsi_14", "rsi_5", "macd", "macd_signal", "macd_histogram", "adx_14", "plus_di_14", "minus_di_14", "dx_14",
    "atr_14", "natr_14", "trange", "ema_12", "ema_26", "ema_20", "ema_50", "apo_12_26", "cci_20", "ultosc_7_14_28",
    "aroonosc_25", "roc_1", "roc_4", "roc_12", "mom_24", "mom_48", "rocp_10", "slope_24", "slope_48", "mfi_14", "bop",
)  # fmt: skip
SPREAD = (
    "sma_5", "sma_10", "sma_20", "sma_50", "sma_100", "std_10", "std_20", "std_50", "var_30", "bands_up_20",
    "bands_low_20", "max_14", "max_48", "max_96", "min_14", "min_48", "min_96", "midprice_14", "willr_48",
    "stochf_k_14", "stochf_d_14_3", "stoch_slow_d_14_3_3", "correl_30", "sum_volume_20", "sma_volume_50",
    "std_volume_20", "typprice", "medprice", "wclprice", "avgprice",
)  # fmt: skip


def by_talib(frame: ResampledBars) -> list[tuple[tuple[str, ...], Callable[[], object]]]:
    """(names, call) pairs: a call makes one series, or as many as it has names."""
    o, h, l, c, v = frame.open, frame.high, frame.low, frame.close, frame.volume  # noqa: E741 - TA-Lib's letters
    t = talib
    listed = [
        ("rsi_14", t.RSI, c, 14), ("rsi_5", t.RSI, c, 5), (("macd", "macd_signal", "macd_histogram"), t.MACD, c),
        ("adx_14", t.ADX, h, l, c, 14), ("plus_di_14", t.PLUS_DI, h, l, c, 14),
        ("minus_di_14", t.MINUS_DI, h, l, c, 14), ("dx_14", t.DX, h, l, c, 14), ("atr_14", t.ATR, h, l, c, 14),
        ("natr_14", t.NATR, h, l, c, 14), ("trange", t.TRANGE, h, l, c), ("ema_12", t.EMA, c, 12),
        ("ema_26", t.EMA, c, 26), ("ema_20", t.EMA, c, 20), ("ema_50", t.EMA, c, 50),
        ("apo_12_26", t.APO, c, 12, 26, 1), ("cci_20", t.CCI, h, l, c, 20), ("ultosc_7_14_28", t.ULTOSC, h, l, c),
        ("aroonosc_25", t.AROONOSC, h, l, 25), ("roc_1", t.ROC, c, 1), ("roc_4", t.ROC, c, 4),
        ("roc_12", t.ROC, c, 12), ("mom_24", t.MOM, c, 24), ("mom_48", t.MOM, c, 48), ("rocp_10", t.ROCP, c, 10),
        ("slope_24", t.LINEARREG_SLOPE, c, 24), ("slope_48", t.LINEARREG_SLOPE, c, 48),
        ("mfi_14", t.MFI, h, l, c, v, 14), ("bop", t.BOP, o, h, l, c),
        *((f"sma_{n}", t.SMA, c, n) for n in (5, 10, 20, 50, 100)),
        *((f"std_{n}", t.STDDEV, c, n) for n in (10, 20, 50)),
        ("var_30", t.VAR, c, 30), (("bands_up_20", "", "bands_low_20"), t.BBANDS, c, 20),
        *((f"max_{n}", t.MAX, h, n) for n in (14, 48, 96)), *((f"min_{n}", t.MIN, l, n) for n in (14, 48, 96)),
        ("midprice_14", t.MIDPRICE, h, l, 14), ("willr_48", t.WILLR, h, l, c, 48),
        (("stochf_k_14", "stochf_d_14_3"), t.STOCHF, h, l, c, 14, 3),
        (("", "stoch_slow_d_14_3_3"), t.STOCH, h, l, c, 14, 3, 0, 3, 0), ("correl_30", t.CORREL, h, l, 30),
        ("sum_volume_20", t.SUM, v, 20), ("sma_volume_50", t.SMA, v, 50), ("std_volume_20", t.STDDEV, v, 20),
        ("typprice", t.TYPPRICE, h, l, c), ("medprice", t.MEDPRICE, h, l), ("wclprice", t.WCLPRICE, h, l, c),
        ("avgprice", t.AVGPRICE, o, h, l, c),
    ]  # fmt: skip
    return [
        ((names,) if isinstance(names, str) else names, lambda function=function, given=given: function(*given))
        for names, function, *given in listed
    ]


@njit(cache=True, nogil=True, error_model="numpy")
def _trend(b, state, out, coarse):
    x = momentum._means(b, state[:_DX])
    momentum.rsi(x[_GAIN_14], x[_LOSS_14], out[0])
    momentum.rsi(x[_GAIN_5], x[_LOSS_5], out[1])
    second = momentum._means_of_means(x, state[_DX : _SIGNAL + 1])
    fast, slow, signal = x[_EMA_12, HISTORY:], x[_EMA_26, HISTORY:], second[1, HISTORY:]
    plus, minus, atr, close = x[_PLUS, HISTORY:], x[_MINUS, HISTORY:], b.atr[HISTORY:], b.close[HISTORY:]
    high, low, opened = b.high[HISTORY:], b.low[HISTORY:], b.open[HISTORY:]
    line, histogram, index, up, down, body = out[2], out[4], out[8], out[6], out[7], out[29]
    for i in range(len(close)):
        line[i] = fast[i] - slow[i]
        histogram[i] = line[i] - signal[i]
    for i in range(len(close)):
        up[i], down[i] = 100.0 * plus[i] / atr[i], 100.0 * minus[i] / atr[i]
    for i in range(len(close)):
        index[i] = 100.0 * safe_ratio(abs(plus[i] - minus[i]), plus[i] + minus[i], 0.0)
        body[i] = safe_ratio(close[i] - opened[i], high[i] - low[i], 0.0)
    out[3], out[5] = signal, second[0, HISTORY:]
    out[9], out[10], out[11] = atr, 100.0 * atr / close, b.span[HISTORY:]
    out[12], out[13], out[14], out[15] = (
        x[_EMA_12, HISTORY:], x[_EMA_26, HISTORY:], x[_EMA_20, HISTORY:], x[_EMA_50, HISTORY:]
    )  # fmt: skip
    out[16] = out[2]
    momentum.cci(b.high, b.low, b.close, 20, b.t0, out[17])
    momentum.ultimate_oscillator(b, out[18])
    momentum.aroon(b, 25, out[19])
    for place, n in enumerate((1, 4, 12)):
        out[20 + place] = 100.0 * (close / b.close[HISTORY - n : -n] - 1.0)
    out[23], out[24] = close - b.close[HISTORY - 24 : -24], close - b.close[HISTORY - 48 : -48]
    out[25] = close / b.close[HISTORY - 10 : -10] - 1.0
    rise, mean, _ = rolling_slope_sums_24(b.close, HISTORY - 24)
    out[26] = rise[HISTORY:] / (24.0 * (24.0 * 24.0 - 1.0) / 12.0)
    out[27] = double_rolling_slope_sums(rise, mean, 24, HISTORY)[HISTORY:] / (48.0 * (48.0 * 48.0 - 1.0) / 12.0)
    typical = (b.high + b.low + b.close) / 3.0
    money_flow_index(typical * b.volume, money_flow_direction(typical), 14, b.t0, out[28])


@njit(cache=True, nogil=True, error_model="numpy")
def _spread(b, state, out, coarse):
    close, t0 = b.close, b.t0
    mean_5, spread_5 = _of_five(close, HISTORY - 95)
    mean_10, spread_10 = double_rolling_moments(mean_5, spread_5, 5, HISTORY - 90)
    mean_20, spread_20 = double_rolling_moments(mean_10, spread_10, 10, HISTORY - 70)
    mean_40, spread_40 = double_rolling_moments(mean_20, spread_20, 20, HISTORY - 50)
    mean_50, spread_50 = _of_both(mean_40, spread_40, 40, mean_10, spread_10, 10, HISTORY - 50)
    mean_100, _ = double_rolling_moments(mean_50, spread_50, 50, HISTORY)
    _, spread_30 = _of_both(mean_20, spread_20, 20, mean_10, spread_10, 10, HISTORY)
    out[0], out[1], out[2], out[3] = mean_5[HISTORY:], mean_10[HISTORY:], mean_20[HISTORY:], mean_50[HISTORY:]
    out[4] = mean_100[HISTORY:]
    spread_10, spread_20, spread_50 = spread_10[HISTORY:], spread_20[HISTORY:], spread_50[HISTORY:]
    spread_30, middle_20 = spread_30[HISTORY:], mean_20[HISTORY:]
    std_10, std_20, std_50, variance, top, bottom = out[5], out[6], out[7], out[8], out[9], out[10]
    for i in range(len(std_10)):
        std_10[i], std_20[i] = math.sqrt(spread_10[i] / 10.0), math.sqrt(spread_20[i] / 20.0)
    for i in range(len(std_50)):
        std_50[i], variance[i] = math.sqrt(spread_50[i] / 50.0), spread_30[i] / 30.0
        top[i], bottom[i] = middle_20[i] + 2.0 * std_20[i], middle_20[i] - 2.0 * std_20[i]
    for place, n in enumerate((14, 48, 96)):
        first = HISTORY - 8 if n == 14 else HISTORY
        top, bottom = rolling_max(b.high, n, t0, first), rolling_min(b.low, n, t0, first)
        out[11 + place], out[14 + place] = top[HISTORY:], bottom[HISTORY:]
        if n == 14:
            for i in range(first, len(top)):
                bottom[i] = 100.0 * safe_ratio(close[i] - bottom[i], top[i] - bottom[i], 0.0)
            out[19] = bottom[HISTORY:]
            slow = rolling_sum(bottom, 3, t0, HISTORY - 4) / 3.0
            out[20] = slow[HISTORY:]
            out[21] = rolling_sum(slow, 3, t0, HISTORY)[HISTORY:] / 3.0
    high, low, opened, close = b.high[HISTORY:], b.low[HISTORY:], b.open[HISTORY:], b.close[HISTORY:]
    traded, uneven = _of_five(b.volume, HISTORY - 15)
    traded, uneven = double_rolling_moments(traded, uneven, 5, HISTORY - 10)
    traded, uneven = double_rolling_moments(traded, uneven, 10, HISTORY)
    traded, uneven, volume, deviation = traded[HISTORY:], uneven[HISTORY:], out[23], out[25]
    for i in range(len(volume)):
        volume[i], deviation[i] = 20.0 * traded[i], math.sqrt(uneven[i] / 20.0)
    out[22] = rolling_correlation(b.high, b.low, 30, t0, HISTORY)[HISTORY:]
    out[24] = rolling_sum(b.volume, 50, t0, HISTORY)[HISTORY:] / 50.0
    middle, williams, top_14, bottom_14, top_48, bottom_48 = out[17], out[18], out[11], out[14], out[12], out[15]
    for i in range(len(close)):
        middle[i] = 0.5 * (top_14[i] + bottom_14[i])
        williams[i] = -100.0 * safe_ratio(top_48[i] - close[i], top_48[i] - bottom_48[i], 0.0)
    typical, median, weighted, average = out[26], out[27], out[28], out[29]
    for i in range(len(close)):
        typical[i] = (high[i] + low[i] + close[i]) / 3.0
        median[i] = 0.5 * (high[i] + low[i])
    for i in range(len(close)):
        weighted[i] = 0.25 * (high[i] + low[i] + 2.0 * close[i])
        average[i] = 0.25 * (opened[i] + high[i] + low[i] + close[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _of_five(x, first):
    """(mean, sum of squared distances from it) of the last 5 values."""
    mean, spread = np.empty(len(x)), np.empty(len(x))
    a, b, c, d, e = x[first - 4 :], x[first - 3 :], x[first - 2 :], x[first - 1 :], x[first:]
    means, spreads = mean[first:], spread[first:]
    for i in range(len(means)):
        middle = ((a[i] + b[i]) + (c[i] + d[i]) + e[i]) * 0.2
        p, q, r, s, t = a[i] - middle, b[i] - middle, c[i] - middle, d[i] - middle, e[i] - middle
        means[i], spreads[i] = middle, (p * p + q * q) + (r * r + s * s) + t * t
    return mean, spread


@njit(cache=True, nogil=True, error_model="numpy")
def _of_both(newer_mean, newer_spread, n, older_mean, older_spread, m, first):
    """The moments of n values and the m before them."""
    mean, spread = np.empty(len(newer_mean)), np.empty(len(newer_mean))
    newer, older, means = newer_mean[first:], older_mean[first - n :], mean[first:]
    newer_2, older_2, spreads = newer_spread[first:], older_spread[first - n :], spread[first:]
    share, weight = n / (n + m), n * m / (n + m)
    for i in range(len(means)):
        apart = newer[i] - older[i]
        means[i] = older[i] + share * apart
        spreads[i] = (newer_2[i] + older_2[i]) + weight * (apart * apart)
    return mean, spread


FAMILIES = {
    "trend": FeatureFamily(lambda market, coarse: TREND, _trend, 12),
    "spread": FeatureFamily(lambda market, coarse: SPREAD, _spread),
}
