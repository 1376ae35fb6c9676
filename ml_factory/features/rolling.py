"""The windows and recursions every family is made of.

Each kernel walks forward once and reads nothing after the row it writes, so a prefix of a file gives the same bits as
the whole file: no FFT, no fast-math, and no difference of two long cumulative sums, whose rounding would never be
forgotten. Logarithms and their kin are taken one number at a time in compiled code, because a vectorised library may
round the last few numbers of an array in another way than the rest.

Series are float64 of length N and may start with NaN (a return has no first value). A window is NaN until it is full;
a recursion starts after its first n numbers.
"""

import math

import numpy as np
from numba import njit

FLOOR = 1e-6
"""Smallest range or deviation, as a share of the price, to divide by: a stale feed gives 0 and not infinity."""

_LOG, _ERF, _TANH, _SIN, _COS = range(5)
_SUM, _MAX, _FIRST = range(3)


@njit(cache=True)
def _elementwise(x, function):
    out = np.empty(len(x))
    for i in range(len(x)):
        if function == _LOG:
            out[i] = math.log(x[i])
        elif function == _ERF:
            out[i] = math.erf(x[i])
        elif function == _TANH:
            out[i] = math.tanh(x[i])
        elif function == _SIN:
            out[i] = math.sin(x[i])
        else:
            out[i] = math.cos(x[i])
    return out


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive numbers; NaN stays NaN."""
    return _elementwise(np.ascontiguousarray(x, dtype=np.float64), _LOG)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function: 2 * Phi(x * sqrt(2)) - 1."""
    return _elementwise(np.ascontiguousarray(x, dtype=np.float64), _ERF)


def tanh(x: np.ndarray) -> np.ndarray:
    """Hyperbolic tangent."""
    return _elementwise(np.ascontiguousarray(x, dtype=np.float64), _TANH)


def circle(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sine, cosine) of a clock hand that has made so many turns."""
    angle = np.ascontiguousarray(turns, dtype=np.float64) * (2.0 * math.pi)
    return _elementwise(angle, _SIN), _elementwise(angle, _COS)


def ratio(a: np.ndarray, b: np.ndarray, empty: float = 0.0) -> np.ndarray:
    """a / b, and `empty` where b is 0 (nothing traded, nothing moved); NaN only where a or b is."""
    out = np.where(np.isnan(a), np.nan, empty)
    return np.divide(a, b, out=out, where=b != 0.0)


def lag(x: np.ndarray, n: int) -> np.ndarray:
    """x n rows earlier; NaN in the first n rows."""
    out = np.full(len(x), np.nan)
    out[n:] = x[: len(x) - n] if n <= len(x) else []
    return out


@njit(cache=True)
def rolling_sum(x, n):
    """Sum of the last n values, in O(1) a row and without running-sum drift (van Herk's blocks).

    A window is the tail of one block of n rows and the head of the next; both are sums of values inside the window
    only, so n zeros sum to exactly 0 and a NaN leaves with its row.
    """
    out = np.full(len(x), np.nan)
    tail = np.empty(n)
    head = 0.0
    for i in range(len(x)):
        k = i % n
        if k == 0:
            head = 0.0
            total = 0.0
            if i >= n:
                for j in range(n - 1, -1, -1):
                    total += x[i - n + j]
                    tail[j] = total
        head += x[i]
        if k == n - 1:
            out[i] = head
        elif i >= n:
            out[i] = tail[k + 1] + head
    return out


def rolling_mean(x: np.ndarray, n: int) -> np.ndarray:
    """Mean of the last n values (TA-Lib SMA)."""
    return rolling_sum(x, n) / n


@njit(cache=True)
def rolling_max(x, n):
    """Largest of the last n values, none of them NaN, in O(1) a row (van Herk's blocks)."""
    out = np.full(len(x), np.nan)
    tail = np.empty(n)
    head = -np.inf
    for i in range(len(x)):
        k = i % n
        if k == 0:
            head = -np.inf
            best = -np.inf
            if i >= n:
                for j in range(n - 1, -1, -1):
                    best = max(best, x[i - n + j])
                    tail[j] = best
        head = max(head, x[i])
        if k == n - 1:
            out[i] = head
        elif i >= n:
            out[i] = max(tail[k + 1], head)
    return out


def rolling_min(x: np.ndarray, n: int) -> np.ndarray:
    """Smallest of the last n values."""
    return -rolling_max(-x, n)


@njit(cache=True)
def bars_since_max(x, n):
    """How many rows ago the largest of the last n values stood; the latest of equals (TA-Lib AROON)."""
    out = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        best = i - n + 1
        for j in range(i - n + 2, i + 1):
            if x[j] >= x[best]:
                best = j
        out[i] = i - best
    return out


@njit(cache=True)
def rolling_covariance(x, y, n):
    """Population covariance of the last n pairs, measured from the newest pair.

    Measured so, the numbers squared are small differences instead of prices, and a constant window gives exactly 0.
    """
    out = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        sum_x, sum_y, sum_xy = 0.0, 0.0, 0.0
        for j in range(i - n + 1, i):
            dx = x[j] - x[i]
            dy = y[j] - y[i]
            sum_x += dx
            sum_y += dy
            sum_xy += dx * dy
        # The newest pair adds 0 to every sum, or NaN where it is missing.
        out[i] = (sum_xy - sum_x * sum_y / n) / n + 0.0 * (x[i] + y[i])
    return out


def rolling_std(x: np.ndarray, n: int) -> np.ndarray:
    """Population standard deviation of the last n values (TA-Lib STDDEV)."""
    return np.sqrt(np.maximum(rolling_covariance(x, x, n), 0.0))


def rolling_correlation(x: np.ndarray, y: np.ndarray, n: int) -> np.ndarray:
    """Pearson correlation of the last n pairs, within [-1, 1]; 0 where either side is constant."""
    together = rolling_covariance(x, y, n)
    return np.clip(ratio(together, rolling_std(x, n) * rolling_std(y, n)), -1.0, 1.0)


@njit(cache=True)
def rolling_absolute_deviation(x, n):
    """(x minus its mean, mean absolute deviation) over the last n values; both exactly 0 when they are all equal."""
    distance = np.full(len(x), np.nan)
    deviation = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        mean = 0.0
        for j in range(i - n + 1, i + 1):
            mean += (x[j] - x[i]) / n
        total = 0.0
        for j in range(i - n + 1, i + 1):
            total += abs(x[j] - x[i] - mean)
        distance[i] = -mean
        deviation[i] = total / n
    return distance, deviation


@njit(cache=True)
def rolling_rank(x, n):
    """Share of the last n values below the newest, ties counted half: from 1 / 2n to 1 - 1 / 2n."""
    out = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        below = 0
        equal = 0
        above = 0
        for j in range(i - n + 1, i + 1):
            below += x[j] < x[i]
            equal += x[j] == x[i]
            above += x[j] > x[i]
        if below + equal + above == n:  # a missing value is neither
            out[i] = (below + 0.5 * equal) / n
    return out


@njit(cache=True)
def weighted_sum(x, weights):
    """Sum of weights[k] * x k rows ago: a fixed causal filter, by the definition (an FFT would mix in the future)."""
    n = len(weights)
    out = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        total = 0.0
        for k in range(n):
            total += weights[k] * x[i - k]
        out[i] = total
    return out


@njit(cache=True)
def _recursive_mean(x, n, alpha):
    out = np.full(len(x), np.nan)
    seen = 0
    mean = 0.0
    for i in range(len(x)):
        if math.isnan(x[i]):  # a missing value is passed over: one 0/0 must not silence the rest of the file
            pass
        elif seen < n:
            mean += x[i] / n
            seen += 1
        else:
            mean += alpha * (x[i] - mean)
        if seen == n:
            out[i] = mean
    return out


def ema(x: np.ndarray, n: int) -> np.ndarray:
    """Exponential mean with alpha = 2 / (n + 1), started at the mean of the first n values (TA-Lib EMA)."""
    return _recursive_mean(x, n, 2.0 / (n + 1))


def wilder(x: np.ndarray, n: int) -> np.ndarray:
    """Wilder's smoothing: exponential mean with alpha = 1 / n, started at the mean of the first n values."""
    return _recursive_mean(x, n, 1.0 / n)


@njit(cache=True)
def _since_open(x, session, how):
    out = np.empty(len(x))
    value = 0.0
    for i in range(len(x)):
        if i == 0 or session[i] != session[i - 1]:
            value = x[i]
        elif how == _SUM:
            value += x[i]
        elif how == _MAX:
            value = max(value, x[i])
        out[i] = value
    return out


def session_sum(x: np.ndarray, session: np.ndarray) -> np.ndarray:
    """Sum of x since its session's first row."""
    return _since_open(x, session, _SUM)


def session_max(x: np.ndarray, session: np.ndarray) -> np.ndarray:
    """Largest x since its session's first row."""
    return _since_open(x, session, _MAX)


def session_first(x: np.ndarray, session: np.ndarray) -> np.ndarray:
    """x at its session's first row."""
    return _since_open(x, session, _FIRST)


def log_returns(close: np.ndarray, n: int = 1) -> np.ndarray:
    """log(close / close n rows earlier)."""
    return log(close / lag(close, n))


def true_range(high: np.ndarray, low: np.ndarray, close: np.ndarray) -> np.ndarray:
    """Wilder's true range: the bar's range stretched to the previous close; NaN in the first row (TA-Lib TRANGE)."""
    before = lag(close, 1)
    return np.maximum(high, before) - np.minimum(low, before)


def average_true_range(high: np.ndarray, low: np.ndarray, close: np.ndarray, n: int = 14) -> np.ndarray:
    """Wilder's ATR (TA-Lib ATR), at least FLOOR of the price so that one can divide by it."""
    return np.maximum(wilder(true_range(high, low, close), n), FLOOR * close)


def deviation(close: np.ndarray, n: int) -> np.ndarray:
    """Population standard deviation of the last n log returns, at least FLOOR."""
    return np.maximum(rolling_std(log_returns(close), n), FLOOR)
