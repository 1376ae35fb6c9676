"""Tables of rows with the moment from which each is final, and the differences of two builds."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import pandas as pd

ROWS, COLUMNS, RAISED = "(rows)", "(columns)", "(exception)"  # differences that are no single column
COMPARED = "compared"  # instead of a perturbation: a stored or used value compared with its reference


@dataclass(frozen=True)
class TimedTable:
    """N rows of one part of a pipeline.

    at : int64[N] ns, the `known_at` that names a row
    proven : int64[N] ns, from when its content is final: `known_at` for features and frames, `label_end` for labels
    columns : name -> array [N] of any plain dtype
    names, matrix : F more columns as one array [N, F]
    """

    at: np.ndarray
    proven: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    matrix: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.at)

    def column(self, name: str) -> np.ndarray:
        """Return the [N] values of that name, from `columns` or `matrix`."""
        return self.columns[name] if name in self.columns else self.matrix[:, self.names.index(name)]


@dataclass(frozen=True)
class ColumnDifference:
    """A column whose bits differ between two builds.

    column : its name
    rows : how many rows differ
    first : known_at of the first, ns
    size : the largest change in the column's deviations, or NaN
    """

    column: str
    rows: int
    first: int
    size: float


@dataclass(frozen=True)
class Leak:
    """A column or fitted object that the future (or a row outside training) changed.

    part : features, frame 60m, labels h20, facts, split or fitted
    column : the column or fitted object
    rows, first_row, size : the worst of the cuts
    cut, why, disturbance, scope : where it was detected first
    cuts : in how many comparisons
    """

    part: str
    column: str
    rows: int
    first_row: str
    size: float | None
    cut: str
    why: str
    disturbance: str
    scope: str
    cuts: int = 1

    def sentence(self) -> str:
        """Describe what changed, by how much, and where it was detected."""
        if self.disturbance == COMPARED:
            return f"{self.part}: {self.column} differs from {self.why} in {self.rows:,} places, first {self.first_row}"
        size = "" if self.size is None else f", up to {self.size:.3g} of its deviation"
        seen = f"cut {self.cut} ({self.why}), {self.disturbance}, {self.scope}"
        times = f"; in {self.cuts} comparisons" if self.cuts > 1 else ""
        return f"{self.part}: {self.column} changes in {self.rows:,} rows from {self.first_row}{size} [{seen}{times}]"

    def to_dict(self) -> dict:
        return asdict(self)


def one_per_column(leaks: Iterable[Leak]) -> tuple[Leak, ...]:
    """Return the leaks, each part and column once: the first that names it."""
    first: dict[tuple[str, str], Leak] = {}
    for leak in leaks:
        first.setdefault((leak.part, leak.column), leak)
    return tuple(first.values())


def timed_table_of_labels(labels: pd.DataFrame) -> TimedTable:
    """Return a table of `triple_barrier_labels` labels, proven at `label_end`."""
    at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    columns = {str(name): to_plain_array(column) for name, column in labels.items()}
    return TimedTable(at, columns["label_end"], columns)


def timed_table_of_coarse_bars(frame: Mapping[str, np.ndarray]) -> TimedTable:
    """Return a table of coarse bars: arrays under their names, `known_at` among them."""
    columns = {name: np.asarray(values) for name, values in frame.items() if isinstance(values, np.ndarray)}
    return TimedTable(columns["known_at"], columns["known_at"], columns)


def to_plain_array(column: pd.Series) -> np.ndarray:
    """Return the values as a plain array: categories as text, times as int64 ns."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.astype(str).to_numpy(object)
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return pd.DatetimeIndex(column).as_unit("ns").asi8
    return column.to_numpy()


def table_differences(clean: TimedTable, other: TimedTable, cut: int) -> tuple[int, list[ColumnDifference]]:
    """Return (rows compared, columns that differ) among the rows proven by `cut`, to the bit.

    A row that exists in one build only is a difference too: the future decided whether it exists.
    """
    ours, theirs = _proven_by(clean, cut), _proven_by(other, cut)
    at = clean.at[ours]
    if tuple(clean.columns) != tuple(other.columns) or tuple(clean.names) != tuple(other.names):
        return len(at), [ColumnDifference(COLUMNS, len(at), int(at[0]) if len(at) else cut, np.nan)]
    if not np.array_equal(at, other.at[theirs]):
        lone = np.setxor1d(at, other.at[theirs])
        return len(at), [ColumnDifference(ROWS, len(lone), int(lone[0]) if len(lone) else cut, np.nan)]
    found = []
    for name, column in clean.columns.items():
        found += _column_difference(name, at, column[ours], other.columns[name][theirs])
    if clean.matrix is not None:
        one, two = clean.matrix[ours], other.matrix[theirs]
        unequal = np.flatnonzero(~bitwise_equal(one, two).all(axis=0)) if not _equal(one, two) else ()
        for k in unequal:
            found += _column_difference(clean.names[k], at, one[:, k], two[:, k])
    return len(at), found


def _proven_by(table: TimedTable, cut: int) -> slice | np.ndarray:
    """Return the rows proven by `cut`; a slice where they are the first ones, which costs no copy."""
    kept = table.proven <= cut
    count = int(np.count_nonzero(kept))
    return slice(0, count) if kept[:count].all() else np.flatnonzero(kept)


def _equal(one: np.ndarray, two: np.ndarray) -> bool:
    if one.dtype != two.dtype:
        return False
    return all(bitwise_equal(one[k : k + 8192], two[k : k + 8192]).all() for k in range(0, len(one), 8192))


def bitwise_equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return bool, elementwise: equal bits, so NaN equals NaN and 0.0 is not -0.0."""
    if one.dtype != two.dtype:
        return np.zeros(one.shape, bool)
    if one.dtype == object:
        return np.asarray(one == two, bool)
    bits = f"u{one.dtype.itemsize}"
    if one.dtype.kind not in "fiub" or one.dtype.itemsize > 8:
        return np.asarray(one == two, bool)
    return np.ascontiguousarray(one).view(bits) == np.ascontiguousarray(two).view(bits)


def _column_difference(name: str, at: np.ndarray, one: np.ndarray, two: np.ndarray) -> list[ColumnDifference]:
    unequal = np.flatnonzero(~bitwise_equal(one, two))
    if not len(unequal):
        return []
    size = np.nan
    if one.dtype.kind in "fiu" and two.dtype.kind in "fiu":
        one, two = one.astype(np.float64), two.astype(np.float64)
        finite = one[np.isfinite(one)]
        deviation = finite.std() if len(finite) else 0.0
        moved = np.abs(one[unequal] - two[unequal])
        moved = moved[np.isfinite(moved)]
        size = float(moved.max() / deviation) if len(moved) and deviation > 0 else np.nan
    return [ColumnDifference(name, len(unequal), int(at[unequal[0]]), size)]
