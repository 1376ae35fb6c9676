"""Exact quantiles of every column of a row-major matrix, in one pass over it.

A sample of rows brackets each wanted rank between two of its values (Floyd and Rivest, 1975). One pass over the rows
then counts what lies below each bracket and keeps the few values inside, so the rank is found exactly among them. A
column whose rank fell outside its bracket, or whose bracket held too much, is selected by NumPy: always exact, seldom
slow. No copy of the matrix is made.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

SAMPLE_ROWS = 16_384
TILE_ROWS = 512
BRACKET = 4.5  # standard errors of a sample quantile on each side: one bracket in 100,000 misses its rank
LARGEST = np.float32(np.finfo(np.float32).max)


def quantiles(x_NF: np.ndarray, shares: tuple[float, ...], rows: np.ndarray | None = None) -> np.ndarray:
    """float64 (F, Q): np.quantile(column, shares), linear, to the bit, of the finite values of each column.

    x_NF : float32.  rows : int64 positions of the rows that count; None: all. A column without a finite value gives
    NaN. The columns are shared out over the processor's cores; no number depends on how many there are.
    """
    x_NF = np.asarray(x_NF, np.float32)
    count = len(x_NF) if rows is None else len(rows)
    features = x_NF.shape[1]
    if count < 4 * SAMPLE_ROWS or not features or x_NF.strides[1] != x_NF.itemsize:
        return np.array([_by_numpy(_column(x_NF, f, rows), shares) for f in range(features)]).reshape(-1, len(shares))
    rows = np.arange(0) if rows is None else np.ascontiguousarray(rows, np.int64)
    low_QF, high_QF = _brackets(x_NF, rows, count, shares)
    room = int(4 * BRACKET * count * (0.25 / SAMPLE_ROWS) ** 0.5) + 64
    threads = min(_cores(), features)
    edges = np.linspace(0, features, threads + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(
            lambda first, stop: _of_columns(x_NF, rows, count, first, stop, low_QF, high_QF, room, shares),
            edges[:-1],
            edges[1:],
        )
        return np.concatenate(list(parts))


def between(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Linear interpolation with the rounding of np.quantile: from the nearer end."""
    step = high - low
    return np.where(share < 0.5, low + step * share, high - step * (1 - share))


def _brackets(x_NF, rows, count, shares) -> tuple[np.ndarray, np.ndarray]:
    """float32 (Q, F) twice: sample values surely below and above each quantile."""
    chosen = np.linspace(0, count - 1, SAMPLE_ROWS).astype(np.int64)
    sample = np.where(np.isfinite(picked := x_NF[rows[chosen] if len(rows) else chosen]), picked, np.nan)
    ordered = np.sort(sample, axis=0)  # NaN goes to the end
    finite = np.count_nonzero(~np.isnan(ordered), axis=0)
    low_QF, high_QF = np.full((2, len(shares), x_NF.shape[1]), [[[-LARGEST]], [[LARGEST]]], np.float32)
    for q, share in enumerate(shares):
        place = (finite - 1) * share
        reach = BRACKET * np.sqrt(np.maximum(finite * share * (1 - share), 4.0))
        for edge_F, wanted in ((low_QF[q], np.floor(place - reach)), (high_QF[q], np.ceil(place + reach))):
            there = np.flatnonzero((wanted >= 0) & (wanted < finite))  # beyond the sample anything may come
            edge_F[there] = ordered[wanted[there].astype(np.int64), there]
    return low_QF, high_QF


def _of_columns(x_NF, rows, count, first, stop, low_QF, high_QF, room, shares) -> np.ndarray:
    """Quantiles (stop - first, Q) of a run of columns."""
    low_QF, high_QF = (np.ascontiguousarray(edge[:, first:stop]) for edge in (low_QF, high_QF))
    kept = np.empty((stop - first, len(shares) * room + TILE_ROWS + 1), np.float32)
    counts, finite, many = _count(x_NF, rows, count, first, low_QF, high_QF, kept)
    found = np.empty((stop - first, len(shares)))
    for f in range(stop - first):
        whole = many[f] <= len(shares) * room
        ordered = np.sort(kept[f, : many[f]]) if whole else kept[f, :0]
        for q, share in enumerate(shares):
            value = _ranked(finite[f], share, counts[q, f], low_QF[q, f], high_QF[q, f], ordered) if whole else None
            if value is None:
                found[f] = _by_numpy(_column(x_NF, first + f, rows if len(rows) else None), shares)
                break
            found[f, q] = value
    return found


def _ranked(finite, share, counts, low, high, ordered) -> float | None:
    """The quantile, where both of its ranks lie in the bracket; else None.

    counts : how many values are below the bracket, at its low edge, strictly inside, at its high edge.
    ordered : what was kept, rising.
    """
    if not finite:
        return np.nan
    below, at_low, inside, at_high = counts.tolist()
    place = (int(finite) - 1) * share
    ranks = int(place), min(int(place) + 1, int(finite) - 1)
    if not below <= ranks[0] <= ranks[1] < below + at_low + inside + at_high:
        return None
    start = np.searchsorted(ordered, low, side="right")
    ends = []
    for rank in ranks:
        rank -= below + at_low
        ends.append(low if rank < 0 else high if rank >= inside else ordered[start + rank])
    return float(between(*np.array(ends, np.float64), np.float64(place - ranks[0])))


@njit(cache=True, nogil=True)
def _count(x_NF, rows, count, first, low_QF, high_QF, kept):
    """Per bracket (Q, F, 4): values below it, at its low edge, strictly inside, at its high edge.

    Then finite values a column, and how many were kept: those strictly inside any bracket. Rows are turned to columns
    a tile at a time, so that each column is counted in registers.
    """
    shares, features = low_QF.shape
    room = kept.shape[1] - TILE_ROWS - 1
    counts = np.zeros((shares, features, 4), np.int64)
    finite = np.zeros(features, np.int64)
    many = np.zeros(features, np.int64)
    tile = np.empty((features, TILE_ROWS + 16), np.float32)  # not a power of two: columns share no cache set
    wanted = np.empty(TILE_ROWS, np.uint8)
    for begin in range(0, count, TILE_ROWS):
        size = min(TILE_ROWS, count - begin)
        for block in range(0, features, 16):
            for i in range(size):
                row = rows[begin + i] if len(rows) else begin + i
                for f in range(block, min(block + 16, features)):
                    tile[f, i] = x_NF[row, first + f]
        for f in range(features):
            finite[f] += _finite(tile[f], size)
            wanted[:] = 0
            for q in range(shares):
                _compare(tile[f], size, low_QF[q, f], high_QF[q, f], counts[q, f], wanted)
            if many[f] <= room:  # else it has overflowed, and will be selected by NumPy
                many[f] = _keep(tile[f], size, wanted, kept[f], many[f])
    return counts, finite, many


@njit(cache=True, nogil=True)
def _finite(column, size):
    found = np.int32(0)
    for i in range(size):
        found += np.int32(abs(column[i]) <= LARGEST)
    return found


@njit(cache=True, nogil=True)
def _compare(column, size, low, high, counts, wanted):
    """Add to the four counts of a bracket, and mark in `wanted` what lies strictly inside."""
    below, at_low, inside, at_high = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(size):
        value = column[i]
        below += np.int32((value < low) & (value >= -LARGEST))
        at_low += np.int32(value == low)
        within = (low < value) & (value < high)
        inside += np.int32(within)
        at_high += np.int32(value == high)
        wanted[i] |= np.uint8(within)
    counts[0] += below
    counts[1] += at_low
    counts[2] += inside
    counts[3] += at_high if low != high else 0


@njit(cache=True, nogil=True)
def _keep(column, size, wanted, kept, place):
    """Write the wanted values into `kept` from `place` on; where `place` stands then.

    Without a branch: every value is written, and the place moves on only past one that is to stay.
    """
    for i in range(size):
        kept[place] = column[i]
        place += wanted[i]
    return place


def _column(x_NF: np.ndarray, f: int, rows: np.ndarray | None) -> np.ndarray:
    return x_NF[:, f] if rows is None else x_NF[rows, f]


def _by_numpy(column: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    values = column[np.isfinite(column)].astype(np.float64)
    return np.quantile(values, shares) if len(values) else np.full(len(shares), np.nan)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
