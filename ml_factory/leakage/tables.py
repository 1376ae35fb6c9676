"""Tables of rows with the moment from which each is final, the leaks between two builds, and the list of findings."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.storage.serialization import serialize_state

ROWS, COLUMNS, RAISED = "(rows)", "(columns)", "(exception)"  # differences that are no single column
COMPARED = "compared"  # instead of a perturbation: a stored or used value compared with its reference
BLOCK_ROWS = 8_192
Tamper = Callable[[str, object], object]


@dataclass(frozen=True)
class Table:
    """Rows of one part of a pipeline.

    rows : DataFrame, index `known_at` (UTC)
    proven : int64[N] ns, from when a row is final: `known_at` for features and frames, `label_end` for labels
    """

    rows: pd.DataFrame
    proven: np.ndarray

    def known_by(self, moment: int) -> pd.DataFrame:
        """Return the rows proven by a moment (ns); a view where they are the first ones."""
        kept = self.proven <= moment
        count = int(np.count_nonzero(kept))
        return self.rows.iloc[:count] if kept[:count].all() else self.rows[kept]


@dataclass(frozen=True)
class Leak:
    """A column or fitted object that the future (or a row outside training) changed.

    part : features, frame 60m, labels h20, facts, split or fitted
    column : the column or fitted object
    rows, first_row : rows of the worst of the cuts, and the first row
    cut, why, disturbance, scope : where it was detected first; `why` is the reference of a COMPARED value
    cuts : in how many comparisons
    """

    part: str
    column: str
    rows: int
    first_row: str
    cut: str = "none"
    why: str = ""
    disturbance: str = COMPARED
    scope: str = "as used"
    cuts: int = 1

    def sentence(self) -> str:
        """Describe what changed, by how much, and where it was detected."""
        if self.disturbance == COMPARED:
            return f"{self.part}: {self.column} differs from {self.why} in {self.rows:,} places, first {self.first_row}"
        seen = f"cut {self.cut} ({self.why}), {self.disturbance}, {self.scope}"
        times = f"; in {self.cuts} comparisons" if self.cuts > 1 else ""
        return f"{self.part}: {self.column} changes in {self.rows:,} rows from {self.first_row} [{seen}{times}]"


class Findings:
    """The leaks and counts of a proof.

    compared : part -> rows or values compared
    cuts : the moments tested
    tamper : from a stage and a value to the value to use there (None: the same object), to test the checks themselves
    """

    def __init__(self, tamper: Tamper | None = None):
        self.tamper, self.compared, self.cuts = tamper, {}, []
        self._leaks: dict[tuple[str, str], Leak] = {}

    @property
    def leaks(self) -> tuple[Leak, ...]:
        return tuple(self._leaks.values())

    @property
    def passed(self) -> bool:
        return not self._leaks

    def given(self, stage: str, value: object) -> object:
        """Return what `tamper` gives back for a copy of the value at this stage; without one the value itself."""
        if self.tamper is None:
            return value
        value = copy.deepcopy(value)
        given = self.tamper(stage, value)
        return value if given is None else given

    def count(self, part: str, rows: int) -> None:
        """Add rows or values compared."""
        self.compared[part] = self.compared.get(part, 0) + int(rows)

    def add(self, leaks: Iterable[Leak]) -> None:
        """Keep the first leak of each part and column, with the worst values of the later ones."""
        for leak in leaks:
            known = self._leaks.setdefault((leak.part, leak.column), leak)
            if known is not leak:
                worst = max(known.rows, leak.rows)
                self._leaks[leak.part, leak.column] = replace(known, rows=worst, cuts=known.cuts + 1)

    def guarded(self, build: Callable, *, cut: str = "none", why: str = "the bars as they are", way: str = "none"):
        """Return `build()`, or None: fails closed, what cannot be built is not proven and its exception is a leak."""
        try:
            return build()
        except Exception as error:  # noqa: BLE001 - any exception counts as a failure of the pipeline
            what = f"{RAISED} {type(error).__name__}: {error}"
            self.add([Leak("pipeline", what, 0, cut, cut, why, way, "whole file")])
            return None


# ---- comparisons -----------------------------------------------------------------------------------------------------


def compare(
    part: str,
    got: object,
    wanted: pd.DataFrame,
    reference: str,
    *,
    extra: bool = False,
    found_at: Mapping | None = None,
) -> list[Leak]:
    """Return a leak for each column that is not the same bits at the same times, and for rows in one table alone.

    reference : describes `wanted` in words; at a cut, why it was made
    extra : `got` may have more columns
    found_at : of two builds: cut, disturbance and scope; None: a stored or used table and its reference
    """

    def leak(column: str, rows: int, first: str) -> Leak:
        return Leak(part, column, rows, first, why=reference, **(found_at or {}))

    if not isinstance(got, pd.DataFrame) or not isinstance(got.index, pd.DatetimeIndex):
        return [leak(f"{COLUMNS} of a {type(got).__name__}", len(wanted), "the first")]
    at, wanted_at = (pd.DatetimeIndex(one.index).as_unit("ns").asi8 for one in (got, wanted))
    if not np.array_equal(at, wanted_at):
        lone = np.setxor1d(at, wanted_at)
        both = min(len(at), len(wanted_at))  # a moment may be there twice
        differs = np.append(at[:both] != wanted_at[:both], True).argmax()
        first = lone[0] if len(lone) else np.append(at, wanted_at[both:])[differs]
        return [leak(ROWS, max(1, len(lone)), _moment(first))]
    names, needed = list(got.columns), list(wanted.columns)
    if names != needed and not (extra and set(needed) <= set(names)):
        odd = [name for name in needed if name not in names] or [name for name in names if name not in needed] or names
        return [leak(f"{COLUMNS} {odd[0]}", len(at), _moment(at[0]) if len(at) else "none")]
    found = []
    for name in _columns_to_compare(got, wanted):
        one, two = got[name], wanted[name]
        kinds = {type(one.dtype), type(two.dtype)}
        if kinds == {pd.CategoricalDtype} and one.cat.categories.equals(two.cat.categories):
            one, two = one.cat.codes, two.cat.codes
        if len(wrong := _unequal_rows(_plain(one), _plain(two))):
            found.append(leak(str(name), len(wrong), _moment(at[wrong[0]])))
    return found


def compare_states(part: str, name: str, got: object, wanted: object, reference: str) -> list[Leak]:
    """Return a leak where arrays, positions or fitted numbers (of `to_dict`, or plain) differ in any bit."""
    where = state_difference(got, wanted)
    return [mismatch(part, f"{name}{where[0]}", where[1], "the first", reference)] if where else []


def state_difference(got: object, wanted: object) -> tuple[str, int] | None:
    """Return (path to the first number that differs, such as ['scale'], how many differ there); None for equal ones."""
    got, wanted = (one.to_dict() if hasattr(one, "to_dict") else one for one in (got, wanted))
    if serialize_state({"state": got}) == serialize_state({"state": wanted}):
        return None
    if isinstance(got, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*got, *wanted}, key=str):
            if key not in got or key not in wanted:
                return f"[{key!r}]", 1
            if below := state_difference(got[key], wanted[key]):
                return f"[{key!r}]{below[0]}", below[1]
    numbers = isinstance(got, list | tuple | np.ndarray) and np.shape(got) == np.shape(wanted) and np.ndim(got)
    return "", max(1, int(np.count_nonzero(np.asarray(got) != np.asarray(wanted)))) if numbers else 1


def mismatch(part: str, column: str, rows: int, first: object, reference: str) -> Leak:
    """Return a leak for a stored or used value that differs from its reference (described in words)."""
    return Leak(part, column, int(rows), str(first), why=reference)


def _unequal_rows(one: object, two: object) -> np.ndarray:
    """Return rows (int64) with other bits, so NaN equals NaN; a wider type with the same values is equal."""
    one, two = np.asarray(one), np.asarray(two)
    if one.dtype != two.dtype and {one.dtype.kind, two.dtype.kind} <= set("fiub"):
        wide = np.result_type(one.dtype, two.dtype)
        one, two = one.astype(wide), two.astype(wide)
    same = bitwise_equal(one, two)
    return np.flatnonzero(~(same if same.ndim == 1 else same.reshape(len(one), -1).all(axis=1)))


def bitwise_equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return bool, elementwise: equal bits, so NaN equals NaN and 0.0 is not -0.0."""
    if one.dtype != two.dtype:
        return np.zeros(one.shape, bool)
    if one.dtype.kind not in "fiub" or one.dtype.itemsize > 8:
        return np.asarray(one == two, bool)
    bits = f"u{one.dtype.itemsize}"
    return np.ascontiguousarray(one).view(bits) == np.ascontiguousarray(two).view(bits)


def _columns_to_compare(got: pd.DataFrame, wanted: pd.DataFrame) -> list:
    """Return all columns; of two tables of one type only those that differ, found block by block."""
    kinds = {kind.name for kind in (*got.dtypes, *wanted.dtypes)}
    if len(kinds) != 1 or list(got.columns) != list(wanted.columns):
        return list(wanted.columns)
    one, two = got.to_numpy(), wanted.to_numpy()
    differs = np.zeros(one.shape[1], bool)
    for first in range(0, len(one), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        differs |= ~bitwise_equal(one[block], two[block]).all(axis=0)
    return [wanted.columns[k] for k in np.flatnonzero(differs)]


def _plain(column: pd.Series) -> np.ndarray:
    """Return the values as a plain array: categories as text, times as int64 ns."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return np.append(column.cat.categories.astype(object), "")[column.cat.codes]
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return pd.DatetimeIndex(column).as_unit("ns").asi8
    return column.to_numpy()


def _moment(at: object) -> str:
    return str(pd.Timestamp(int(at), tz="UTC"))
