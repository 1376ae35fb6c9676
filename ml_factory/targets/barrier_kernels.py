"""Compiled scans behind the labels: barrier prices, and the first barrier touched.

Loops over scalars on purpose: a row's bits depend on no array length, so more bars never change them.
"""

import math

import numpy as np
from numba import njit

BARRIERS = ("upper", "lower", "vertical", "session", "ambiguous")
UPPER, LOWER, VERTICAL, SESSION, AMBIGUOUS = range(5)
NONE = -1
ON_TICK = 1e-4  # of a tick: closer than this a price is on the grid
SLACK = 1e-6  # of a tick: rounding error of binary fractions of a decimal tick


@njit(cache=True, nogil=True)
def barrier_prices_kernel(bars, segment, span, multiples, horizon, tick, cost_ticks, prices):
    """Compute upper and lower barrier prices, NaN before `span` returns of the volatility.

    bars : open, high, low, close, each float64[N]
    multiples : k_up, k_down
    tick : prices are rounded outwards to it on rows whose own bar is on it (a back-adjusted bar is not); 0: never
    prices : upper, lower, each float64[N], written
    """
    open_, high, low, close = bars
    k_up, k_down = multiples
    up, down = prices
    n = len(close)
    decay, root = 1.0 - 2.0 / (span + 1.0), math.sqrt(horizon)
    per_tick = 1.0 / tick if tick > 0.0 else 0.0
    squares, weight, seen = 0.0, 0.0, 0
    for i in range(n):
        # A jump over a session edge or a hole is no bar's return.
        if i > 0 and segment[i] == segment[i - 1]:
            r = math.log(close[i] / close[i - 1])
            squares, weight, seen = decay * squares + r * r, decay * weight + 1.0, seen + 1
        up[i] = down[i] = np.nan
        if seen < span:
            continue
        scale = math.sqrt(squares / weight) * root
        far, near = k_up * scale, k_down * scale
        least = max(1.0, cost_ticks) * tick / close[i]
        if min(far, near) < least:  # log1p(x) <= x: computed only where it may matter
            least = math.log1p(least)
            far, near = max(far, least), max(near, least)
        if far <= 0.0 or near <= 0.0:
            continue  # a market without a tick that did not move: no distance
        rise = math.exp(far)
        above, below = close[i] * rise, close[i] / (rise if near == far else math.exp(near))
        if math.isinf(above) or below <= 0.0:
            continue  # a volatility beyond all prices, as from a wrong unit: no barrier price
        up[i], down[i] = above, below
        apart = max(
            _off(open_[i] * per_tick), _off(high[i] * per_tick), _off(low[i] * per_tick), _off(close[i] * per_tick)
        )
        if per_tick > 0.0 and apart <= ON_TICK:
            up[i] = math.ceil(above * per_tick - SLACK) * tick
            floor = math.floor(below * per_tick + SLACK) * tick
            if floor > 0.0:  # below the first tick there is no price: the barrier stays between 0 and the tick
                down[i] = floor


@njit(cache=True, nogil=True)
def _off(steps):
    return abs(steps - np.rint(steps))


@njit(cache=True, nogil=True)
def _touch(open_, high, low, up, down, slack):
    """Return (barrier, exit price) of one bar; NONE when it stays inside."""
    if open_ >= up - slack:
        return UPPER, open_
    if open_ <= down + slack:
        return LOWER, open_
    if high >= up - slack:
        return (AMBIGUOUS, np.nan) if low <= down + slack else (UPPER, up)
    return (LOWER, down) if low <= down + slack else (NONE, np.nan)


@njit(cache=True, nogil=True)
def _walk(open_, high, low, first, stop, up, down, slack):
    """Walk bars first..stop-1 to the first exit; return barrier, price and position."""
    for j in range(first, stop):
        barrier, price = _touch(open_[j], high[j], low[j], up, down, slack)
        if barrier != NONE:
            return barrier, price, j
    return NONE, np.nan, stop - 1


@njit(cache=True, nogil=True)
def barrier_exit_kernel(bars, entry, end, prices, slack, horizon, minute_bars, exits):
    """Find the exit of the rows `entry` on the bars entry + 1 to `end`, both int64[R], end > entry.

    Parameters
    ----------
    bars : open, high, low, close, each float64[N]
    prices : upper and lower barrier of every bar, each float64[N]; infinite where there are none
    minute_bars : open, high, low, and int64[N] where those of each bar begin and stop; both empty where there are none
    exits : written, R values each: barrier int8, SESSION where `end` comes before entry + horizon; exit bar int64; ret
        float64, log return of a long position
    """
    open_, high, low, close = bars
    up, down = prices
    f_open, f_high, f_low, f_first, f_stop = minute_bars
    barrier, exit_bar, ret = exits
    for r in range(len(entry)):
        i = entry[r]
        side, price, j = _walk(open_, high, low, i + 1, end[r] + 1, up[i], down[i], slack)
        if side == NONE:
            side, price = (VERTICAL if j == i + horizon else SESSION), close[j]
        elif len(f_first):
            minute_side, minute_price, _ = _walk(f_open, f_high, f_low, f_first[j], f_stop[j], up[i], down[i], slack)
            if minute_side != NONE:  # minute bars without the touch decide nothing
                side, price = minute_side, minute_price
        barrier[r], exit_bar[r], ret[r] = side, j, math.log(price / close[i])
