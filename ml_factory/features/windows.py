"""Windows by their definition: each row is a function of its own last n values, and of nothing else.

A window is a loop over its n lags; the inner loop runs over a block of rows, on vector registers. So a row's bits
depend neither on where a block begins nor on what came before the window, and no rounding error persists. Sums of
prices are taken of differences from the window's newest value: no nearly equal numbers are subtracted, and a window of
equal values has a mean, deviation and covariance that are exact.

Arguments and results are float64[M] unless said; the first n - 1 rows are NaN, and so is a window that holds a NaN.
"""

import math

import numpy as np
from numba import njit

FLOOR = 1e-6
"""Smallest range or deviation, as a share of the price, to divide by: a stale feed gives 0 and not infinity."""
BLOCK = 512
"""Rows of a window's loop at a time: what is added up stays in the nearest cache."""
_compiled = njit(cache=True, nogil=True, error_model="numpy")


def lag(x: np.ndarray, k: int = 1) -> np.ndarray:
    """Return x of k rows before; NaN in the first k rows."""
    out = np.empty(len(x))
    out[:k], out[k:] = np.nan, x[: len(x) - k]
    return out


def ratio(a: np.ndarray, b: np.ndarray, empty: np.ndarray | float = 0.0) -> np.ndarray:
    """Return a / b, `empty` where b is 0 (nothing traded, nothing moved); NaN only where a or b is."""
    out, zero = a / b, b == 0.0
    return np.where(zero, empty + 0.0 * a, out) if np.count_nonzero(zero) else out


def balance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (a - b) / (a + b) of two amounts: -1 to 1, and 0 where both are 0."""
    return ratio(a - b, a + b)


@_compiled
def window_sum(x, n):
    """Sum of the last n values; n zeros sum to exactly 0."""
    out = np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        rows = out[begin : begin + BLOCK]
        rows[:] = x[begin : begin + BLOCK]
        for k in range(1, n):
            older = x[begin - k :]
            for i in range(len(rows)):
                rows[i] += older[i]
    return out


@_compiled
def window_weighted_sum(x, weights):
    """Sum of weights[k] * x of k rows before: a fixed causal filter (an FFT would mix in the future)."""
    n = len(weights)
    out = np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        rows = out[begin : begin + BLOCK]
        rows[:] = 0.0
        for k in range(n):
            older, weight = x[begin - k :], weights[k]
            for i in range(len(rows)):
                rows[i] += weight * older[i]
    return out


@_compiled
def _window_shift(x, n):
    """Mean of the last n values less the newest one; exactly 0 where all are equal."""
    out = np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        rows, newest = out[begin : begin + BLOCK], x[begin : begin + BLOCK]
        rows[:] = 0.0 * newest
        for k in range(1, n):
            older = x[begin - k :]
            for i in range(len(rows)):
                rows[i] += older[i] - newest[i]
        for i in range(len(rows)):
            rows[i] /= n
    return out


@_compiled
def window_moment(x, n, power):
    """Mean of the 2nd, 3rd or 4th `power` of the last n values' distances from their mean."""
    shifts = _window_shift(x, n)
    out = np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        rows, newest, shift = out[begin : begin + BLOCK], x[begin:], shifts[begin:]
        rows[:] = 0.0
        for k in range(n):
            older = x[begin - k :]
            for i in range(len(rows)):
                apart = older[i] - newest[i] - shift[i]
                square = apart * apart
                rows[i] += square if power == 2 else square * apart if power == 3 else square * square
        for i in range(len(rows)):
            rows[i] /= n
    return out


@_compiled
def window_covariances(x, y, n):
    """Population (covariance, variance of x, variance of y) of the last n pairs."""
    shifts_x, shifts_y = _window_shift(x, n), _window_shift(y, n)
    both, of_x, of_y = np.full(len(x), np.nan), np.full(len(x), np.nan), np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        xy, xx, yy = both[begin : begin + BLOCK], of_x[begin : begin + BLOCK], of_y[begin : begin + BLOCK]
        newest_x, newest_y, shift_x, shift_y = x[begin:], y[begin:], shifts_x[begin:], shifts_y[begin:]
        xy[:], xx[:], yy[:] = 0.0, 0.0, 0.0
        for k in range(n):
            older_x, older_y = x[begin - k :], y[begin - k :]
            for i in range(len(xy)):
                apart_x, apart_y = older_x[i] - newest_x[i] - shift_x[i], older_y[i] - newest_y[i] - shift_y[i]
                xy[i] += apart_x * apart_y
                xx[i] += apart_x * apart_x
                yy[i] += apart_y * apart_y
        for i in range(len(xy)):
            xy[i], xx[i], yy[i] = xy[i] / n, xx[i] / n, yy[i] / n
    return both, of_x, of_y


@_compiled
def window_max(x, n):
    """Largest of the last n values."""
    out = np.full(len(x), np.nan)
    for begin in range(n - 1, len(x), BLOCK):
        rows = out[begin : begin + BLOCK]
        rows[:] = x[begin - n + 1 : begin - n + 1 + len(rows)]
        for k in range(n - 2, -1, -1):
            newer = x[begin - k :]
            for i in range(len(rows)):
                rows[i] = newer[i] if newer[i] > rows[i] else rows[i]
    return out


@_compiled
def window_bars_since_max(x, n):
    """Number of rows since the largest of the last n values, the latest of equals (TA-Lib AROON)."""
    out, best = np.full(len(x), np.nan), x[: max(len(x) - n + 1, 0)].copy()
    rows = out[n - 1 :]
    rows[:] = n - 1.0 + 0.0 * best
    for k in range(n - 2, -1, -1):
        newer = x[n - 1 - k :]
        for i in range(len(rows)):
            rows[i] = k if newer[i] >= best[i] else rows[i]
            best[i] = newer[i] if newer[i] >= best[i] else best[i]
    return out


@_compiled
def exponential_mean(x, first, n, alpha, state):
    """Exponential mean of the rows from `first` on, started at the mean of its first n values; NaN before.

    A missing value is skipped: one 0/0 must not make the rest of the file missing. state : (mean, values seen)
    """
    out = np.full(len(x), np.nan)
    mean, seen = state[0], state[1]
    for i in range(first, len(x)):
        if x[i] == x[i]:
            if seen < n:
                mean += x[i] / n
                seen += 1.0
            else:
                mean += alpha * (x[i] - mean)
        out[i] = mean if seen == n else math.nan
    state[0], state[1] = mean, seen
    return out


def window_min(x: np.ndarray, n: int) -> np.ndarray:
    """Return the smallest of the last n values."""
    return -window_max(-x, n)


def window_mean(x: np.ndarray, n: int) -> np.ndarray:
    """Return the mean of the last n values; exactly their value where all are equal."""
    return x + _window_shift(x, n)


def window_std(x: np.ndarray, n: int) -> np.ndarray:
    """Return the population standard deviation of the last n values (TA-Lib STDDEV)."""
    return np.sqrt(window_moment(x, n, 2))


def window_correlation(x: np.ndarray, y: np.ndarray, n: int) -> np.ndarray:
    """Return Pearson's correlation of the last n pairs, within [-1, 1]; 0 where either side is constant."""
    together, of_x, of_y = window_covariances(x, y, n)
    return np.clip(ratio(together, np.sqrt(of_x * of_y)), -1.0, 1.0)


def window_variation(x: np.ndarray, n: int) -> np.ndarray:
    """Return the deviation over the mean of the last n values of what is never negative; 0 where all are 0."""
    return ratio(n * window_std(x, n), window_sum(x, n))


def window_place(x: np.ndarray, bottom: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return the place of x between `bottom` and `top`, less 1/2; 0 where they are equal."""
    return ratio(x - bottom, top - bottom, 0.5) - 0.5
