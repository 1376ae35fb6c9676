"""Rows that reach the inner nodes of trees with the node's threshold, the numbers next to it, or a missing value.

S chosen inner nodes, K columns. A float32 number is counted as a whole number in the order of the numbers (`_count`),
so that the next one above is one more, and what leads to a node is an interval of counts in each column.
"""

from dataclasses import dataclass

import numpy as np

from ml_factory.inference.onnx_trees import LESS, TreeNodes

MOST_NODES = 5_000  # of one booster
_LARGEST = int(np.float32(np.finfo(np.float32).max).view(np.int32))


@dataclass(frozen=True)
class ThresholdRows:
    """Rows at thresholds.

    x_MK : float32.
    nodes : inner nodes of the trees.
    tried : of these; all, or MOST_NODES drawn from more.
    reached : of those tried, nodes that at least one row comes to. No row can come to the others.
    """

    x_MK: np.ndarray
    nodes: int
    tried: int
    reached: int


def rows_at_thresholds(nodes: TreeNodes, x_NK: np.ndarray) -> ThresholdRows:
    """Return rows that walk from the root to an inner node, at most four for each node.

    Their columns are those of a real row, moved no further than the splits above the node ask for. The node's own
    column has its threshold, the next number below, the next above, or is missing: those of the four that the splits
    above let through (for a threshold that they do not, the number nearest to it).

    x_NK : real rows as the model reads them.
    """
    every = np.flatnonzero(nodes.left >= 0)
    chosen = every
    if len(every) > MOST_NODES:
        chosen = np.sort(np.random.default_rng(0).choice(every, MOST_NODES, replace=False))
    low, high, missing = _ways_to(nodes, chosen, x_NK.shape[1])
    real = x_NK[np.arange(len(chosen)) % len(x_NK)]
    given, absent = _count(np.nan_to_num(real)), np.isnan(real)
    absent = np.where(absent, missing, low > high)  # a missing value stays where it may
    count = np.clip(given, low, np.maximum(low, high))
    x = np.where(absent, np.float32(np.nan), _number(count))
    possible = (low <= high) | missing
    own = np.arange(len(chosen)), nodes.column[chosen]
    others = possible.sum(axis=1) - possible[own] == possible.shape[1] - 1  # all columns but the own one
    at = _count(nodes.threshold[chosen].astype(np.float32))
    bottom, top = low[own], high[own]
    nearest = np.clip(at, bottom, np.maximum(bottom, top))
    tries = [
        (_number(nearest), bottom <= top), (_number(at - 1), (bottom < at) & (at - 1 <= top)),
        (_number(at + 1), (bottom <= at + 1) & (at < top)), (np.full(len(at), np.nan, np.float32), missing[own]),
    ]  # fmt: skip
    parts, reached = [], np.zeros(len(chosen), bool)
    for value, allowed in tries:
        allowed = allowed & others
        rows = x[allowed]
        rows[np.arange(len(rows)), own[1][allowed]] = value[allowed]
        parts.append(rows)
        reached |= allowed
    return ThresholdRows(np.concatenate(parts), len(every), len(chosen), int(reached.sum()))


def _ways_to(nodes: TreeNodes, chosen: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what leads to the chosen nodes: lowest and highest count, int64 (S, K), and whether a missing value does,
    bool (S, K).
    """
    inner = np.flatnonzero(nodes.left >= 0)
    parent = np.full(len(nodes.left), -1, np.int64)
    parent[nodes.left[inner]], parent[nodes.right[inner]] = inner, inner
    highest_left = _count(nodes.threshold.astype(np.float32)) - (nodes.mode == LESS)
    low = np.full((len(chosen), columns), -_LARGEST, np.int64)
    high, missing = -low, np.ones(low.shape, bool)
    row, node = np.arange(len(chosen)), chosen
    while len(row):
        above = parent[node]
        row, node, above = row[above >= 0], node[above >= 0], above[above >= 0]
        at, left = (row, nodes.column[above]), nodes.left[above] == node
        high[at] = np.where(left, np.minimum(high[at], highest_left[above]), high[at])
        low[at] = np.where(left, low[at], np.maximum(low[at], highest_left[above] + 1))
        missing[at] &= nodes.missing_left[above] == left
        node = above
    return low, high, missing


def _count(x: np.ndarray) -> np.ndarray:
    """Return the place of finite float32 numbers in their order, int64; both zeros are at 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _number(count: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of these places."""
    size = np.abs(count).astype(np.int32).view(np.float32)
    return np.where(count < 0, -size, size)
