"""Row selection that preserves time order: contiguous blocks and complete windows."""

import numpy as np


def sample_contiguous_blocks(rows: np.ndarray, limit: int, blocks: int = 4) -> np.ndarray:
    """Return at most `limit` of `rows` (increasing positions), as `blocks` contiguous runs spread evenly over time.

    Used by QUICK: each run keeps its order and its neighbours, the first run starts at the first row and the last run
    ends at the last one. All rows are returned where `limit` allows it.
    """
    rows = np.asarray(rows)
    if len(rows) <= limit:
        return rows
    blocks = min(blocks, limit)
    sizes = np.full(blocks, limit // blocks)
    sizes[: limit % blocks] += 1
    gaps = np.diff(np.linspace(0, len(rows) - limit, blocks).round().astype(np.int64), prepend=0)
    starts = np.cumsum(gaps) + np.cumsum(sizes) - sizes
    return np.concatenate([rows[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def mask_rows_with_full_window(segment: np.ndarray, rows: np.ndarray, lookback: int) -> np.ndarray:
    """Return bool[len(rows)]: whether the `lookback` consecutive rows that end at each row lie in its segment.

    segment : int[N] of all feature rows
    rows : int64 positions into them
    lookback : rows of a window
    """
    segment, rows = np.asarray(segment), np.asarray(rows, np.int64)
    first = rows - (lookback - 1)
    return (first >= 0) & (segment[np.maximum(first, 0)] == segment[rows])
