"""Compare stored and used values with references, to the bit: rows joined by their time, positions, fitted numbers.

A proof that runs the pipeline again does not check the files that training reads. Here these files, and the values that
the functions called by training derive from them, are compared with a reference computed from the bars and from the
rows that each may read.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from ml_factory.leakage.timed_tables import COLUMNS, COMPARED, ROWS, Leak, bitwise_equal, to_plain_array
from ml_factory.storage.serialization import serialize_state

STAGES = ("bars", "features", "labels", "splits", "scaler", "dataset", "fold", "predictions", "baseline")
BLOCK_ROWS = 8_192
Tamper = Callable[[str, object], object]


def apply_tamper(tamper: Tamper | None, stage: str, value: object) -> object:
    """Return `tamper(stage, value)`; the value itself where `tamper` is None or returns None."""
    if tamper is None:
        return value
    given = tamper(stage, value)
    return value if given is None else given


def artifact_leak(part: str, column: str, rows: int, first: object, reference: str) -> Leak:
    """Return a leak for a stored or used value that differs from its reference.

    reference : description of the reference
    """
    return Leak(part, column, int(rows), str(first), None, "none", reference, COMPARED, "as used")


def compare_artifact_frames(
    part: str, got: object, wanted: pd.DataFrame, reference: str, *, rounded: Sequence[str] = (),
    extra: bool = False,
) -> list[Leak]:  # fmt: skip
    """Return the columns of two DataFrames that are not the same bits at the same times.

    Parameters
    ----------
    part : name of the part
    got : the frame as it is used
    wanted : the reference
    reference : description of the reference
    rounded : columns compared within 1e-6 of their deviation instead of to the bit
    extra : whether `got` may have more columns
    """
    if not isinstance(got, pd.DataFrame):
        return [artifact_leak(part, COLUMNS, len(wanted), "the first", f"a DataFrame: {type(got).__name__}")]
    at, wanted_at = _times(got.index), _times(wanted.index)
    if not np.array_equal(at, wanted_at):
        lone = np.setxor1d(at, wanted_at)
        first = lone[0] if len(lone) else at[np.flatnonzero(at != wanted_at)[0]]
        return [artifact_leak(part, ROWS, max(1, len(lone)), _moment(first), reference)]
    names = [str(name) for name in got.columns]
    missing = [name for name in wanted.columns if name not in names]
    if missing or (not extra and names != [str(name) for name in wanted.columns]):
        odd = missing or [name for name in names if name not in wanted.columns] or names[:1]
        return [artifact_leak(part, f"{COLUMNS} {odd[0]}", len(at), _moment(at[0]), reference)]
    found = []
    for name in _differing_columns(got, wanted):
        one, two = to_plain_array(got[name]), to_plain_array(wanted[name])
        unequal = _unequal_within(one, two) if name in rounded else find_unequal_rows(one, two)
        if len(unequal):
            found.append(artifact_leak(part, str(name), len(unequal), _moment(at[unequal[0]]), reference))
    return found


def _differing_columns(got: pd.DataFrame, wanted: pd.DataFrame) -> list:
    """Return all columns; of two arrays of one type only those that differ, found block by block."""
    kinds = {*got.dtypes.map(str), *wanted.dtypes.map(str)}
    if len(kinds) != 1 or list(got.columns) != list(wanted.columns):
        return list(wanted.columns)
    one, two = got.to_numpy(), wanted.to_numpy()
    differs = np.zeros(one.shape[1], bool)
    for first in range(0, len(one), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        same = bitwise_equal(one[block], two[block])
        if not same.all():
            differs |= ~same.all(axis=0)
    return [wanted.columns[k] for k in np.flatnonzero(differs)]


def find_unequal_rows(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return rows (int64) with unequal values; a wider type with the same values is equal."""
    one, two = np.asarray(one), np.asarray(two)
    if one.shape != two.shape:
        return np.arange(max(len(one), len(two), 1))
    if one.dtype != two.dtype and {one.dtype.kind, two.dtype.kind} <= set("fiub"):
        wide = np.result_type(one.dtype, two.dtype)
        one, two = one.astype(wide), two.astype(wide)
    same = bitwise_equal(one, two)
    return np.flatnonzero(~(same if same.ndim == 1 else same.reshape(len(one), -1).all(axis=1)))


def _unequal_within(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    finite = two[np.isfinite(two)]
    allowed = 1e-6 * ((float(finite.std()) if len(finite) else 0.0) or 1.0)
    return np.flatnonzero(~np.isclose(one, two, rtol=0.0, atol=allowed, equal_nan=True))


def compare_artifact_positions(part: str, got: object, wanted: Mapping[str, np.ndarray], reference: str) -> list[Leak]:
    """Return the parts of a split whose positions differ from the reference.

    got : name -> positions
    """
    if not isinstance(got, Mapping) or set(got) != set(wanted):
        return [artifact_leak(part, COLUMNS, 1, "the first", f"{reference}: parts {', '.join(wanted)}")]
    found = []
    for name, rows in wanted.items():
        given = np.asarray(got[name])
        if given.shape != rows.shape or not np.array_equal(given, rows):
            lone = np.setxor1d(given, rows)
            first = lone[0] if len(lone) else given[np.flatnonzero(given != rows)[0]]
            found.append(artifact_leak(part, name, max(1, len(lone)), f"position {first}", reference))
    return found


def compare_artifact_states(part: str, name: str, got: object, wanted: object, reference: str) -> list[Leak]:
    """Return a leak where fitted numbers differ from the reference in any bit.

    got, wanted : results of `to_dict` or `get_state`, or objects that have `to_dict`
    """
    got, wanted = (one.to_dict() if hasattr(one, "to_dict") else one for one in (got, wanted))
    if serialize_state({"state": got}) == serialize_state({"state": wanted}):
        return []
    where, count = _path_of_difference(got, wanted)
    return [artifact_leak(part, f"{name}{where}", count, "the first", reference)]


def _path_of_difference(got: object, wanted: object) -> tuple[str, int]:
    """Return (path to the first number that differs, count of differing numbers below it)."""
    if isinstance(got, Mapping) and isinstance(wanted, Mapping) and set(got) == set(wanted):
        for key in wanted:
            if serialize_state({"state": got[key]}) != serialize_state({"state": wanted[key]}):
                where, count = _path_of_difference(got[key], wanted[key])
                return f"[{key!r}]{where}", count
    if isinstance(got, list | tuple | np.ndarray) and np.shape(got) == np.shape(wanted) and np.ndim(got):
        try:
            return "", int(np.count_nonzero(np.asarray(got) != np.asarray(wanted)))
        except (ValueError, TypeError):
            return "", 1
    return "", 1


def _times(index: pd.Index) -> np.ndarray:
    """Return int64 ns of a time index; of any other index its hashes, which equal no times."""
    if isinstance(index, pd.DatetimeIndex):
        return index.as_unit("ns").asi8
    return pd.util.hash_array(np.asarray(index)).view(np.int64)


def _moment(at: object) -> str:
    return str(pd.Timestamp(int(at), tz="UTC"))
