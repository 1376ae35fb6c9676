"""Exact quantiles of every column of a matrix in one pass, for row-major and column-major memory.

A sample of rows brackets each wanted rank between two of its values (Floyd and Rivest, 1975). One pass over the rows
then counts the values below each bracket and keeps the few inside, so the rank is found exactly among them. A column
whose rank lies outside its bracket, or whose bracket overflows, is selected by NumPy: always exact, rarely slow. The
matrix is not copied.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from ml_factory.hardware import cores

SAMPLE_ROWS = 65_536
FEW_ROWS = 16_384  # fewer than this are sorted as they are
TILE_ROWS = 256
LANES = 48
"""Columns compared in parallel: three vector registers of float32, so that their counts are independent."""
BRACKET = 4.5  # standard errors of a sample quantile on each side: one bracket in 100,000 misses its rank
LARGEST = np.float32(np.finfo(np.float32).max)


def column_quantiles(x_NF: np.ndarray, shares: tuple[float, ...], rows: np.ndarray | None = None) -> np.ndarray:
    """Compute np.quantile(column, shares), linear, to the bit, of the finite values of each column; float64 (F, Q).

    A column without a finite value gives NaN. Columns are divided among the processor's cores; no number depends on
    their count.

    x_NF : float32
    shares : of the quantiles
    rows : int64 positions of the rows to use; None: all
    """
    x_NF = np.asarray(x_NF, np.float32)
    count = len(x_NF) if rows is None else len(rows)
    features = x_NF.shape[1]
    if count < min(2 * SAMPLE_ROWS, FEW_ROWS) or not features or x_NF.strides[1] != x_NF.itemsize:
        return _quantiles_by_numpy(x_NF if rows is None else x_NF[rows], shares)
    rows = np.arange(0) if rows is None else np.ascontiguousarray(rows, np.int64)
    return np.concatenate(map_column_groups(x_NF, lambda columns: _quantiles_of_columns(columns, rows, shares)))


def map_column_groups(x_NF: np.ndarray, work: Callable[[np.ndarray], object]) -> list:
    """Apply `work` to groups of adjacent columns in parallel; return the results in order."""
    threads = min(cores(), x_NF.shape[1])
    edges = np.linspace(0, x_NF.shape[1], threads + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda first, stop: work(x_NF[:, first:stop]), edges[:-1], edges[1:]))


def _interpolate_quantile(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Interpolate linearly with the rounding of np.quantile: from the nearer end. A zero has no sign."""
    step = high - low
    return np.where(share < 0.5, low + step * share, high - step * (1 - share)) + 0.0


def _quantiles_by_numpy(x_NF: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    """Compute quantiles (F, Q) by NumPy; of all columns at once for few rows of finite values."""
    if x_NF.size and len(x_NF) < FEW_ROWS and np.isfinite(x_NF).all():
        return np.ascontiguousarray(np.quantile(np.ascontiguousarray(x_NF.T, np.float64), shares, axis=1).T) + 0.0
    return np.array([_by_numpy(column, shares) for column in x_NF.T]).reshape(-1, len(shares))


def _quantiles_of_columns(x_NF, rows, shares) -> np.ndarray:
    """Compute quantiles (F, Q) of these columns.

    rows : positions, or none for all
    """
    count = len(rows) or len(x_NF)
    chosen = bracket_sample_positions(count, min(SAMPLE_ROWS, count // 4))
    low_QF, high_QF = quantile_brackets(np.ascontiguousarray(x_NF[rows[chosen] if len(rows) else chosen].T), shares)
    counts, kept = count_around_quantile_brackets(
        x_NF, rows, low_QF, high_QF, quantile_buffer_size(count, len(chosen), shares)
    )
    return quantiles_from_counts(
        counts, kept, low_QF, high_QF, shares, lambda f: _column(x_NF, f, rows if len(rows) else None)
    )


def count_around_quantile_brackets(
    x_NF: np.ndarray, rows: np.ndarray, low_QF: np.ndarray, high_QF: np.ndarray, capacity: int
) -> tuple[np.ndarray, Callable[[int], np.ndarray | None]]:
    """Count values around these brackets in one pass over the rows, and keep those inside.

    Returns
    -------
    counts : int64 (F, 1 + 2 Q, 2), pairs: finite values and -inf; then for each bracket the values below it (-inf
        included) and at its low edge, and those at its high edge (0 where that is the low edge too) with an unused
        second entry
    kept : column -> its values strictly inside any bracket, None where they exceed `capacity`
    """
    buffer = np.empty((-(-x_NF.shape[1] // LANES) * LANES, capacity), np.float32)
    counts, many = _count(x_NF, rows, _by_lanes(low_QF, high_QF), buffer)

    def kept(f: int) -> np.ndarray | None:
        return buffer[f, : many[f]] if many[f] < capacity - 1 else None

    return counts[: x_NF.shape[1]], kept


def bracket_sample_positions(count: int, wanted: int) -> np.ndarray:
    """Return int64 (wanted,): positions spread over 0 .. count - 1, both ends included."""
    return np.linspace(0, count - 1, wanted).astype(np.int64)


def quantile_buffer_size(count: int, sampled: int, shares: tuple[float, ...]) -> int:
    """Return the average number of values in the brackets of a column, and a quarter more."""
    return int(1.25 * 2 * BRACKET * count * sum((p * (1 - p) / sampled) ** 0.5 for p in shares)) + 4096


def quantiles_from_counts(counts, kept, low_QF, high_QF, shares, column) -> np.ndarray:
    """Compute quantiles (F, Q) from the counts of a pass.

    kept : column -> its values inside any bracket, None where they exceeded the capacity
    column : returns one that must be selected, since a bracket missed or overflowed
    """
    features, finite = low_QF.shape[1], counts[:, 0, 0].tolist()
    counts[:, 1::2, 0] -= counts[:, :1, 1]  # -inf is below every bracket, and counts for nothing
    ends_3FQ, selected = np.zeros((3, features, len(shares))), {}
    for f in range(features):
        buffer = kept(f)
        ordered = None if buffer is None else np.sort(buffer)
        for q, share in enumerate(shares):
            around = counts[f, 1 + 2 * q : 3 + 2 * q].ravel().tolist()
            edges = low_QF[q, f], high_QF[q, f]
            ends = None if ordered is None else _ranked(finite[f], share, around[:3], *edges, ordered)
            if ends is None:
                selected[f] = _by_numpy(column(f), shares)
                break
            ends_3FQ[:, f, q] = ends
    found = _interpolate_quantile(*ends_3FQ)
    for f, values in selected.items():
        found[f] = values
    return found


def quantile_brackets(sample_FS: np.ndarray, shares: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return sample values below and above each quantile, float32 (Q, F) twice.

    Sorts the sample in place.
    """
    sample_FS[~np.isfinite(sample_FS)] = np.nan
    sample_FS.sort(axis=1)  # NaN goes to the end
    finite, columns, share = np.count_nonzero(~np.isnan(sample_FS), axis=1), np.arange(len(sample_FS)), np.array(shares)
    place_QF, spread = np.multiply.outer(share, finite - 1), np.multiply.outer(share * (1 - share), finite)
    reach_QF = BRACKET * np.sqrt(np.maximum(spread, 4.0))
    wanted_2QF = np.stack([np.floor(place_QF - reach_QF), np.ceil(place_QF + reach_QF)])
    inside = (wanted_2QF >= 0) & (wanted_2QF < finite)  # beyond the sample the bracket is unbounded
    at = np.where(inside, wanted_2QF, 0).astype(np.int64)
    edges = sample_FS[columns, at]
    low_QF, high_QF = np.where(inside, edges, np.float32([[[-LARGEST]], [[LARGEST]]]))
    return low_QF, high_QF


def _by_lanes(low_QF: np.ndarray, high_QF: np.ndarray) -> np.ndarray:
    """Return float32 (F / LANES, 2 Q, LANES): low and high edges of each bracket in turn, of LANES columns."""
    shares, features = low_QF.shape
    blocks = -(-features // LANES)
    edges = np.zeros((2 * shares, blocks * LANES), np.float32)
    edges[0::2, :features], edges[1::2, :features] = low_QF, high_QF
    return np.ascontiguousarray(edges.reshape(2 * shares, blocks, LANES).swapaxes(0, 1))


def _ranked(finite, share, counts, low, high, ordered) -> tuple[float, float, float] | None:
    """Return the two values around the quantile and the weight between them, where both lie in the bracket; else None.

    counts : number of values below the bracket, at its low edge, at its high edge
    ordered : values strictly inside this bracket or another, increasing
    """
    if not finite:
        return np.nan, np.nan, 0.0
    below, at_low, at_high = counts
    start = int(ordered.searchsorted(low, side="right"))
    inside = max(int(ordered.searchsorted(high, side="left")) - start, 0)
    place = (finite - 1) * share
    ranks = int(place), min(int(place) + 1, finite - 1)
    if not below <= ranks[0] <= ranks[1] < below + at_low + inside + at_high:
        return None
    ends = []
    for rank in ranks:
        rank -= below + at_low
        ends.append(low if rank < 0 else high if rank >= inside else ordered[start + rank])
    return *ends, place - ranks[0]


@njit(cache=True, nogil=True)
def _count(x_NF, rows, edges, kept):
    """Compute `count_around_quantile_brackets`, and the number of values kept of each column.

    A column with more than the capacity of `kept` stops one short of it.
    """
    features, capacity = x_NF.shape[1], kept.shape[1]
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
                        many[f] = min(place + wanted[i, f], capacity - 1)
    for f in range(features):
        for q in range(0, sides, 2):
            if edges[f // LANES, q, f % LANES] == edges[f // LANES, q + 1, f % LANES]:
                counts[f, 2 + q, 0] = 0
    return counts, many


@njit(cache=True, nogil=True)
def _finite(tile, pairs):
    """Count the finite values, and -inf, of every column."""
    for i in range(TILE_ROWS):
        row = tile[i]
        for f in range(len(pairs)):
            pairs[f] += np.int32(abs(row[f]) <= LARGEST) + (np.int32(row[f] < -LARGEST) << 16)


@njit(cache=True, nogil=True)
def _compare(tile, first, edges, pairs, wanted):
    """Add to the counts of a bracket of LANES columns, and mark in `wanted` the values strictly inside.

    Two counts share an int32: TILE_ROWS of them fit in its lower half.
    """
    for i in range(TILE_ROWS):
        row, mark = tile[i, first : first + LANES], wanted[i, first : first + LANES]
        for f in range(LANES):
            value, low, high = row[f], edges[0, f], edges[1, f]
            pairs[0, f] += np.int32(value < low) + (np.int32(value == low) << 16)
            pairs[1, f] += np.int32(value == high)
            mark[f] |= np.uint8((low < value) & (value < high))


@njit(cache=True, nogil=True)
def _add(pairs, counts):
    """Add the two halves of each pair to the long counts, and reset the pairs."""
    for f in range(len(pairs)):
        counts[f, 0] += pairs[f] & 0xFFFF
        counts[f, 1] += pairs[f] >> 16
        pairs[f] = 0


def _column(x_NF: np.ndarray, f: int, rows: np.ndarray | None) -> np.ndarray:
    return x_NF[:, f] if rows is None else x_NF[rows, f]


def _by_numpy(column: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    values = column[np.isfinite(column)].astype(np.float64)
    return np.quantile(values, shares) + 0.0 if len(values) else np.full(len(shares), np.nan)
