"""Exact quantiles of columns that come in blocks of rows, from a file of them for one: `quantiles`' way, by columns.

Each thread takes a few columns through all blocks, so that what it reads, counts and keeps of them stays in its cache.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from ml_factory.cpu_count import cores
from ml_factory.data.plain_parquet import ColumnBlocks, sample_rows
from ml_factory.datasets.quantiles import LARGEST, between, brackets, buffer_size, evenly, of_counts

WHOLE_ROWS = 16_384  # columns of fewer are sorted as they are
AT_ONCE = 8  # columns; as many rows as are written to a file at once make a megabyte
TILE_VALUES = 2048
TOGETHER = 3  # brackets that values are compared with while they are in a register


def quantiles_of_blocks(blocks: Sequence[np.ndarray], shares: tuple[float, ...]) -> np.ndarray:
    """As `quantiles`, of the rows of all blocks: float32 (F, n) each, every column contiguous.

    blocks : in memory, or those of a file, which is read a few columns at a time; most of it once where it has a sample
    of them, else twice. The columns are shared out over the processor's cores; no number depends on how many there are.
    """
    features = blocks.features if isinstance(blocks, ColumnBlocks) else len(blocks[0])
    firsts, found = range(0, features, AT_ONCE), np.empty((features, len(shares)))
    todo = iter(firsts)  # each thread takes what is next

    def work(_) -> None:
        for first in todo:
            part = slice(first, min(first + AT_ONCE, features))
            found[part] = _of_part(blocks, part, shares)

    with ThreadPoolExecutor(threads := min(cores(), len(firsts))) as pool:
        list(pool.map(work, range(threads)))
    return found


def _of_part(blocks: Sequence[np.ndarray], part: slice, shares: tuple[float, ...]) -> np.ndarray:
    """Quantiles (F, Q) of these columns of the blocks."""
    sizes = blocks.sizes if isinstance(blocks, ColumnBlocks) else [block.shape[1] for block in blocks]
    count, features = sum(sizes), part.stop - part.start
    if count < WHOLE_ROWS:
        return np.array([_by_order(column, shares) for column in _whole(blocks, part, count)])
    sample = _sample_of(blocks, part, sizes)
    low_QF, high_QF, tied_F = brackets(sample, shares)
    low_QF, high_QF = (_filled_up(edges) for edges in (low_QF, high_QF))
    counts, many = np.zeros((features, 1 + 2 * len(low_QF), 2), np.int64), np.zeros(features, np.int64)
    room = buffer_size(count, sample.shape[1], shares)
    held = np.empty((features, room + TILE_VALUES), np.float32)
    for block in _columns_of(blocks, part):
        flat, step = _flat(block)
        _count_columns(flat, step, block.shape[1], low_QF, high_QF, tied_F, counts, many, held)

    def kept(f: int) -> np.ndarray | None:
        return held[f, : many[f]] if many[f] <= room else None

    def column(f: int) -> np.ndarray:
        return _whole(blocks, slice(part.start + f, part.start + f + 1), count)[0]

    return of_counts(counts, kept, low_QF, high_QF, shares, column)


def _filled_up(edges_QF: np.ndarray) -> np.ndarray:
    """With edges of brackets that hold nothing, so that Q is a multiple of TOGETHER."""
    return np.pad(edges_QF, ((0, -len(edges_QF) % TOGETHER), (0, 0)), constant_values=np.nan)


def _columns_of(blocks: Sequence[np.ndarray], part: slice) -> Iterator[np.ndarray]:
    """These columns of each block in turn; what comes from a file is valid until the next is asked for."""
    return blocks.columns(part) if isinstance(blocks, ColumnBlocks) else (block[part] for block in blocks)


def _whole(blocks: Sequence[np.ndarray], part: slice, count: int) -> np.ndarray:
    """float32 (F, count): these columns of all blocks."""
    whole, place = np.empty((part.stop - part.start, count), np.float32), 0
    for block in _columns_of(blocks, part):
        whole[:, place : place + block.shape[1]] = block
        place += block.shape[1]
    return whole


def _sample_of(blocks: Sequence[np.ndarray], part: slice, sizes: list[int]) -> np.ndarray:
    """float32 (F, S) of these columns, evenly spread: the one that was kept with the file, else drawn."""
    wanted = sample_rows(sum(sizes))
    given = blocks.sample if isinstance(blocks, ColumnBlocks) else None
    if given and len(given[0]) >= wanted // 2:
        return given[1][part].copy()
    chosen, begins = evenly(sum(sizes), wanted), np.cumsum([0, *sizes])
    cuts, sample = np.searchsorted(chosen, begins), np.empty((part.stop - part.start, wanted), np.float32)
    for block, begin, first, stop in zip(_columns_of(blocks, part), begins, cuts, cuts[1:], strict=False):
        sample[:, first:stop] = block[:, chosen[first:stop] - begin]
    return sample


def _by_order(column: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    """As `_by_numpy`, by sorting: float32 is sorted on vector registers, which is faster than selecting one by one."""
    ordered = np.sort(column[np.isfinite(column)])
    if not len(ordered):
        return np.full(len(shares), np.nan)
    places = (len(ordered) - 1) * np.array(shares)
    ranks = places.astype(np.int64)
    low, high = ordered[ranks], ordered[np.minimum(ranks + 1, len(ordered) - 1)]
    return between(low.astype(np.float64), high.astype(np.float64), places - ranks)


@njit(cache=True, nogil=True)
def _count_columns(flat, step, rows, low_QF, high_QF, tied_F, counts, many, held):
    """What `quantiles._count` gives, added up over blocks; column f is flat[f * step : f * step + rows].

    Q is a multiple of TOGETHER. Where no value is common, those at a bracket's low edge count as below it, and those at
    its high edge not at all.
    """
    room = held.shape[1] - TILE_VALUES
    wanted, eights = np.zeros(TILE_VALUES, np.uint8), np.empty(TILE_VALUES // 8 + 1, np.int64)
    for f in range(len(counts)):
        for begin in range(0, rows, TILE_VALUES):
            size = min(TILE_VALUES, rows - begin)
            tile, of_column = flat[f * step + begin : f * step + begin + size], counts[f]
            wanted[:] = 0
            finite = np.int64(0)
            for q in range(0, len(low_QF), TOGETHER):
                low, high = low_QF[q : q + TOGETHER, f], high_QF[q : q + TOGETHER, f]
                if tied_F[f]:
                    finite = _compare_tile(tile, low, high, of_column[1 + 2 * q :], wanted)
                else:
                    finite = _place_tile(tile, low, high, of_column[1 + 2 * q :], wanted)
            of_column[0, 0] += finite
            if finite < size:
                for i in range(size):
                    of_column[0, 1] += np.int64(tile[i] < -LARGEST)
            if many[f] <= room:
                many[f] = _keep(tile, wanted, eights, held[f], many[f])


@njit(cache=True, nogil=True)
def _place_tile(tile, low, high, counts, wanted):
    """How many values of one column are finite. Counts those at or below each bracket's low edge, and marks in `wanted`
    what lies strictly inside one."""
    low_a, low_b, low_c, high_a, high_b, high_c = low[0], low[1], low[2], high[0], high[1], high[2]
    below_a, below_b, below_c, finite = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(len(tile)):
        value = tile[i]
        under_a, under_b, under_c = value <= low_a, value <= low_b, value <= low_c
        below_a, below_b, below_c = (
            below_a + np.int32(under_a),
            below_b + np.int32(under_b),
            below_c + np.int32(under_c),
        )
        finite += np.int32(abs(value) <= LARGEST)
        within_a, within_b = (not under_a) & (value < high_a), (not under_b) & (value < high_b)
        wanted[i] |= np.uint8(within_a | within_b | ((not under_c) & (value < high_c)))
    counts[0, 0], counts[2, 0], counts[4, 0] = counts[0, 0] + below_a, counts[2, 0] + below_b, counts[4, 0] + below_c
    return np.int64(finite)


@njit(cache=True, nogil=True)
def _compare_tile(tile, low, high, counts, wanted):
    """As `_place_tile`, with those at the low and at the high edge counted apart."""
    finite = np.int32(0)
    for q in range(TOGETHER):
        below, at_low, at_high = np.int32(0), np.int32(0), np.int32(0)
        for i in range(len(tile)):
            value = tile[i]
            below += np.int32(value < low[q])
            at_low += np.int32(value == low[q])
            at_high += np.int32(value == high[q])
            wanted[i] |= np.uint8((low[q] < value) & (value < high[q]))
        counts[2 * q, 0] += below
        counts[2 * q, 1] += at_low
        counts[2 * q + 1, 0] += at_high if low[q] < high[q] else np.int32(0)
    for i in range(len(tile)):
        finite += np.int32(abs(tile[i]) <= LARGEST)
    return np.int64(finite)


@njit(cache=True, nogil=True)
def _keep(tile, wanted, eights, held, place):
    """Put what is wanted into `held` from `place` on; returns the place after it.

    Without a branch, which would be guessed wrongly half of the time: what is not wanted is written over, first of the
    eights that hold something, then of the values in them.  eights : room for their numbers.
    """
    words, at = wanted.view(np.uint64), np.uint64(place)  # numba asks of no unsigned position if it is negative
    count = np.uint64(0)
    for word in range(len(tile) // 8):
        eights[count] = word
        count += np.uint64(words[word] != 0)
    for k in range(count):
        first = np.uint64(8 * eights[k])
        for i in range(8):
            held[at] = tile[first + np.uint64(i)]
            at += np.uint64(wanted[first + np.uint64(i)])
    for i in range(len(tile) // 8 * 8, len(tile)):
        held[at] = tile[i]
        at += np.uint64(wanted[i])
    return np.int64(at)


def _flat(block_FN: np.ndarray) -> tuple[np.ndarray, int]:
    """(the memory from the first value to the last, values from one column to the next), read-only."""
    step = block_FN.strides[0] // block_FN.itemsize
    size = (len(block_FN) - 1) * step + block_FN.shape[1]
    return np.lib.stride_tricks.as_strided(block_FN, (size,), (block_FN.itemsize,), writeable=False), step
