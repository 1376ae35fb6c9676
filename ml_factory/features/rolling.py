"""Rolling-window kernels of all families, for batch and streaming.

A kernel sees a block: the HISTORY previous rows, then the rows to write. Before the first bar the history is
NaN. Windows are computed from the history alone and recursions from a saved state, in an order that depends on the
absolute number of a row and never on where a block begins: so any division into blocks, down to single bars, gives the
same bits, and a prefix of a file gives the bits of the whole. No FFT, no fast-math, and no difference of two long
running sums, whose rounding errors would persist.

Series are float64[M], M = HISTORY + rows. `t0` is the absolute number of row HISTORY. Functions return arrays of
length M that are valid from row `first` on (HISTORY unless asked otherwise); a window is NaN until it is full.
Windows are O(1) a row in their length where that is possible (van Herk's blocks: a window is the tail of one aligned
block and the head of the next), else the loop over rows is the inner one, so that it runs on vector registers.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

HISTORY = 512
"""Rows a kernel may look back. A van Herk window of n needs 2 n, plus the windows of its inputs."""
FLOOR = 1e-6
"""Smallest range or deviation, as a share of the price, to divide by: a stale feed gives 0 and not infinity."""


class RollingBlock(NamedTuple):
    """The HISTORY previous rows, then the rows to write; series are float64[M] and NaN before the first bar.

    t0 : absolute number of row HISTORY
    volume : all NaN where the market has none
    session : int64[M], the exchange day
    progress : elapsed share of the session at `known_at`, 0 to 1
    ret : log return of one bar
    span : true range
    atr : Wilder's mean of 14 true ranges, at least FLOOR of the price
    """

    t0: int
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray
    session: np.ndarray
    progress: np.ndarray
    log_open: np.ndarray
    log_high: np.ndarray
    log_low: np.ndarray
    log_close: np.ndarray
    ret: np.ndarray
    span: np.ndarray
    atr: np.ndarray


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def safe_ratio(a, b, empty):
    """a / b of two numbers, `empty` where b is 0 (nothing traded, nothing moved); NaN only where a or b is."""
    return a / b if b != 0.0 else (a if math.isnan(a) else empty)


@njit(cache=True, nogil=True, error_model="numpy")
def lag(x):
    """x one row earlier; NaN in the first row."""
    out = np.empty(len(x))
    out[0] = np.nan
    out[1:] = x[:-1]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def elementwise_abs(x):
    """|x|, row by row. Loops of their own, here and below: an array expression takes far longer to compile."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = abs(x[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def elementwise_product(x, y):
    """x times y, row by row."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = x[i] * y[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def elementwise_difference(x, y):
    """x less y, row by row."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = x[i] - y[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_sum(x, n, t0, first):
    """Sum of the last n values; n zeros sum to exactly 0."""
    size, start = len(x), first - (first + t0 - HISTORY) % n
    out = np.empty(size)
    tail, later_tail = np.zeros(n + 1), np.zeros(n + 1)
    while start + 2 * n <= size:  # two blocks at once: their additions are independent
        # Slices, here and below: an index that might be negative keeps a loop off the vector registers.
        older, newer, latest = x[start - n : start], x[start : start + n], x[start + n : start + 2 * n]
        row, later_row = out[start : start + n], out[start + n : start + 2 * n]
        total, later = 0.0, 0.0
        for k in range(n - 1, 0, -1):
            total, later = total + older[k], later + newer[k]
            tail[k], later_tail[k] = total, later
        total, later = 0.0, 0.0
        for k in range(n):
            total, later = total + newer[k], later + latest[k]
            row[k], later_row[k] = total + tail[k + 1], later + later_tail[k + 1]
        start += 2 * n
    for begin in range(start, size, n):
        older, newer, row = x[begin - n : begin], x[begin : begin + n], out[begin : begin + n]
        total = 0.0
        for k in range(n - 1, 0, -1):
            total += older[k]
            tail[k] = total
        total = 0.0
        for k in range(len(row)):
            total += newer[k]
            row[k] = total + tail[k + 1]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def doubled_window_sum(total, n, first):
    """Sums of 2 n values from sums of n."""
    out = np.empty(len(total))
    rows, newer, older = out[first:], total[first:], total[first - n :]
    for i in range(len(rows)):
        rows[i] = newer[i] + older[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_max(x, n, t0, first):
    """Largest of the last n values. Values may be missing before the first bar only: a window is NaN until past it."""
    size, start = len(x), first - (first + t0 - HISTORY) % n
    out = np.empty(size)
    tail, later_tail = np.full(n + 1, -np.inf), np.full(n + 1, -np.inf)
    while start + 2 * n <= size:  # two blocks at once, as in `rolling_sum`
        older, newer, latest = x[start - n : start], x[start : start + n], x[start + n : start + 2 * n]
        row, later_row = out[start : start + n], out[start + n : start + 2 * n]
        best, later = -np.inf, -np.inf
        for k in range(n - 1, 0, -1):
            best, later = max(best, older[k]), max(later, newer[k])
            tail[k], later_tail[k] = best, later
        best, later = -np.inf, -np.inf
        for k in range(n):
            best, later = max(best, newer[k]), max(later, latest[k])
            row[k], later_row[k] = max(best, tail[k + 1]), max(later, later_tail[k + 1])
        start += 2 * n
    for begin in range(start, size, n):
        older, newer, row = x[begin - n : begin], x[begin : begin + n], out[begin : begin + n]
        best = -np.inf
        for k in range(n - 1, 0, -1):
            best = max(best, older[k])
            tail[k] = best
        best = -np.inf
        for k in range(len(row)):
            best = max(best, newer[k])
            row[k] = max(best, tail[k + 1])
    oldest, rows = x[first - n + 1 :], out[first:]
    for i in range(len(rows)):
        rows[i] += 0.0 * oldest[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_min(x, n, t0, first):
    """Smallest of the last n values; missing values as in `rolling_max`."""
    return -rolling_max(-x, n, t0, first)


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_covariance(x, y, n, t0, first):
    """Population covariance of the last n pairs.

    Measured from the first pair of the aligned block, which every window that ends in the block holds: the numbers
    multiplied are small differences instead of prices, and a constant window gives exactly 0.
    """
    size = len(x)
    out, all_x, all_y = np.empty(size), np.empty(size), np.empty(size)
    tail_x, tail_y, tail_xy = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for start in range(first - (first + t0 - HISTORY) % n, size, n):
        older_x, older_y = x[start - n : start], y[start - n : start]
        newer_x, newer_y, row = x[start : start + n], y[start : start + n], out[start : start + n]
        row_x, row_y = all_x[start : start + n], all_y[start : start + n]
        x0, y0 = x[start], y[start]
        sx, sy, sxy = 0.0, 0.0, 0.0
        for k in range(n - 1, 0, -1):
            dx, dy = older_x[k] - x0, older_y[k] - y0
            sx += dx
            sy += dy
            sxy += dx * dy
            tail_x[k], tail_y[k], tail_xy[k] = sx, sy, sxy
        sx, sy, sxy = 0.0, 0.0, 0.0
        for k in range(len(row)):
            dx, dy = newer_x[k] - x0, newer_y[k] - y0
            sx += dx
            sy += dy
            sxy += dx * dy
            row[k], row_x[k], row_y[k] = sxy + tail_xy[k + 1], sx + tail_x[k + 1], sy + tail_y[k + 1]
    out_rows, all_x, all_y = out[first:], all_x[first:], all_y[first:]
    for i in range(len(out_rows)):
        out_rows[i] = (out_rows[i] - all_x[i] * all_y[i] / n) / n
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_std(x, n, t0, first):
    """Population standard deviation of the last n values (TA-Lib STDDEV), measured as `rolling_covariance` does."""
    size = len(x)
    out, totals = np.empty(size), np.empty(size)
    tail, tail_2 = np.zeros(n + 1), np.zeros(n + 1)
    for start in range(first - (first + t0 - HISTORY) % n, size, n):
        older, newer, row, total = (
            x[start - n : start], x[start : start + n], out[start : start + n], totals[start : start + n]
        )  # fmt: skip
        x0 = x[start]
        s1, s2 = 0.0, 0.0
        for k in range(n - 1, 0, -1):
            d = older[k] - x0
            s1 += d
            s2 += d * d
            tail[k], tail_2[k] = s1, s2
        s1, s2 = 0.0, 0.0
        for k in range(len(row)):
            d = newer[k] - x0
            s1 += d
            s2 += d * d
            total[k], row[k] = s1 + tail[k + 1], s2 + tail_2[k + 1]
    rows, totals = out[first:], totals[first:]
    for i in range(len(rows)):  # separate from the sums: divisions and roots run on vector registers
        variance = (rows[i] - totals[i] * totals[i] / n) / n
        rows[i] = math.sqrt(0.0 if variance < 0.0 else variance)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_return_std(ret, n, t0, first):
    """Population standard deviation of the last n log returns, at least FLOOR."""
    out = rolling_std(ret, n, t0, first)
    rows = out[first:]
    for i in range(len(rows)):
        rows[i] = FLOOR if rows[i] < FLOOR else rows[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_correlation(x, y, n, t0, first):
    """Pearson correlation of the last n pairs, within [-1, 1]; 0 where either side is constant.

    Sums are measured as in `rolling_covariance`.
    """
    size = len(x)
    out, sums = np.empty(size), np.empty((4, size))
    tail_x, tail_y, tail_xy, tail_xx, tail_yy = (
        np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    )  # fmt: skip
    for start in range(first - (first + t0 - HISTORY) % n, size, n):
        older_x, older_y = x[start - n : start], y[start - n : start]
        newer_x, newer_y, row = x[start : start + n], y[start : start + n], out[start : start + n]
        rows = sums[:, start : start + n]
        row_x, row_y, row_xx, row_yy = rows[0], rows[1], rows[2], rows[3]
        x0, y0 = x[start], y[start]
        sx, sy, sxy, sxx, syy = 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(n - 1, 0, -1):
            dx, dy = older_x[k] - x0, older_y[k] - y0
            sx, sy, sxy, sxx, syy = sx + dx, sy + dy, sxy + dx * dy, sxx + dx * dx, syy + dy * dy
            tail_x[k], tail_y[k], tail_xy[k], tail_xx[k], tail_yy[k] = sx, sy, sxy, sxx, syy
        sx, sy, sxy, sxx, syy = 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(len(row)):
            dx, dy = newer_x[k] - x0, newer_y[k] - y0
            sx, sy, sxy, sxx, syy = sx + dx, sy + dy, sxy + dx * dy, sxx + dx * dx, syy + dy * dy
            row[k], row_x[k], row_y[k] = sxy + tail_xy[k + 1], sx + tail_x[k + 1], sy + tail_y[k + 1]
            row_xx[k], row_yy[k] = sxx + tail_xx[k + 1], syy + tail_yy[k + 1]
    _correlate(out[first:], sums[0, first:], sums[1, first:], sums[2, first:], sums[3, first:], n)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _correlate(out, sum_x, sum_y, sum_xx, sum_yy, n):
    """The sum of products in `out` becomes the correlation."""
    for i in range(len(out)):
        spread_x, spread_y = sum_xx[i] - sum_x[i] * sum_x[i] / n, sum_yy[i] - sum_y[i] * sum_y[i] / n
        sum_xx[i] = (0.0 if spread_x < 0.0 else spread_x) * (0.0 if spread_y < 0.0 else spread_y)
    for i in range(len(out)):
        together = safe_ratio(out[i] - sum_x[i] * sum_y[i] / n, math.sqrt(sum_xx[i]), 0.0)
        out[i] = min(max(together, -1.0), 1.0)


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_weighted_sum(x, weights, first):
    """Sum of weights[k] * x k rows ago: a fixed causal filter, by the definition (an FFT would mix in the future).

    weights : their number is a multiple of 4, newest first.
    """
    out = np.zeros(len(x))
    rows = len(x) - first
    total = out[first:]
    for k in range(0, len(weights), 4):
        a, b, c, d = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        x0, x1, x2, x3 = x[first - k :], x[first - k - 1 :], x[first - k - 2 :], x[first - k - 3 :]
        for j in range(rows):
            total[j] += (a * x0[j] + b * x1[j]) + (c * x2[j] + d * x3[j])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def bars_since_rolling_max(x, n, t0, first):
    """Number of rows since the largest of the last n values, the latest of equals (TA-Lib AROON)."""
    size = len(x)
    out = np.empty(size)
    tail, tail_row = np.full(n + 1, -np.inf), np.zeros(n + 1, np.int64)
    for start in range(first - (first + t0 - HISTORY) % n, size, n):
        older, newer, row = x[start - n : start], x[start : start + n], out[start : start + n]
        best, best_row = -np.inf, -1
        for k in range(n - 1, 0, -1):
            best_row = k - n if older[k] > best else best_row
            best = max(best, older[k])
            tail[k], tail_row[k] = best, best_row
        best, best_row = -np.inf, 0
        for k in range(len(row)):
            best = max(best, newer[k])
            row[k] = best
        for k in range(len(row)):  # separate loop: a position depends on the previous one only, not on two comparisons
            best_row = k if newer[k] == row[k] else best_row
            row[k] = k - (tail_row[k + 1] if tail[k + 1] > row[k] else best_row)
    oldest, rows = x[first - n + 1 :], out[first:]
    for i in range(len(rows)):
        rows[i] += 0.0 * oldest[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def normalized_difference(a, b):
    """(a - b) / (a + b) of two amounts: -1 to 1, and 0 where both are 0."""
    return safe_ratio(a - b, a + b, 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_sum_ratio(x, total, n, t0, out):
    """Sum of the last n values of x over a total of as many bars; 0 where nothing traded."""
    x, total = rolling_sum(x, n, t0, HISTORY)[HISTORY:], total[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(x[i], total[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_coefficient_of_variation(x, n, t0, out):
    """Deviation over mean of the last n values of what is never negative; 0 where all are 0."""
    spread, total = rolling_std(x, n, t0, HISTORY)[HISTORY:], rolling_sum(x, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(n * spread[i], total[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def write_rolling_correlation(x, y, n, t0, out):
    """Pearson correlation of the last n pairs; 0 where either side is constant."""
    x = rolling_correlation(x, y, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = x[i]
