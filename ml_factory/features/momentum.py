"""Momentum and trend: where the price went, and how straight.

Sources: Wilder, New Concepts in Technical Trading Systems (1978) for RSI, ADX and DI; Appel for MACD; Lane for the
stochastic; Lambert for CCI; Chande for Aroon; Williams for the ultimate oscillator; Kaufman for the efficiency ratio;
Botes and Siepman for the vortex. Those that have a scale keep the one they are published with (RSI 0 to 100); prices
are divided by the average true range.
"""

import numpy as np
from numba import njit

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import ema, lag, ratio, rolling_max, rolling_min, rolling_sum, wilder


def momentum(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; the shorter list where `coarse`."""
    high, low, close = bars.high, bars.low, bars.close
    atr = rolling.average_true_range(high, low, close)
    macd = ema(close, 12) - ema(close, 26)
    trend, direction = adx(high, low, close, 14)
    columns = {
        "return_1": normal_return(close, 1),
        "return_4": normal_return(close, 4),
        "return_12": normal_return(close, 12),
        "rsi_14": rsi(close, 14),
        "macd_12_26": macd / atr,
        "macd_histogram_9": (macd - ema(macd, 9)) / atr,
        "adx_14": trend,
        "di_14": direction,
        "cci_20": cci(high, low, close, 20),
        "stochastic_14": stochastic(high, low, close, 14),
        "efficiency_24": efficiency(close, 24),
        "vortex_14": vortex(high, low, close, 14),
    }
    if coarse:
        return columns
    slope, fit = regression(close, 24)
    return columns | {
        "return_2": normal_return(close, 2),
        "return_24": normal_return(close, 24),
        "return_48": normal_return(close, 48),
        "rsi_5": rsi(close, 5),
        "stochastic_slow_14_3": rolling.rolling_mean(stochastic(high, low, close, 14), 3),
        "channel_48": stochastic(high, low, close, 48),
        "ultimate_7_14_28": ultimate(high, low, close),
        "aroon_25": aroon(high, low, 25),
        "slope_24": slope / atr,
        "slope_fit_24": fit,
        "ema_gap_20": (close - ema(close, 20)) / atr,
        "ema_gap_20_50": (ema(close, 20) - ema(close, 50)) / atr,
        "streak": streak(close),
    }


def normal_return(close: np.ndarray, n: int) -> np.ndarray:
    """Log return over n bars in units of what n bars of the last 48 bars' deviation would give."""
    return rolling.log_returns(close, n) / (rolling.deviation(close, 48) * np.sqrt(n))


def rsi(close: np.ndarray, n: int) -> np.ndarray:
    """Relative strength index, 0 to 100; 50 where nothing moved (TA-Lib RSI)."""
    change = close - lag(close, 1)
    gain, loss = wilder(np.maximum(change, 0.0), n), wilder(np.maximum(-change, 0.0), n)
    return 100.0 * ratio(gain, gain + loss, empty=0.5)


def adx(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(ADX, +DI minus -DI), each in points of 100; 0 where nothing moved (TA-Lib ADX, PLUS_DI, MINUS_DI)."""
    up, down = high - lag(high, 1), lag(low, 1) - low
    started = np.where(np.isnan(up), np.nan, 0.0)
    plus = wilder(np.where((up > down) & (up > 0.0), up, started), n)
    minus = wilder(np.where((down > up) & (down > 0.0), down, started), n)
    span = wilder(rolling.true_range(high, low, close), n)
    return wilder(100.0 * ratio(np.abs(plus - minus), plus + minus), n), 100.0 * ratio(plus - minus, span)


def cci(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Commodity channel index of the typical price (TA-Lib CCI)."""
    distance, deviation = rolling.rolling_absolute_deviation((high + low + close) / 3.0, n)
    return ratio(distance, 0.015 * deviation)


def stochastic(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Place of the close in the last n bars' range, 0 to 100; 50 where there is none (TA-Lib STOCHF %K)."""
    bottom = rolling_min(low, n)
    return 100.0 * ratio(close - bottom, rolling_max(high, n) - bottom, empty=0.5)


def efficiency(close: np.ndarray, n: int) -> np.ndarray:
    """Kaufman's efficiency ratio with its sign: net move over path length, -1 to 1."""
    return ratio(close - lag(close, n), rolling_sum(np.abs(close - lag(close, 1)), n))


def vortex(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int) -> np.ndarray:
    """Positive minus negative vortex: (sum |high - low before| - sum |low - high before|) / sum of true ranges."""
    difference = np.abs(high - lag(low, 1)) - np.abs(low - lag(high, 1))
    return ratio(rolling_sum(difference, n), rolling_sum(rolling.true_range(high, low, close), n))


def regression(close: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(slope per bar in price units, signed share of variance explained) of a line through n closes."""
    time = np.arange(len(close), dtype=np.float64)
    together = rolling.rolling_covariance(close, time, n)
    spread = (n * n - 1) / 12.0  # population variance of n consecutive integers
    fit = np.clip(ratio(together * np.abs(together), rolling.rolling_covariance(close, close, n) * spread), -1.0, 1.0)
    return together / spread, fit


def ultimate(high: np.ndarray, low: np.ndarray, close: np.ndarray) -> np.ndarray:
    """Williams' ultimate oscillator of 7, 14 and 28 bars, 0 to 100 (TA-Lib ULTOSC)."""
    pressure = close - np.minimum(low, lag(close, 1))
    span = rolling.true_range(high, low, close)
    short, middle, long = (ratio(rolling_sum(pressure, n), rolling_sum(span, n), empty=0.5) for n in (7, 14, 28))
    return 100.0 * (4.0 * short + 2.0 * middle + long) / 7.0


def aroon(high: np.ndarray, low: np.ndarray, n: int) -> np.ndarray:
    """Aroon up minus down over n + 1 bars, -100 to 100 (TA-Lib AROONOSC)."""
    return 100.0 * (rolling.bars_since_max(-low, n + 1) - rolling.bars_since_max(high, n + 1)) / n


@njit(cache=True)
def streak(close):
    """Closes in a row that rose (positive) or fell (negative); 0 after an unchanged one."""
    out = np.zeros(len(close))
    for i in range(1, len(close)):
        if close[i] > close[i - 1]:
            out[i] = max(out[i - 1], 0.0) + 1.0
        elif close[i] < close[i - 1]:
            out[i] = min(out[i - 1], 0.0) - 1.0
    return out
