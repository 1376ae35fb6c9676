"""The scans behind the labels: where the barriers stand, which one a price reaches first, how lives overlap.

Compiled loops over scalars on purpose: a row's bits depend on no array length, so more bars never change them.
"""

import math

import numpy as np
from numba import njit

BARRIERS = ("upper", "lower", "vertical", "session", "ambiguous")
UPPER, LOWER, VERTICAL, SESSION, AMBIGUOUS = range(5)
NONE = -1
ON_TICK = 1e-4  # of a tick: closer than this a price stands on the grid
SLACK = 1e-6  # of a tick: what binary fractions of a decimal tick may be off


@njit(cache=True)
def barrier_prices(open_, high, low, close, segment, span, k_up, k_down, horizon, tick, cost_ticks):
    """Upper and lower barrier prices float64[N], NaN before `span` returns of the volatility are seen."""
    n = len(close)
    up, down = np.full(n, np.nan), np.full(n, np.nan)
    decay = 1.0 - 2.0 / (span + 1.0)
    squares, weight, seen = 0.0, 0.0, 0
    for i in range(n):
        # A jump over a session edge or a hole is no bar's return.
        if i > 0 and segment[i] == segment[i - 1]:
            r = math.log(close[i] / close[i - 1])
            squares, weight, seen = decay * squares + r * r, decay * weight + 1.0, seen + 1
        if seen < span:
            continue
        scale = math.sqrt(squares / weight) * math.sqrt(horizon)
        least = math.log1p(max(1.0, cost_ticks) * tick / close[i])
        far, near = max(k_up * scale, least), max(k_down * scale, least)
        if far <= 0.0 or near <= 0.0:
            continue  # a market without a tick that did not move: no distance to ask about
        up[i], down[i] = close[i] * math.exp(far), close[i] * math.exp(-near)
        # Back-adjusted prices are off the grid: all four of a bar stand on it only where there is one.
        if tick > 0.0 and _on_grid(open_[i], high[i], low[i], close[i], tick):
            up[i] = math.ceil(up[i] / tick - SLACK) * tick
            down[i] = math.floor(down[i] / tick + SLACK) * tick
    return up, down


@njit(cache=True)
def _on_grid(open_, high, low, close, tick):
    for price in (open_, high, low, close):
        steps = price / tick
        if abs(steps - round(steps)) > ON_TICK:
            return False
    return True


@njit(cache=True)
def _touch(open_, high, low, up, down, slack):
    """(barrier, price at which one bar leaves); NONE when it stays inside."""
    if open_ >= up - slack:
        return UPPER, open_
    if open_ <= down + slack:
        return LOWER, open_
    if high >= up - slack:
        return (AMBIGUOUS, np.nan) if low <= down + slack else (UPPER, up)
    return (LOWER, down) if low <= down + slack else (NONE, np.nan)


@njit(cache=True)
def _walk(open_, high, low, first, stop, up, down, slack, best, worst):
    """Bars first..stop-1 until one leaves: (its barrier, price, position, best and worst price before it)."""
    for j in range(first, stop):
        barrier, price = _touch(open_[j], high[j], low[j], up, down, slack)
        if barrier != NONE:
            return barrier, price, j, best, worst
        best, worst = max(best, high[j]), min(worst, low[j])
    return NONE, np.nan, stop - 1, best, worst


@njit(cache=True)
def _leave(barrier, price, open_, high, low, up, down, best, worst):
    """Best and worst price with the leaving bar counted: nothing beyond the exit, the other side at its worst."""
    if barrier == AMBIGUOUS:
        return max(best, up), min(worst, down)
    if price == open_:
        return max(best, price), min(worst, price)
    if barrier == UPPER:
        return max(best, price), min(worst, low)
    return max(best, high), min(worst, price)


@njit(cache=True)
def scan(open_, high, low, close, last, up, down, slack, horizon, f_open, f_high, f_low, f_first, f_stop):
    """barrier int8[N] (NONE: no row), exit_bar int64[N], ret, mae, mfe float64[N]."""
    n = len(close)
    barrier, exit_bar = np.full(n, NONE, np.int8), np.full(n, -1, np.int64)
    ret, mae, mfe = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    for i in range(n):
        if math.isnan(up[i]) or i == last[i]:
            continue
        end = min(i + horizon, last[i])
        side, price, j, best, worst = _walk(open_, high, low, i + 1, end + 1, up[i], down[i], slack, close[i], close[i])
        if side == NONE:
            side, price = (VERTICAL if i + horizon <= last[i] else SESSION), close[end]
        else:
            finer, fine_price, f, fine_best, fine_worst = _walk(
                f_open, f_high, f_low, f_first[j], f_stop[j], up[i], down[i], slack, best, worst
            )
            if finer == NONE:  # a fine feed that does not show the touch settles nothing
                best, worst = _leave(side, price, open_[j], high[j], low[j], up[i], down[i], best, worst)
            else:
                side, price = finer, fine_price
                best, worst = _leave(side, price, f_open[f], f_high[f], f_low[f], up[i], down[i], fine_best, fine_worst)
        barrier[i], exit_bar[i] = side, j
        ret[i] = math.log(price / close[i])
        mae[i], mfe[i] = math.log(worst / close[i]), math.log(best / close[i])
    return barrier, exit_bar, ret, mae, mfe


@njit(cache=True)
def mean_share(start, end, concurrency):
    share = np.empty(len(start))
    for i in range(len(start)):
        total = 0.0
        for t in range(start[i], end[i] + 1):
            total += 1.0 / concurrency[t]
        share[i] = total / (end[i] - start[i] + 1)
    return share
