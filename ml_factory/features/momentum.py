"""Momentum and trend features: direction and straightness of price moves.

Sources: Wilder, New Concepts in Technical Trading Systems (1978) for RSI, ADX and DI; Appel for MACD; Lane for the
stochastic; Lambert for CCI; Chande for Aroon; Williams for the ultimate oscillator; Kaufman for the efficiency ratio;
Botes and Siepman for the vortex. Those that have a scale keep the one they are published with (RSI 0 to 100); prices
are divided by the average true range.
"""

import math
from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.features.engine import HISTORY, Block, Column
from ml_factory.features.windows import (
    lag,
    ratio,
    window_bars_since_max,
    window_max,
    window_mean,
    window_min,
    window_moment,
    window_sum,
    window_weighted_sum,
)


def momentum(b: Block) -> Iterator[Column]:
    """Yield the columns; see the module."""
    change, closed = b.close - lag(b.close), lag(b.close)
    gain, loss = np.maximum(change, 0.0), np.maximum(-change, 0.0)
    up, down = b.high - lag(b.high), lag(b.low) - b.low
    plus = b.wilder("plus", np.where((up > down) & (up > 0.0), up, 0.0 * up), 14)
    minus = b.wilder("minus", np.where((down > up) & (down > 0.0), down, 0.0 * down), 14)
    line = b.ema("ema 12", b.close, 12) - b.ema("ema 26", b.close, 26)

    for n in (1, 4, 12):
        yield f"return_{n}", _scaled_return(b, n)
    yield "rsi_14", _rsi(b, gain, loss, 14)
    yield "macd_12_26", line / b.atr
    yield "macd_histogram_9", (line - b.ema("signal 9", line, 9)) / b.atr
    yield "adx_14", b.wilder("dx", 100.0 * ratio(abs(plus - minus), plus + minus), 14)
    yield "di_14", 100.0 * (plus - minus) / b.atr
    yield "cci_20", _cci((b.high + b.low + b.close) / 3.0, 20)
    stochastic = _stochastic(b, 14)
    yield "stochastic_14", stochastic
    yield "efficiency_24", ratio(b.close - lag(b.close, 24), window_sum(abs(change), 24))
    moved = abs(b.high - lag(b.low)) - abs(b.low - lag(b.high))
    yield "vortex_14", ratio(window_sum(moved, 14), b.sum("span", 14))
    if b.coarse:
        return

    for n in (2, 24, 48):
        yield f"return_{n}", _scaled_return(b, n)
    yield "rsi_5", _rsi(b, gain, loss, 5)
    yield "stochastic_slow_14_3", window_sum(stochastic, 3) / 3.0
    yield "channel_48", _stochastic(b, 48)
    pressure = b.close - np.minimum(b.low, closed)
    shares = [ratio(window_sum(pressure, n), b.sum("span", n), 0.5) for n in (7, 14, 28)]
    yield "ultimate_7_14_28", (100.0 / 7.0) * (4.0 * shares[0] + 2.0 * shares[1] + shares[2])
    yield "aroon_25", 4.0 * (window_bars_since_max(-b.low, 26) - window_bars_since_max(b.high, 26))
    times = 11.5 - np.arange(24.0)  # a line through 24 closes
    rise, spread = window_weighted_sum(b.close, times), 24.0 * window_moment(b.close, 24, 2)
    yield "slope_24", rise / (times @ times) / b.atr
    yield "slope_fit_24", np.clip(ratio(rise * abs(rise), (times @ times) * spread), -1.0, 1.0)
    ema_20, ema_50 = b.ema("ema 20", b.close, 20), b.ema("ema 50", b.close, 50)
    yield "ema_gap_20", (b.close - ema_20) / b.atr
    yield "ema_gap_20_50", (ema_20 - ema_50) / b.atr
    yield "streak", _streak(change, HISTORY, b.memory("streak", 0.0))


def _scaled_return(b: Block, n: int) -> np.ndarray:
    """Return the log return over n bars in units of what n bars of the last 48 bars' deviation would give."""
    return (b.log_close - lag(b.log_close, n)) / (b.return_std(48) * math.sqrt(n))


def _rsi(b: Block, gain: np.ndarray, loss: np.ndarray, n: int) -> np.ndarray:
    """Return the relative strength index, 0 to 100; 50 where nothing moved (TA-Lib RSI)."""
    gain, loss = b.wilder(f"gain {n}", gain, n), b.wilder(f"loss {n}", loss, n)
    return 100.0 * ratio(gain, gain + loss, 0.5)


def _cci(typical: np.ndarray, n: int) -> np.ndarray:
    """Return the commodity channel index; 0 where the last n typical prices are equal (TA-Lib CCI)."""
    mean = window_mean(typical, n)
    moved = sum(abs(lag(typical, k) - mean) for k in range(n)) / n
    # A third of a sum is rounded: prices that are equal may deviate by their last bits, and that is no move.
    return np.where(moved < 1e-12 * typical, 0.0, (typical - mean) / (0.015 * moved))


def _stochastic(b: Block, n: int) -> np.ndarray:
    """Return the place of the close in the last n bars' range, 0 to 100; 50 where there is none (TA-Lib STOCHF %K)."""
    bottom = window_min(b.low, n)
    return 100.0 * ratio(b.close - bottom, window_max(b.high, n) - bottom, 0.5)


@njit(cache=True, nogil=True, error_model="numpy")
def _streak(change, first, state):
    """Closes in a row that rose (positive) or fell (negative); 0 after an unchanged one."""
    out, run = np.full(len(change), np.nan), state[0]
    for i in range(first, len(change)):
        if change[i] > 0.0:
            run = max(run, 0.0) + 1.0
        elif change[i] < 0.0:
            run = min(run, 0.0) - 1.0
        else:
            run = 0.0
        out[i] = run
    state[0] = run
    return out
