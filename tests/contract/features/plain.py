"""Plain forms of what many columns are made of, one row at a time; the reference of the families' tests."""

import numpy as np
import pandas as pd

from tests.contract.doors import ResampledBars

FLOOR = 1e-6


def window(x: np.ndarray, i: int, n: int) -> np.ndarray:
    """The n values up to row i."""
    return x[i - n + 1 : i + 1]


def share(a: float, b: float) -> float:
    """a / b, and 0 of nothing."""
    return a / b if b else 0.0


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, and 0 where either side is constant."""
    return np.corrcoef(a, b)[0, 1] if np.ptp(a) and np.ptp(b) else 0.0


def returns(frame: ResampledBars, i: int, n: int) -> np.ndarray:
    """The last n log returns."""
    return np.diff(np.log(window(frame.close, i, n + 1)))


def deviation(frame: ResampledBars, i: int, n: int) -> float:
    """Of the last n log returns."""
    return max(np.std(returns(frame, i, n)), FLOOR)


def true_ranges(frame: ResampledBars) -> np.ndarray:
    """Of every bar; none of the first."""
    spans = np.maximum(frame.high[1:], frame.close[:-1]) - np.minimum(frame.low[1:], frame.close[:-1])
    return np.append(np.nan, spans)


def atr(frame: ResampledBars) -> np.ndarray:
    """Wilder's mean of 14 true ranges at every bar."""
    spans = true_ranges(frame)[1:]
    smooth = pd.Series([spans[:14].mean(), *spans[14:]]).ewm(alpha=1 / 14, adjust=False).mean()
    return np.maximum(np.append(np.full(14, np.nan), smooth), FLOOR * frame.close)
