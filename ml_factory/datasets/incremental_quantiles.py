"""Exact quantiles of growing rows: the counts around each rank are stored and updated with the new rows.

The pass of `quantiles` counts the values below a bracket and keeps those inside. Both add up over rows, so only the new
rows are passed over while the wanted ranks stay inside their brackets. A column with a rank outside is sorted once;
where many columns have one, all rows are passed over again.
"""

from dataclasses import dataclass

import numpy as np

from ml_factory.datasets.exact_quantiles import (
    FEW_ROWS,
    SAMPLE_ROWS,
    bracket_sample_positions,
    column_quantiles,
    count_around_quantile_brackets,
    map_column_groups,
    quantile_brackets,
    quantile_buffer_size,
    quantiles_from_counts,
)
from ml_factory.errors import CheckpointError, refuse_damaged_content

SHARE_KEPT, LEAST_KEPT = 1 / 200, 256
"""Share of the rows on each side of a rank that its bracket covers: the growth of a data set between two passes over
all rows in the worst case, with all new values on one side."""
MOST_SORTED = 16  # columns sorted by themselves; with more of them a pass over all is cheaper
MOST_GROWN = 1.25  # times the rows that were counted; with more of them too


@dataclass(frozen=True)
class IncrementalQuantileState:
    """Counts around Q quantiles of F columns.

    rows : int64, positions of the counted rows, increasing
    low, high : float32 (Q, F), the brackets' edges
    counts : int64 (F, 1 + 2 Q, 2), as of `quantiles.count_around_quantile_brackets`
    values : for each column the values strictly inside a bracket, float32, in any order
    """

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray
    values: tuple[np.ndarray, ...]

    def to_state(self) -> dict:
        """Return plain values and arrays; runs of rows by their first and their count."""
        ends = np.cumsum([len(one) for one in self.values])
        steps = np.flatnonzero(np.diff(self.rows, prepend=-2) != 1)  # runs: few, however many rows there are
        runs = np.stack([self.rows[steps], np.append(steps[1:], len(self.rows)) - steps])
        packed = {"runs": runs, "ends": ends, "values": np.concatenate(self.values)}
        return packed | {"low": self.low, "high": self.high, "counts": self.counts}

    @classmethod
    def from_state(cls, state: dict, rows: int) -> "IncrementalQuantileState":
        """Restore the result of `to_state`. rows : number of rows of the data. Raises CheckpointError."""
        what = "This quantile state is damaged"
        with refuse_damaged_content(CheckpointError, what, next_step="run prepare again"):
            return cls._from_state(state, rows)

    @classmethod
    def _from_state(cls, state: dict, rows: int) -> "IncrementalQuantileState":
        firsts, counts = state["runs"]
        ends = firsts + counts
        if firsts.dtype != np.int64 or (counts < 1).any() or firsts[0] < 0 or ends[-1] > rows:
            raise ValueError("runs of rows that the data does not have")
        if (firsts[1:] <= ends[:-1]).any() or ends.max() > rows:
            raise ValueError("runs of rows that overlap")
        kinds = {"low": "float32", "high": "float32", "values": "float32", "counts": "int64", "ends": "int64"}
        if any(state[name].dtype != kind for name, kind in kinds.items()):
            raise ValueError("numbers of another type")
        quantiles, columns = state["low"].shape
        bounds = state["ends"]
        if state["high"].shape != (quantiles, columns) or state["counts"].shape != (columns, 1 + 2 * quantiles, 2):
            raise ValueError("numbers of another shape")
        if (np.diff(bounds, prepend=0) < 0).any() or len(bounds) != columns or bounds[-1] != len(state["values"]):
            raise ValueError("values of another number")
        positions = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
        return cls(
            positions, state["low"], state["high"], state["counts"], tuple(np.split(state["values"], bounds[:-1]))
        )


def update_incremental_quantiles(
    x_NF: np.ndarray, rows: np.ndarray, shares: tuple[float, ...], before: IncrementalQuantileState | None = None
) -> tuple[np.ndarray, IncrementalQuantileState | None]:
    """Compute `quantiles(x_NF, shares, rows)`, to the bit, and the state to pass as `before` once there are more rows.

    Parameters
    ----------
    x_NF : float32, C-contiguous
    rows : int64, increasing
    shares : of the quantiles
    before : state of earlier rows of the same matrix; ignored where they are not among `rows`

    Returns
    -------
    (quantiles, state) : the state is None for few rows, which cost little
    """
    if len(rows) < FEW_ROWS:
        return column_quantiles(x_NF, shares, rows), None
    new_rows = None if before is None else _new_rows(before, x_NF, rows)
    updated = None if new_rows is None else _update(before, x_NF, rows, new_rows, shares)
    return updated or _initialise(x_NF, rows, shares)


def _new_rows(before: IncrementalQuantileState, x_NF: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Return the rows that were not counted; None where they are many, or where a counted row is missing."""
    if len(rows) > MOST_GROWN * len(before.rows) or before.low.shape[1] != x_NF.shape[1]:
        return None
    pending = np.zeros(len(x_NF), bool)
    pending[rows] = True
    if before.rows[-1] >= len(x_NF) or not pending[before.rows].all():
        return None
    pending[before.rows] = False
    return np.flatnonzero(pending)


def _update(
    before: IncrementalQuantileState, x_NF, rows, new_rows, shares
) -> tuple[np.ndarray, IncrementalQuantileState] | None:
    """Update the state with the new rows; None where too many ranks have left their brackets."""
    low, high, left = before.low, before.high, []
    new, inside = _counted(x_NF[new_rows], low, high)
    counts = before.counts + new
    values = [np.concatenate([one, x_NF[new_rows[inside[:, f]], f]]) for f, one in enumerate(before.values)]

    def column(f: int) -> np.ndarray:
        left.append(f)
        return x_NF[rows, f]

    found = quantiles_from_counts(counts.copy(), values.__getitem__, low, high, shares, column)
    if len(left) > MOST_SORTED:
        return None
    low, high = low.copy(), high.copy()
    for f in left:
        values[f] = _bracket_column(x_NF[rows, f], shares, low[:, f], high[:, f], counts[f])
    return found, IncrementalQuantileState(rows, low, high, counts, tuple(values))


def _counted(x_NF: np.ndarray, low_QF: np.ndarray, high_QF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute `quantiles.count_around_quantile_brackets` of few rows, and bool (N, F): values strictly inside a
    bracket.
    """
    counts, inside = np.zeros((x_NF.shape[1], 1 + 2 * len(low_QF), 2), np.int64), np.zeros(x_NF.shape, bool)
    counts[:, 0] = np.stack([np.isfinite(x_NF).sum(axis=0), (x_NF == -np.inf).sum(axis=0)], axis=1)
    for q, (low_F, high_F) in enumerate(zip(low_QF, high_QF, strict=True)):
        counts[:, 1 + 2 * q] = np.stack([(x_NF < low_F).sum(axis=0), (x_NF == low_F).sum(axis=0)], axis=1)
        counts[:, 2 + 2 * q, 0] = np.where(low_F < high_F, (x_NF == high_F).sum(axis=0), 0)
        inside |= (low_F < x_NF) & (x_NF < high_F)
    return counts, inside


def _initialise(x_NF, rows, shares) -> tuple[np.ndarray, IncrementalQuantileState]:
    """Pass over all rows, and tighten the brackets around the result."""

    def work(x_NF: np.ndarray) -> tuple[np.ndarray, IncrementalQuantileState]:
        chosen = bracket_sample_positions(len(rows), min(SAMPLE_ROWS, len(rows) // 4))
        low, high = quantile_brackets(np.ascontiguousarray(x_NF[rows[chosen]].T), shares)
        counts, kept = count_around_quantile_brackets(
            x_NF, rows, low, high, quantile_buffer_size(len(rows), len(chosen), shares)
        )
        selected = {}

        def column(f: int) -> np.ndarray:
            selected[f] = x_NF[rows, f]
            return selected[f]

        found, values = quantiles_from_counts(counts.copy(), kept, low, high, shares, column), []
        for f in range(x_NF.shape[1]):
            edges = low[:, f], high[:, f], counts[f]
            whole = selected.get(f)
            values.append(
                _tighten(kept(f), shares, *edges) if whole is None else _bracket_column(whole, shares, *edges)
            )
        return found, IncrementalQuantileState(rows, low, high, counts, tuple(values))

    found, parts = zip(*map_column_groups(x_NF, work), strict=True)
    edges = (np.concatenate([getattr(one, name) for one in parts], axis=1) for name in ("low", "high"))
    counts = np.concatenate([one.counts for one in parts])
    return np.concatenate(found), IncrementalQuantileState(rows, *edges, counts, sum((one.values for one in parts), ()))


def _bracket_column(column: np.ndarray, shares, low_Q, high_Q, counts) -> np.ndarray:
    """Tighten the brackets of a column for which no bracket is of use: all values are inside."""
    finite = column[np.isfinite(column)]
    negative = np.count_nonzero(column == -np.inf)
    low_Q[:], high_Q[:], counts[:] = -np.inf, np.inf, 0
    counts[0], counts[1::2, 0] = (len(finite), negative), negative
    return _tighten(finite, shares, low_Q, high_Q, counts)


def _tighten(held: np.ndarray, shares, low_Q, high_Q, counts) -> np.ndarray:
    """Tighten the brackets of one column to `SHARE_KEPT`, in place; return the values strictly inside any bracket.

    held : values strictly inside the previous brackets, which contain the ranks
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
