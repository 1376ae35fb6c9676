"""Compiled resampling of bars to buckets, the same for a whole file and for one bar at a time.

Two steps, each with its state in a record of plain numbers, so that splitting the bars anywhere changes no bit:
`_split_runs` splits bars into runs inside one trading interval, one contract and no hole; `_resample_kernel` aggregates
runs to buckets of one length. Sums are taken bar by bar, never in blocks.
"""

import numpy as np
from numba import njit

from ml_factory.data.sessions import DAY_NS, assign_sessions

# Trading without a break, [begin, close): a session, or the trading after its scheduled early close.
STRETCH = np.dtype([("open", "i8"), ("begin", "i8"), ("close", "i8"), ("session", "i4")])

# Rows [first, last) of one stretch, contract and segment. `rolled`: the run before it was of another contract.
# `final`: nothing trades after its stretch's close, so a bar that reaches over the close is complete there.
RUN = np.dtype([("first", "i8"), ("last", "i8"), *STRETCH.descr, ("segment", "i4"), ("rolled", "i1"), ("final", "i1")])

# Position in the feed: `clock` is the end of the last bar, `previous` the start of the last bar inside a session.
FEED_POSITION = np.dtype([("clock", "i8"), ("previous", "i8"), ("close", "i8"), ("contract", "i8"), ("segment", "i4")])

# The unfinished bucket: takes bars that start before `until`, is complete at `known_at`.
BUCKET = np.dtype(
    [(name, "i8") for name in ("start", "until", "known_at")]
    + [(name, "f8") for name in ("open", "high", "low", "close", "volume", "chain")]
    + [(name, "i4") for name in ("session", "segment", "live")]
)

SESSIONS_AT_ONCE = 8  # about 500 kB of bars: the second-level cache
BEFORE_ALL = np.iinfo(np.int64).min


def initial_bar_kernel_state() -> np.ndarray:
    """Return FEED_POSITION[1] before any bar."""
    return np.array([(BEFORE_ALL, BEFORE_ALL, BEFORE_ALL, -1, -1)], FEED_POSITION)


def trading_intervals(days: np.ndarray, calendar: str) -> np.ndarray:
    """Return STRETCH[K], increasing: every trading interval that touches the given UTC days, and adjacent ones.

    days : int64, days since 1970-01-01. Noon UTC lies inside one exchange day in every calendar, so the noons around a
        day identify its sessions; `assign_sessions` is called a few times whatever the number of bars
    """
    noons = np.unique(np.asarray(days, np.int64)[:, None] + np.array([-1, 0, 1])) * DAY_NS + DAY_NS // 2
    opened = begin = np.unique(assign_sessions(noons, calendar).open_ns)
    found = []
    while len(begin):
        at = assign_sessions(begin, calendar)
        trading = at.inside & (at.open_ns == opened)
        part = np.empty(int(trading.sum()), STRETCH)
        part["open"], part["begin"] = opened[trading], begin[trading]
        part["close"], part["session"] = at.close_ns[trading], at.id[trading]
        found.append(part)
        opened, begin = part["open"], part["close"]  # the same session may continue after this close
    table = np.concatenate(found) if found else np.empty(0, STRETCH)
    return table[np.argsort(table["begin"])]


def utc_days_of_bars(start: np.ndarray) -> np.ndarray:
    """Return the UTC days on which bars start; `start` is int64 ns, increasing."""
    if not len(start):
        return np.empty(0, np.int64)
    days = np.arange(start[0] // DAY_NS, start[-1] // DAY_NS + 1)
    first = np.searchsorted(start, np.append(days, days[-1] + 1) * DAY_NS)
    return days[np.diff(first) > 0]


def split_into_trading_runs(
    start: np.ndarray, contract: np.ndarray, stretches: np.ndarray, bar_ns: int, silence_ns: int, position: np.ndarray
) -> tuple[np.ndarray, int]:
    """Split bars into runs inside one trading interval, one contract and no hole.

    Parameters
    ----------
    start : int64[N] ns
    contract : int64[N] codes, or empty
    stretches : of `trading_intervals`
    bar_ns : length of a bar
    silence_ns : a longer step between two starts is a hole
    position : FEED_POSITION[1], updated; pass it on to the next chunk

    Returns
    -------
    (RUN[R], row) : the runs, and the first row that starts before the end of the previous bar, or -1
    """
    runs = np.empty(len(start), RUN)  # untouched memory pages cost nothing
    count, wrong = _split_runs(start, contract, stretches, bar_ns, silence_ns, position, runs)
    return runs[:count].copy(), wrong


@njit(cache=True, nogil=True)
def _split_runs(start, contract, stretches, bar_ns, silence_ns, position, runs):
    """Fill `runs` from the front, compiled; return (how many, the first row out of order or -1). See
    `split_into_trading_runs`.
    """
    now, count, k, row = position[0], 0, 0, 0
    clock, previous, close, has_contract = now.clock, now.previous, now.close, len(contract) > 0
    while row < len(start):
        t = start[row]
        if t < clock:
            return count, row
        clock = t + bar_ns
        while k < len(stretches) and t >= stretches[k].close:
            k += 1
        if k == len(stretches) or t < stretches[k].begin:
            row += 1
            continue  # the halt, a weekend, after hours
        run, stretch = runs[count], stretches[k]
        rolled = has_contract and contract[row] != now.contract
        now.segment += rolled or stretch.close != close or t - previous > silence_ns
        run.first, run.open, run.begin, run.close = row, stretch.open, stretch.begin, stretch.close
        run.session, run.segment, run.rolled = stretch.session, now.segment, rolled
        run.final = k + 1 == len(stretches) or stretches[k + 1].begin != stretch.close
        if has_contract:
            now.contract = contract[row]
        count, close = count + 1, stretch.close
        row = _find_run_end(start, contract, row, bar_ns, silence_ns, close)
        run.last, previous = row, start[row - 1]
        clock = previous + bar_ns
    now.clock, now.previous, now.close = clock, previous, close
    return count, -1


@njit(cache=True, nogil=True)
def _find_run_end(start, contract, first, bar_ns, silence_ns, close):
    """Return the first row after `first` that begins another run, or that overlaps the row before it."""
    row, previous = np.uint64(first + 1), start[first]  # unsigned: numba omits the check for negative indices
    while row < np.uint64(len(start)):
        step = start[row] - previous
        if step < bar_ns or step > silence_ns or start[row] >= close:
            break
        if len(contract) > 0 and contract[row] != contract[first]:
            break
        previous = start[row]
        row += np.uint64(1)
    return np.int64(row)


def max_resampled_bars(start: np.ndarray, runs: np.ndarray, width_ns: int) -> int:
    """Return an upper bound of the buckets that these runs give, for allocation."""
    if not len(runs):
        return 1
    first, last = (start[rows] - runs["open"] for rows in (runs["first"], runs["last"] - 1))
    return 1 + int(np.minimum(last // width_ns - first // width_ns + 1, runs["last"] - runs["first"]).sum())


@njit(cache=True, nogil=True)
def resample_frames_kernel(start, bars, runs, widths_ns, bar_ns, buckets, begins, times, prices, marks):
    """Fill F frames as `_resample_kernel` does, frame f from column begins[f] on; return int64[F], where each ends.

    Some sessions at a time for all lengths: bars are then read from memory once, not once a frame.
    """
    ends = begins.copy()
    for first in range(0, len(runs), SESSIONS_AT_ONCE):
        some = runs[first : first + SESSIONS_AT_ONCE]
        for f in range(len(widths_ns)):
            out, bucket = ends[f], buckets[f : f + 1]
            ends[f] += _resample_kernel(
                start, bars, some, widths_ns[f], bar_ns, bucket, times[:, out:], prices[:, out:], marks[:, out:]
            )
    return ends


@njit(cache=True, nogil=True)
def _resample_kernel(start, bars, runs, width_ns, bar_ns, bucket, times, prices, marks):
    """Fill the columns of times, prices and marks from 0 on; return the number of finished buckets.

    Parameters
    ----------
    start : int64[N] ns
    bars : open, high, low, close, volume, chain, each float64[N] (the last two may be empty)
    runs : RUN[R]
    width_ns, bar_ns : length of a bucket and of a bar
    bucket : BUCKET[1], the unfinished bucket, updated
    times : int64[2, M] start, known_at
    prices : float64[6, M], as bars
    marks : int32[2, M] session, segment
    """
    opens, highs, lows, closes, volumes, chain = bars
    now, done = bucket[0], 0
    until, high, low, volume = now.until, now.high, now.low, now.volume
    for r in range(len(runs)):
        run, row, grid = runs[r], runs[r].first, runs[r].open
        while row < run.last:
            t = start[row]
            if now.live == 0 or t >= until or (run.rolled == 1 and row == run.first):
                inside = now.live == 1 and t < until  # only a roll ends a bucket before its time
                if t - grid >= width_ns:
                    grid += (t - grid) // width_ns * width_ns
                until = min(grid + width_ns, run.close)
                if inside:
                    now.known_at = t + bar_ns  # the new contract's first bar, once complete, shows that it is over
                if now.live == 1 and not (inside and until <= now.known_at):
                    now.high, now.low, now.volume = high, low, volume
                    done = write_bucket_kernel(bucket, times, prices, marks, done)
                now.start = t if inside else max(grid, run.begin)
                now.known_at, now.live, now.open = until, 1, opens[row]
                now.session, now.segment = run.session, run.segment
                now.chain = chain[row] if len(chain) > 0 else 1.0  # one contract a bucket, one factor
                high, low, volume = highs[row], lows[row], 0.0
                grid += width_ns
            row, high, low, volume = _aggregate_bars(
                start, highs, lows, volumes, row, run.last, until, high, low, volume
            )
            now.close = closes[row - 1]
            if run.final == 0:  # a bar that reaches over the close contains trades after it
                now.known_at = max(now.known_at, start[row - 1] + bar_ns)
    now.until, now.high, now.low, now.volume = until, high, low, volume
    return done


@njit(cache=True, nogil=True)
def _aggregate_bars(start, highs, lows, volumes, first, last, until, high, low, volume):
    """Aggregate the rows from `first` to `last` that start before `until`; return the next row, and their extremes."""
    row = np.uint64(first)
    while row < np.uint64(last) and start[row] < until:
        top, bottom = highs[row], lows[row]  # read first, so that the comparisons compile without branches
        high = top if top > high else high
        low = bottom if bottom < low else low
        if len(volumes) > 0:
            volume += volumes[row]
        row += np.uint64(1)
    return np.int64(row), high, low, volume


@njit(cache=True, nogil=True)
def write_bucket_kernel(bucket, times, prices, marks, at):
    """Write the unfinished bucket as column `at`, finished; return at + 1."""
    now = bucket[0]
    times[0, at], times[1, at] = now.start, now.known_at
    prices[0, at], prices[1, at], prices[2, at] = now.open, now.high, now.low
    prices[3, at], prices[4, at] = now.close, now.volume
    if now.chain != 1.0:  # without rolls its memory pages stay untouched
        prices[5, at] = now.chain
    marks[0, at], marks[1, at] = now.session, now.segment
    now.live = 0
    return at + 1


@njit(cache=True, nogil=True)
def unresampled_bars_kernel(start, runs, bar_ns, known_at, session, segment):
    """Fill known_at, session, segment [N] and return True where every bar is its own bucket on its session's grid."""
    for r in range(len(runs)):
        run = runs[r]
        previous = run.open
        for row in range(run.first, run.last):
            t = start[row]
            if t - previous != bar_ns and (t - previous) % bar_ns != 0:
                return False
            previous = t
        starts, known = start[run.first : run.last], known_at[run.first : run.last]
        for i in range(len(starts)):
            known[i] = starts[i] + bar_ns
        if run.final == 1:
            known[-1] = min(known[-1], run.close)
        session[run.first : run.last] = run.session
        segment[run.first : run.last] = run.segment
    return True


@njit(cache=True, nogil=True)
def asof_rows_kernel(known_at_base, known_at_coarse, rows):
    """Fill rows int64[N]: the last coarse position with known_at <= the base row's, -1 where none; one pass."""
    j = 0
    for i in range(len(known_at_base)):
        while j < len(known_at_coarse) and known_at_coarse[j] <= known_at_base[i]:
            j += 1
        rows[i] = j - 1
