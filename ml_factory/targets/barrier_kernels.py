"""Compiled scans behind the labels: barrier prices, the first barrier touched, overlap of labels.

Loops over scalars on purpose: a row's bits depend on no array length, so more bars never change them. A row strides
over blocks of 8, 64, 512 and 4096 bars whose extremes stay inside its barriers and looks at single bars only near its
ends, so its cost grows with the logarithm of its lifetime. Largest and smallest are exact: the stride gives the bits of
the step-by-step walk, because a bar's high and low contain its open and close (the bar contract).
"""

import math

import numpy as np
from numba import njit

BARRIERS = ("upper", "lower", "vertical", "session", "ambiguous")
UPPER, LOWER, VERTICAL, SESSION, AMBIGUOUS = range(5)
NONE = -1
ON_TICK = 1e-4  # of a tick: closer than this a price is on the grid
SLACK = 1e-6  # of a tick: rounding error of binary fractions of a decimal tick
_FAN, _LEVELS = 3, 4  # a block is 2**3 of the level below; 8**4 bars in the largest
_SHARES = 6  # 2**6 bars in a block of shares


@njit(cache=True, nogil=True)
def barrier_prices_kernel(bars, segment, span, multiples, horizon, tick, cost_ticks, rounds, prices):
    """Compute upper and lower barrier prices, NaN before `span` returns of the volatility.

    bars : open, high, low, close, each float64[N]
    multiples : k_up, k_down
    rounds : outwards to the tick, on rows whose own bar is on it (a back-adjusted bar is not)
    prices : upper, lower, each float64[N], written
    """
    open_, high, low, close = bars
    k_up, k_down = multiples
    up, down = prices
    n = len(close)
    decay, root = 1.0 - 2.0 / (span + 1.0), math.sqrt(horizon)
    per_tick = 1.0 / tick if rounds and tick > 0.0 else 0.0
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
        if per_tick > 0.0 and _on_grid(open_[i], high[i], low[i], close[i], per_tick):
            up[i] = math.ceil(above * per_tick - SLACK) * tick
            floor = math.floor(below * per_tick + SLACK) * tick
            if floor > 0.0:  # below the first tick there is no price: the barrier stays between 0 and the tick
                down[i] = floor


@njit(cache=True, nogil=True)
def _on_grid(open_, high, low, close, per_tick):
    apart = max(_off(open_ * per_tick), _off(high * per_tick))
    return max(apart, _off(low * per_tick), _off(close * per_tick)) <= ON_TICK


@njit(cache=True, nogil=True)
def _off(steps):
    return abs(steps - np.rint(steps))


@njit(cache=True, nogil=True)
def block_extremes_kernel(high, low):
    """Return highest high and lowest low of every block, float64[M, 2], and the start of each level, int64."""
    n = len(high)
    begins = np.zeros(_LEVELS + 2, np.int64)
    for level in range(1, _LEVELS + 1):
        begins[level + 1] = begins[level] + (n >> (_FAN * level))
    blocks = np.empty((begins[_LEVELS + 1], 2))
    for b in range(n >> _FAN):
        top, bottom = -np.inf, np.inf
        for j in range(b << _FAN, (b + 1) << _FAN):
            top, bottom = max(top, high[j]), min(bottom, low[j])
        blocks[b, 0], blocks[b, 1] = top, bottom
    for level in range(2, _LEVELS + 1):
        for b in range(n >> (_FAN * level)):
            top, bottom = -np.inf, np.inf
            for j in range(begins[level - 1] + (b << _FAN), begins[level - 1] + ((b + 1) << _FAN)):
                top, bottom = max(top, blocks[j, 0]), min(bottom, blocks[j, 1])
            blocks[begins[level] + b, 0], blocks[begins[level] + b, 1] = top, bottom
    return blocks, begins


@njit(cache=True, nogil=True)
def _stride(high, low, blocks, begins, first, stop, up, down, best, worst):
    """Return (first bar of first..stop-1 that reaches up or down, else stop; best and worst price before it)."""
    j, level = first, 0
    while j < stop:
        shift = _FAN * level
        if level == 0:
            top, bottom = high[j], low[j]
        elif j + (1 << shift) <= stop:
            b = begins[level] + (j >> shift)
            top, bottom = blocks[b, 0], blocks[b, 1]
        else:
            level -= 1
            continue
        if top < up and bottom > down:
            best = top if top > best else best
            worst = bottom if bottom < worst else worst
            j += 1 << shift
            if level < _LEVELS and (j >> shift) & ((1 << _FAN) - 1) == 0:
                level += 1
        elif level == 0:
            return j, best, worst
        else:
            level -= 1
    return stop, best, worst


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
def _walk(open_, high, low, first, stop, up, down, slack, best, worst):
    """Walk bars first..stop-1 to the first exit; return barrier, price, position, best and worst price before it."""
    for j in range(first, stop):
        barrier, price = _touch(open_[j], high[j], low[j], up, down, slack)
        if barrier != NONE:
            return barrier, price, j, best, worst
        best, worst = max(best, high[j]), min(worst, low[j])
    return NONE, np.nan, stop - 1, best, worst


@njit(cache=True, nogil=True)
def _exit_excursions(barrier, price, open_, high, low, up, down, best, worst):
    """Return best and worst price including the exit bar: nothing beyond the exit, the other side in full."""
    if barrier == AMBIGUOUS:
        return max(best, up), min(worst, down)
    if price == open_:
        return max(best, price), min(worst, price)
    if barrier == UPPER:
        return max(best, price), min(worst, low)
    return max(best, high), min(worst, price)


@njit(cache=True, nogil=True)
def barrier_exit_kernel(bars, entry, end, prices, slack, horizon, minute_bars, exits):
    """Find the exit of the rows `entry` on the bars entry + 1 to `end`, both int64[R], end > entry.

    Parameters
    ----------
    bars : open, high, low, close, each float64[N]
    prices : upper and lower barrier of every bar, each float64[N]; infinite where there are none
    minute_bars : open, high, low, and int64[N] where those of each bar begin and stop; both empty where there are none
    exits : written, R values each: barrier int8, SESSION where `end` comes before entry + horizon; exit bar int64; ret,
        mae, mfe float64, log returns of a long position
    """
    open_, high, low, close = bars
    up, down = prices
    f_open, f_high, f_low, f_first, f_stop = minute_bars
    barrier, exit_bar, ret, mae, mfe = exits
    count = len(entry)
    blocks, begins = block_extremes_kernel(high, low)
    after, j, top, bottom = -1, 0, 0.0, 0.0
    for r in range(count - 1, -1, -1):  # backwards: the next row has scanned nearly all of this row's bars
        i, stop = entry[r], end[r] + 1
        above, below = up[i], down[i]
        inside = max(top, high[i + 1]) < above - slack and min(bottom, low[i + 1]) > below + slack
        # One bar more than this row has, at its end, is harmless where neither extreme is its own.
        spare = j == stop + 1 and high[stop] < top and low[stop] > bottom
        if after == i + 1 and inside and (j <= stop or spare):
            j, top, bottom = min(j, stop), max(top, high[i + 1], close[i]), min(bottom, low[i + 1], close[i])
        else:
            j, top, bottom = i + 1, close[i], close[i]
        j, top, bottom = _stride(high, low, blocks, begins, j, stop, above - slack, below + slack, top, bottom)
        after, leaves, best, worst = i, min(j, end[r]), top, bottom
        if j > end[r]:
            side, price = (VERTICAL if leaves == i + horizon else SESSION), close[leaves]
        else:
            side, price = _touch(open_[j], high[j], low[j], above, below, slack)
            minute_exit, minute_price, f = NONE, np.nan, 0
            if len(f_first):
                minute_exit, minute_price, f, minute_best, minute_worst = _walk(
                    f_open, f_high, f_low, f_first[j], f_stop[j], above, below, slack, best, worst
                )
            if minute_exit == NONE:  # minute bars without the touch decide nothing
                best, worst = _exit_excursions(side, price, open_[j], high[j], low[j], above, below, best, worst)
            else:
                side, price = minute_exit, minute_price
                best, worst = _exit_excursions(
                    side, price, f_open[f], f_high[f], f_low[f], above, below, minute_best, minute_worst
                )
        barrier[r], exit_bar[r] = side, leaves
        ret[r] = math.log(price / close[i])
        mae[r], mfe[r] = math.log(worst / close[i]), math.log(best / close[i])


@njit(cache=True, nogil=True)
def log_price_ratio_kernel(price, reference, rows):
    """Return float64[R]: log(price / reference) on these rows of two float64[N]."""
    out = np.empty(len(rows))
    for r in range(len(rows)):
        out[r] = math.log(price[rows[r]] / reference[rows[r]])
    return out


@njit(cache=True, nogil=True)
def average_uniqueness_kernel(start, end, n):
    """Return float64[R]: mean over the bars start..end (int64[R], both included, of n) of 1 / labels alive on that bar.

    Sums run inside blocks of 64 bars: O(1 + life / 64) a label, without rounding carried over from distant bars.
    """
    alive = np.zeros(n + 1, np.int32)
    for r in range(len(start)):
        alive[start[r]] += 1
        alive[end[r] + 1] -= 1
    running = np.empty(n)  # sum of the shares from the bar's block begin to the bar
    total, count = 0.0, 0
    for t in range(n):
        if t & ((1 << _SHARES) - 1) == 0:
            total = 0.0
        count += alive[t]
        total += 1.0 / count if count else 0.0
        running[t] = total
    share = np.empty(len(start))
    for r in range(len(start)):
        first, last = start[r], end[r]
        total = running[last]
        for b in range(first >> _SHARES, last >> _SHARES):
            total += running[((b + 1) << _SHARES) - 1]
        if first & ((1 << _SHARES) - 1):
            total -= running[first - 1]
        share[r] = min(total / (last - first + 1), 1.0)
    return share
