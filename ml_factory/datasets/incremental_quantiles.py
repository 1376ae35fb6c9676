"""Exact quantiles of rows that only grow: what was counted around each rank is kept, and goes on with the new rows.

The pass of `quantiles` counts what lies below a bracket and keeps what lies inside. Both add up over rows, so the new
rows alone are passed over while the wanted ranks stay inside their brackets. A column that has left one is sorted once;
where many have, all rows are passed over again.
"""

from dataclasses import dataclass

import numpy as np

from ml_factory.datasets.quantiles import (
    FEW_ROWS,
    SAMPLE_ROWS,
    brackets,
    buffer_size,
    counted,
    evenly,
    of_counts,
    over_columns,
    quantiles,
)

SHARE_KEPT, LEAST_KEPT = 1 / 200, 256
"""A bracket reaches over this share of the rows to each side of its rank: that is how far a data set grows between two
passes over all of it, were all new values on one side."""
MOST_SORTED = 16  # columns sorted by themselves; with more of them a pass over all is cheaper
MOST_GROWN = 1.25  # times the rows that were counted; with more of them too


@dataclass(frozen=True)
class QuantileState:
    """What is known around Q quantiles of F columns.

    rows : int64, positions of the rows that were counted, rising.  low, high : float32 (Q, F), the brackets' edges.
    counts : int64 (F, 1 + 2 Q, 2), as of `quantiles.counted`.  values : for each column what lies strictly inside a
    bracket, float32, in any order.
    """

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray
    values: tuple[np.ndarray, ...]

    def to_state(self) -> dict:
        """As plain values and arrays; runs of rows by their first and their count."""
        ends = np.cumsum([len(one) for one in self.values])
        steps = np.flatnonzero(np.diff(self.rows, prepend=-2) != 1)  # runs: few, however many rows there are
        runs = np.stack([self.rows[steps], np.append(steps[1:], len(self.rows)) - steps])
        packed = {"runs": runs, "ends": ends, "values": np.concatenate(self.values)}
        return packed | {"low": self.low, "high": self.high, "counts": self.counts}

    @classmethod
    def from_state(cls, state: dict) -> "QuantileState":
        """What `to_state` gave."""
        rows = np.concatenate([np.arange(first, first + count) for first, count in state["runs"].T])
        values = tuple(np.split(state["values"], state["ends"][:-1]))
        return cls(rows, state["low"], state["high"], state["counts"], values)


def update_quantiles(
    x_NF: np.ndarray, rows: np.ndarray, shares: tuple[float, ...], before: QuantileState | None = None
) -> tuple[np.ndarray, QuantileState | None]:
    """`quantiles(x_NF, shares, rows)`, to the bit, and what to give as `before` once there are more rows.

    x_NF : float32, C-contiguous.  rows : int64, rising.  before : of earlier rows of the same matrix; where they are
    not among `rows` they count for nothing.  None comes back for few rows, which cost little.
    """
    if len(rows) < FEW_ROWS:
        return quantiles(x_NF, shares, rows), None
    more = None if before is None else _more(before, x_NF, rows)
    gone_on = None if more is None else _update(before, x_NF, rows, more, shares)
    return gone_on or _begun(x_NF, rows, shares)


def _more(before: QuantileState, x_NF: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Those of `rows` that were not counted; None where they are many, or where a row that was is not among them."""
    if len(rows) > MOST_GROWN * len(before.rows) or before.low.shape[1] != x_NF.shape[1]:
        return None
    asked = np.zeros(len(x_NF), bool)
    asked[rows] = True
    if before.rows[-1] >= len(x_NF) or not asked[before.rows].all():
        return None
    asked[before.rows] = False
    return np.flatnonzero(asked)


def _update(before: QuantileState, x_NF, rows, more, shares) -> tuple[np.ndarray, QuantileState] | None:
    """None where too many ranks have left their brackets."""
    low, high, left = before.low, before.high, []
    new, inside = _counted(x_NF[more], low, high)
    counts = before.counts + new
    values = [np.concatenate([one, x_NF[more[inside[:, f]], f]]) for f, one in enumerate(before.values)]

    def column(f: int) -> np.ndarray:
        left.append(f)
        return x_NF[rows, f]

    found = of_counts(counts.copy(), values.__getitem__, low, high, shares, column)
    if len(left) > MOST_SORTED:
        return None
    low, high = low.copy(), high.copy()
    for f in left:
        values[f] = _around(x_NF[rows, f], shares, low[:, f], high[:, f], counts[f])
    return found, QuantileState(rows, low, high, counts, tuple(values))


def _counted(x_NF: np.ndarray, low_QF: np.ndarray, high_QF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`quantiles.counted` of few rows, and bool (N, F): what lies strictly inside a bracket."""
    counts, inside = np.zeros((x_NF.shape[1], 1 + 2 * len(low_QF), 2), np.int64), np.zeros(x_NF.shape, bool)
    counts[:, 0] = np.stack([np.isfinite(x_NF).sum(axis=0), (x_NF == -np.inf).sum(axis=0)], axis=1)
    for q, (low_F, high_F) in enumerate(zip(low_QF, high_QF, strict=True)):
        counts[:, 1 + 2 * q] = np.stack([(x_NF < low_F).sum(axis=0), (x_NF == low_F).sum(axis=0)], axis=1)
        counts[:, 2 + 2 * q, 0] = np.where(low_F < high_F, (x_NF == high_F).sum(axis=0), 0)
        inside |= (low_F < x_NF) & (x_NF < high_F)
    return counts, inside


def _begun(x_NF, rows, shares) -> tuple[np.ndarray, QuantileState]:
    """A pass over all rows, and brackets that are drawn tighter around what it found."""

    def work(x_NF: np.ndarray) -> tuple[np.ndarray, QuantileState]:
        chosen = evenly(len(rows), min(SAMPLE_ROWS, len(rows) // 4))
        low, high, _ = brackets(np.ascontiguousarray(x_NF[rows[chosen]].T), shares)
        counts, kept = counted(x_NF, rows, low, high, buffer_size(len(rows), len(chosen), shares))
        selected = {}

        def column(f: int) -> np.ndarray:
            selected[f] = x_NF[rows, f]
            return selected[f]

        found, values = of_counts(counts.copy(), kept, low, high, shares, column), []
        for f in range(x_NF.shape[1]):
            edges = low[:, f], high[:, f], counts[f]
            whole = selected.get(f)
            values.append(_tightened(kept(f), shares, *edges) if whole is None else _around(whole, shares, *edges))
        return found, QuantileState(rows, low, high, counts, tuple(values))

    found, parts = zip(*over_columns(x_NF, work), strict=True)
    edges = (np.concatenate([getattr(one, name) for one in parts], axis=1) for name in ("low", "high"))
    counts = np.concatenate([one.counts for one in parts])
    return np.concatenate(found), QuantileState(rows, *edges, counts, sum((one.values for one in parts), ()))


def _around(column: np.ndarray, shares, low_Q, high_Q, counts) -> np.ndarray:
    """`_tightened` for a column of which no bracket is of use: all of it is inside."""
    finite = column[np.isfinite(column)]
    negative = np.count_nonzero(column == -np.inf)
    low_Q[:], high_Q[:], counts[:] = -np.inf, np.inf, 0
    counts[0], counts[1::2, 0] = (len(finite), negative), negative
    return _tightened(finite, shares, low_Q, high_Q, counts)


def _tightened(held: np.ndarray, shares, low_Q, high_Q, counts) -> np.ndarray:
    """Brackets of one column drawn as tight as `SHARE_KEPT` says, in place; gives what lies strictly inside any.

    held : what lies strictly inside the brackets as they come, in which the ranks lie too.
    """
    finite, negative = counts[0].tolist()
    ordered, inside = np.sort(held), np.zeros(len(held), bool)
    reach = max(LEAST_KEPT, int(finite * SHARE_KEPT))
    for q, share in enumerate(shares if finite else ()):
        (below, at_low), (at_high, _) = counts[1 + 2 * q : 3 + 2 * q].tolist()
        first = np.searchsorted(ordered, low_Q[q], side="right")
        stop = max(first, np.searchsorted(ordered, high_Q[q], side="left"))
        values = np.concatenate([low_Q[q : q + 1], ordered[first:stop], high_Q[q : q + 1]])
        many = np.concatenate([[at_low], np.ones(stop - first, np.int64), [at_high]])
        ranks = below - negative + np.cumsum(many) - many  # of the first of each of these values
        middle, top = int((finite - 1) * share), int(ranks[-1] + many[-1]) - 1
        ends = np.array([max(middle - reach, ranks[0]), min(middle + 1 + reach, top)])
        low, high = values[np.searchsorted(ranks, ends, side="right") - 1]
        at = {edge: slice(*(np.searchsorted(values, edge, side) for side in ("left", "right"))) for edge in (low, high)}
        low_Q[q], high_Q[q] = low, high
        counts[1 + 2 * q] = ranks[at[low].start] + negative, many[at[low]].sum()
        counts[2 + 2 * q, 0] = many[at[high]].sum() if low < high else 0
        inside |= (low < ordered) & (ordered < high)
    return ordered[inside]
