"""Exact quantiles of every column of a matrix, in one pass over it, whether rows or columns lie together in memory.

A sample of rows brackets each wanted rank between two of its values (Floyd and Rivest, 1975). One pass over the rows
then counts what lies below each bracket and keeps the few values inside, so the rank is found exactly among them. A
column whose rank fell outside its bracket, or whose bracket held too much, is selected by NumPy: always exact, seldom
slow. No copy of the matrix is made.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from ml_factory.data.plain_parquet import ColumnBlocks

SAMPLE_ROWS = 65_536
FEW_ROWS = 16_384  # fewer than this are sorted as they are
TILE_ROWS = 256
TILE_VALUES = 2048
LANES = 48
"""Columns compared side by side: three vector registers of float32, so that their counts do not wait for each other."""
BRACKET = 4.5  # standard errors of a sample quantile on each side: one bracket in 100,000 misses its rank
FEW_TIES = 16  # of the sample: no more of it may share an edge of a bracket where equal values are not counted apart
LARGEST = np.float32(np.finfo(np.float32).max)


def quantiles(x_NF: np.ndarray, shares: tuple[float, ...], rows: np.ndarray | None = None) -> np.ndarray:
    """float64 (F, Q): np.quantile(column, shares), linear, to the bit, of the finite values of each column.

    x_NF : float32.  rows : int64 positions of the rows that count; None: all. A column without a finite value gives
    NaN. The columns are shared out over the processor's cores; no number depends on how many there are.
    """
    x_NF = np.asarray(x_NF, np.float32)
    count = len(x_NF) if rows is None else len(rows)
    features = x_NF.shape[1]
    if count < min(2 * SAMPLE_ROWS, FEW_ROWS) or not features or x_NF.strides[1] != x_NF.itemsize:
        return _of_few(x_NF if rows is None else x_NF[rows], shares)
    rows = np.arange(0) if rows is None else np.ascontiguousarray(rows, np.int64)
    threads = min(_cores(), features)
    edges = np.linspace(0, features, threads + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda first, stop: _of_columns(x_NF[:, first:stop], rows, shares), edges[:-1], edges[1:])
        return np.concatenate(list(parts))


def quantiles_of_blocks(blocks: Sequence[np.ndarray], shares: tuple[float, ...]) -> np.ndarray:
    """As `quantiles`, of the rows of all blocks: float32 (F, n) each, every column contiguous.

    blocks : asked for one at a time, several times over, so they may be mapped from a file. They are shared out over
    the processor's cores; no number depends on how many there are.
    """
    sizes = blocks.sizes if isinstance(blocks, ColumnBlocks) else [block.shape[1] for block in blocks]
    features, ends = len(blocks[0]), np.cumsum(sizes)
    if ends[-1] < 2 * SAMPLE_ROWS:
        return np.array([_by_numpy(_of_all(blocks, f), shares) for f in range(features)]).reshape(-1, len(shares))
    threads = min(_cores(), len(blocks))
    given = blocks.sample if isinstance(blocks, ColumnBlocks) else None
    sample = given[1].copy() if given and len(given[0]) >= SAMPLE_ROWS // 2 else _drawn(blocks, ends, features)
    halves = np.linspace(0, features, threads + 1).astype(int)

    def bracket(k: int) -> tuple[np.ndarray, ...]:
        return _brackets(sample[halves[k] : halves[k + 1]], shares)

    def count(k: int) -> tuple[np.ndarray, ...]:
        mine = range(k, len(blocks), threads)
        room = _room(sum(sizes[b] for b in mine), sample.shape[1], shares)
        return _passed((blocks[b] for b in mine), room, low_QF, high_QF, tied_F)

    with ThreadPoolExecutor(threads) as pool:
        low_QF, high_QF, tied_F = (
            np.concatenate(part, axis=-1) for part in zip(*pool.map(bracket, range(threads)), strict=True)
        )
        parts = list(pool.map(count, range(threads)))
    counts = np.sum([part[0] for part in parts], axis=0)

    def kept(f: int) -> np.ndarray | None:
        whole = all(many[f] <= held.shape[1] - TILE_VALUES for _, many, held in parts)
        return np.concatenate([held[f, : many[f]] for _, many, held in parts]) if whole else None

    return _found(counts, kept, low_QF, high_QF, shares, lambda f: _of_all(blocks, f))


def between(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Linear interpolation with the rounding of np.quantile: from the nearer end."""
    step = high - low
    return np.where(share < 0.5, low + step * share, high - step * (1 - share))


def _of_few(x_NF: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    """Quantiles (F, Q) by NumPy; of all columns at once where they are few rows and every value is finite."""
    if x_NF.size and len(x_NF) < FEW_ROWS and np.isfinite(x_NF).all():
        return np.ascontiguousarray(np.quantile(np.ascontiguousarray(x_NF.T, np.float64), shares, axis=1).T)
    return np.array([_by_numpy(column, shares) for column in x_NF.T]).reshape(-1, len(shares))


def _of_columns(x_NF, rows, shares) -> np.ndarray:
    """Quantiles (F, Q) of these columns.  rows : positions, or none for all."""
    count = len(rows) or len(x_NF)
    chosen = _sampled(count, min(SAMPLE_ROWS, count // 4))
    low_QF, high_QF, _ = _brackets(np.ascontiguousarray(x_NF[rows[chosen] if len(rows) else chosen].T), shares)
    held = np.empty((-(-x_NF.shape[1] // LANES) * LANES, _room(count, len(chosen), shares)), np.float32)
    counts, many = _count(x_NF, rows, _by_lanes(low_QF, high_QF), held)

    def kept(f: int) -> np.ndarray | None:
        return held[f, : many[f]] if many[f] < held.shape[1] else None

    return _found(counts, kept, low_QF, high_QF, shares, lambda f: _column(x_NF, f, rows if len(rows) else None))


def _passed(blocks, room: int, low_QF, high_QF, tied_F) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `_count` counts; how many values of each column were kept, more than `room` where some were not; those."""
    shares, features = low_QF.shape
    counts, many = np.zeros((features, 1 + 2 * shares, 2), np.int64), np.zeros(features, np.int64)
    held = np.empty((features, room + TILE_VALUES), np.float32)
    for block in blocks:
        flat, step = _flat(block)
        _count_columns(flat, step, block.shape[1], low_QF, high_QF, tied_F, counts, many, held)
    return counts, many, held


def _sampled(count: int, wanted: int) -> np.ndarray:
    return np.linspace(0, count - 1, wanted).astype(np.int64)


def _drawn(blocks: Sequence[np.ndarray], ends: np.ndarray, features: int) -> np.ndarray:
    """float32 (F, SAMPLE_ROWS) of the blocks' rows, which end at `ends`."""
    chosen, begins = _sampled(ends[-1], SAMPLE_ROWS), np.append(0, ends)
    cuts, sample = np.searchsorted(chosen, begins), np.empty((features, len(chosen)), np.float32)
    for b, block in enumerate(blocks):
        sample[:, cuts[b] : cuts[b + 1]] = block[:, chosen[cuts[b] : cuts[b + 1]] - begins[b]]
    return sample


def _room(count: int, sampled: int, shares: tuple[float, ...]) -> int:
    """What the brackets of a column hold on average, and a quarter more."""
    return int(1.25 * 2 * BRACKET * count * sum((p * (1 - p) / sampled) ** 0.5 for p in shares)) + 4096


def _found(counts, kept, low_QF, high_QF, shares, column) -> np.ndarray:
    """Quantiles (F, Q) from what a pass counted.

    kept : column -> its values inside any bracket, None where there was no room.  column : one that must be selected,
    since a bracket missed or overflowed.
    """
    features = low_QF.shape[1]
    finite = counts[:, 0, 0]
    counts[:, 1::2, 0] -= counts[:, :1, 1]  # -inf is below every bracket, and counts for nothing
    found = np.empty((features, len(shares)))
    for f in range(features):
        held = kept(f)
        ordered = None if held is None else np.sort(held)
        for q, share in enumerate(shares):
            edges = low_QF[q, f], high_QF[q, f]
            around = counts[f, 1 + 2 * q : 3 + 2 * q].ravel()
            value = None if ordered is None else _ranked(finite[f], share, around, *edges, ordered)
            if value is None:
                found[f] = _by_numpy(column(f), shares)
                break
            found[f, q] = value
    return found


def _brackets(sample_FS: np.ndarray, shares: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 (Q, F) twice: sample values surely below and above each quantile; bool[F]: whether any of them is common.

    Sorts the sample in place.
    """
    sample_FS[~np.isfinite(sample_FS)] = np.nan
    sample_FS.sort(axis=1)  # NaN goes to the end
    finite = np.count_nonzero(~np.isnan(sample_FS), axis=1)
    low_QF, high_QF = np.full((2, len(shares), len(sample_FS)), [[[-LARGEST]], [[LARGEST]]], np.float32)
    tied_F = np.zeros(len(sample_FS), bool)
    for q, share in enumerate(shares):
        place = (finite - 1) * share
        reach = BRACKET * np.sqrt(np.maximum(finite * share * (1 - share), 4.0))
        for edge_F, wanted in ((low_QF[q], np.floor(place - reach)), (high_QF[q], np.ceil(place + reach))):
            inside = (wanted >= 0) & (wanted < finite)  # beyond the sample anything may come
            there = np.flatnonzero(inside)
            at = wanted[there].astype(np.int64)
            edge_F[there] = sample_FS[there, at]
            near = np.minimum(at + FEW_TIES, finite[there] - 1), np.maximum(at - FEW_TIES, 0)
            tied_F[there] |= (sample_FS[there, near[0]] == edge_F[there]) | (sample_FS[there, near[1]] == edge_F[there])
            tied_F |= ~inside
    return low_QF, high_QF, tied_F


def _by_lanes(low_QF: np.ndarray, high_QF: np.ndarray) -> np.ndarray:
    """float32 (F / LANES, 2 Q, LANES): the edges of each bracket, low and high in turn, of LANES columns."""
    shares, features = low_QF.shape
    blocks = -(-features // LANES)
    edges = np.zeros((2 * shares, blocks * LANES), np.float32)
    edges[0::2, :features], edges[1::2, :features] = low_QF, high_QF
    return np.ascontiguousarray(edges.reshape(2 * shares, blocks, LANES).swapaxes(0, 1))


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
def _count(x_NF, rows, edges, kept):
    """int64 (F, 1 + 2 Q, 2), and how many values of each column were kept: those strictly inside any bracket.

    Pairs of counts: finite values and -inf; then of each bracket the values below it and at its low edge, and those
    strictly inside and at its high edge (0 where that is the low edge too). A column with more than there is room for
    in `kept` stops one short of it.
    """
    features, room = x_NF.shape[1], kept.shape[1]
    blocks, sides, _ = edges.shape
    count = len(rows) if len(rows) else len(x_NF)
    pairs, finite = np.zeros((blocks, sides, LANES), np.int32), np.zeros(blocks * LANES, np.int32)
    counts = np.zeros((blocks * LANES, 1 + sides, 2), np.int64)
    many = np.zeros(blocks * LANES, np.int64)
    tile = np.zeros((TILE_ROWS, blocks * LANES), np.float32)
    wanted = np.zeros((TILE_ROWS, blocks * LANES), np.uint8)
    words = wanted.view(np.uint64)
    for begin in range(0, count, TILE_ROWS):
        size = min(TILE_ROWS, count - begin)
        for i in range(size):
            row = rows[begin + i] if len(rows) else begin + i
            for f in range(features):
                tile[i, f] = x_NF[row, f]
        tile[size:] = np.nan  # counted nowhere
        wanted[:] = 0
        _finite(tile, finite)
        for block in range(blocks):
            first = block * LANES
            for q in range(0, sides, 2):
                _compare(tile, first, edges[block, q : q + 2], pairs[block, q : q + 2], wanted)
            _add(finite[first : first + LANES], counts[first : first + LANES, 0])
            for side in range(sides):
                _add(pairs[block, side], counts[first : first + LANES, 1 + side])
        for i in range(size):
            for word in range(words.shape[1]):
                if words[i, word]:
                    for f in range(8 * word, 8 * word + 8):
                        place = many[f]
                        kept[f, place] = tile[i, f]
                        many[f] = min(place + wanted[i, f], room - 1)
    for f in range(features):
        for q in range(0, sides, 2):
            if edges[f // LANES, q, f % LANES] == edges[f // LANES, q + 1, f % LANES]:
                counts[f, 2 + q, 1] = 0
    return counts, many


@njit(cache=True, nogil=True)
def _finite(tile, pairs):
    """Count what is finite, and -inf, of every column."""
    for i in range(TILE_ROWS):
        row = tile[i]
        for f in range(len(pairs)):
            pairs[f] += np.int32(abs(row[f]) <= LARGEST) + (np.int32(row[f] < -LARGEST) << 16)


@njit(cache=True, nogil=True)
def _compare(tile, first, edges, pairs, wanted):
    """Add to the counts of a bracket of LANES columns, and mark in `wanted` what lies strictly inside.

    Two counts share an int32: TILE_ROWS of them fit in its lower half.
    """
    for i in range(TILE_ROWS):
        row, mark = tile[i, first : first + LANES], wanted[i, first : first + LANES]
        for f in range(LANES):
            value, low, high = row[f], edges[0, f], edges[1, f]
            within = (low < value) & (value < high)
            pairs[0, f] += np.int32(value < low) + (np.int32(value == low) << 16)
            pairs[1, f] += np.int32(within) + (np.int32(value == high) << 16)
            mark[f] |= np.uint8(within)


@njit(cache=True, nogil=True)
def _add(pairs, counts):
    """The two halves of each pair to the long counts; the pairs begin anew."""
    for f in range(len(pairs)):
        counts[f, 0] += pairs[f] & 0xFFFF
        counts[f, 1] += pairs[f] >> 16
        pairs[f] = 0


@njit(cache=True, nogil=True)
def _count_columns(flat, step, rows, low_QF, high_QF, tied_F, counts, many, held):
    """What `_count` gives, added up over blocks; column f is flat[f * step : f * step + rows].

    Where no value is common, those at a bracket's edges count as below and above it, and their number as 0.
    """
    room = held.shape[1] - TILE_VALUES
    wanted = np.zeros(TILE_VALUES, np.uint8)
    for f in range(len(counts)):
        for begin in range(0, rows, TILE_VALUES):
            size = min(TILE_VALUES, rows - begin)
            tile = flat[f * step + begin : f * step + begin + size]
            wanted[:] = 0
            finite, lowest = np.int32(0), np.int32(0)
            for i in range(size):
                finite += np.int32(abs(tile[i]) <= LARGEST)
                lowest += np.int32(tile[i] < -LARGEST)
            counts[f, 0, 0] += finite
            counts[f, 0, 1] += lowest
            for q in range(len(low_QF)):
                if tied_F[f]:
                    _compare_tile(tile, low_QF[q, f], high_QF[q, f], counts[f, 1 + 2 * q : 3 + 2 * q], wanted)
                else:
                    _place_tile(tile, low_QF[q, f], high_QF[q, f], counts[f, 1 + 2 * q : 3 + 2 * q], wanted)
            if many[f] <= room:
                place, held_f = np.uint64(many[f]), held[f]  # numba asks of no unsigned position if it is negative
                for i in range(size):  # no branch: what is not wanted is written over
                    held_f[place] = tile[i]
                    place += np.uint64(wanted[i])
                many[f] = np.int64(place)


@njit(cache=True, nogil=True)
def _place_tile(tile, low, high, counts, wanted):
    """`_compare_tile` without counting equal values apart: half the comparisons."""
    below, inside = np.int32(0), np.int32(0)
    for i in range(len(tile)):
        within = (low < tile[i]) & (tile[i] < high)
        below += np.int32(tile[i] <= low)
        inside += np.int32(within)
        wanted[i] |= np.uint8(within)
    counts[0, 0] += below
    counts[1, 0] += inside


@njit(cache=True, nogil=True)
def _compare_tile(tile, low, high, counts, wanted):
    """Add a bracket's counts of these values of one column, and mark in `wanted` what lies strictly inside."""
    below, at_low, inside, at_high = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(tile)):
        value = tile[i]
        within = (low < value) & (value < high)
        below += np.int32(value < low)
        at_low += np.int32(value == low)
        inside += np.int32(within)
        at_high += np.int32(value == high)
        wanted[i] |= np.uint8(within)
    counts[0, 0] += below
    counts[0, 1] += at_low
    counts[1, 0] += inside
    counts[1, 1] += at_high if low < high else np.int32(0)


def _flat(block_FN: np.ndarray) -> tuple[np.ndarray, int]:
    """(the memory from the first value to the last, values from one column to the next), read-only."""
    step = block_FN.strides[0] // block_FN.itemsize
    size = (len(block_FN) - 1) * step + block_FN.shape[1]
    return np.lib.stride_tricks.as_strided(block_FN, (size,), (block_FN.itemsize,), writeable=False), step


def _of_all(blocks: Sequence[np.ndarray], f: int) -> np.ndarray:
    return np.concatenate([block[f] for block in blocks])


def _column(x_NF: np.ndarray, f: int, rows: np.ndarray | None) -> np.ndarray:
    return x_NF[:, f] if rows is None else x_NF[rows, f]


def _by_numpy(column: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    values = column[np.isfinite(column)].astype(np.float64)
    return np.quantile(values, shares) if len(values) else np.full(len(shares), np.nan)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
