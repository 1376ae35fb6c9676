"""Sixty standard series by TA-Lib, on arrays that are ready: what momentum and volatility on one frame are made of."""

from collections.abc import Callable

import numpy as np
import talib

from ml_factory.data.resample import Frame


def calls(frame: Frame) -> list[Callable[[], object]]:
    """Each makes one series, or the three of MACD."""
    rng = np.random.default_rng(0)
    high, low, close = frame.high, frame.low, frame.close
    ret = np.append(0.0, np.diff(np.log(close)))
    size, before = np.abs(ret), np.append(0.0, ret[:-1])
    squares, span = ret * ret, talib.TRANGE(high, low, close)
    span[0] = span[1]
    inner, path, body = rng.random((3, len(close)))  # what they hold does not change their time
    listed = [
        # one bar, Wilder's and exponential means
        (talib.TRANGE, high, low, close), (talib.ATR, high, low, close, 14), (talib.NATR, high, low, close, 14),
        (talib.RSI, close, 14), (talib.RSI, close, 5), (talib.MACD, close), (talib.ADX, high, low, close, 14),
        (talib.PLUS_DI, high, low, close, 14), (talib.MINUS_DI, high, low, close, 14), (talib.EMA, close, 20),
        (talib.EMA, close, 50), (talib.EMA, squares, 32),
        # extremes, oscillators, a line
        (talib.MAX, high, 14), (talib.MIN, low, 14), (talib.MAX, high, 48), (talib.MIN, low, 48),
        (talib.MAX, span, 96), (talib.MIN, span, 96), (talib.AROONOSC, high, low, 25),
        (talib.CCI, high, low, close, 20), (talib.ULTOSC, high, low, close, 7, 14, 28),
        (talib.LINEARREG_SLOPE, close, 24), (talib.VAR, close, 24),
        # deviations and correlations
        *((talib.STDDEV, ret, n) for n in (6, 12, 24, 48, 96)), (talib.STDDEV, close, 20), (talib.STDDEV, span, 48),
        (talib.STDDEV, size, 48), (talib.VAR, body, 24), (talib.VAR, inner, 24), (talib.CORREL, before, size, 48),
        (talib.CORREL, size, ret, 48),
        # means and sums
        (talib.SMA, close, 20), (talib.SMA, close, 3), (talib.SMA, span, 48), (talib.SMA, size, 48),
        (talib.SMA, squares, 24), (talib.SMA, inner, 24), (talib.SMA, body, 24), (talib.SMA, ret, 48),
        (talib.SMA, inner, 48), (talib.SMA, body, 48), (talib.SUM, squares, 48), (talib.SUM, squares, 12),
        (talib.SUM, inner, 48), (talib.SUM, inner, 12), (talib.SUM, span, 14), (talib.SUM, path, 24),
        (talib.SUM, path, 14), (talib.SUM, path, 47), (talib.SUM, path, 46), (talib.SUM, body, 24),
        (talib.SUM, inner, 24), (talib.SUM, ret, 24), (talib.ROC, close, 1),
    ]  # fmt: skip
    return [lambda function=function, given=given: function(*given) for function, *given in listed]
