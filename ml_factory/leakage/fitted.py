"""What is learnt comes from its own rows: the split keeps the rule, and no fitted number moves with other rows."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import SettingsError
from ml_factory.leakage.pipeline_under_test import Fitted, Pipeline, Split
from ml_factory.leakage.tables import Leak, Table
from ml_factory.seeding import generator
from ml_factory.storage.state import encode_state


def rows_to_fit(labels: pd.DataFrame, features: Table) -> tuple[pd.DataFrame, np.ndarray]:
    """The labels that have a row of features, and the positions of those rows."""
    at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    row = np.searchsorted(features.at, at)
    there = (row < len(features)) & (features.at[np.minimum(row, len(features) - 1)] == at)
    return labels[there], row[there]


def labels_to_divide(pipeline: Pipeline, labels: pd.DataFrame, wanted: int) -> int:
    """How many of the last labels it takes, `wanted` or more, to have rows of every part; 0 where there are too few.

    Long horizons take more rows than are tried. What is stored of the splits is held to the rule in any case.
    """
    count = min(wanted, len(labels))
    while True:
        try:
            pipeline.splits(labels.iloc[len(labels) - count :])
            return count
        except SettingsError:
            if count == len(labels):
                return 0
            count = min(2 * count, len(labels))


def rows_that_break_the_rule(labels: pd.DataFrame, split: Split) -> Iterator[tuple[str, np.ndarray]]:
    """(who teaches whom, rows that must not): the rule of `targets/splits.py`, worked out row by row from its words.

    A row stays if its label ended before the block's first row was known, or if the row `embargo` places before it
    is known after the block's latest label ended. Rows of one role that stand next to each other are one block.
    """
    known_at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    label_end = pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8
    for teacher, judge in _who_teaches_whom(split.roles):
        rows = np.asarray(split.roles[teacher])
        bad = np.zeros(len(rows), bool)
        for block in _blocks(np.sort(np.asarray(split.roles[judge]))):
            before = label_end[rows] < known_at[block[0]]
            earlier = rows - split.embargo
            after = (earlier >= 0) & (known_at[np.maximum(earlier, 0)] > label_end[block].max())
            bad |= ~(before | after)
        if bad.any():
            yield f"{teacher} beside {judge}", rows[bad]


def _who_teaches_whom(roles: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    pairs = [("train", role) for role in roles if role != "train"]
    return pairs + ([("validation", "test")] if {"validation", "test"} <= set(roles) else [])


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []


def leaks_of_splits(labels: pd.DataFrame, splits: list[Split], horizon: str) -> Iterator[Leak]:
    """Every split that lets a row teach beside a block whose labels it shares."""
    for split in splits:
        for who, rows in rows_that_break_the_rule(labels, split):
            first = str(labels.index[rows.min()])
            yield Leak(f"split {horizon}", f"{split.name}: {who}", len(rows), first, None, split.name, "purge and "
                       "embargo", "none", "rows")  # fmt: skip


def leaks_of_fitted(
    pipeline: Pipeline, values: np.ndarray, labels: pd.DataFrame, splits: list[Split], horizon: str, seed: int = 0
) -> Iterator[Leak]:
    """Every fitted object that changes when rows it may not read do.

    values : [L, F], the feature rows of `labels`. Each object is fitted anew after all rows but those it may read
    were changed in five ways; its numbers must be the same bits.
    """
    for split in splits:
        clean = pipeline.fit(values, labels, split.roles)
        for reads in sorted({one.reads for one in clean.values()}):
            own = np.concatenate([np.asarray(split.roles[role]) for role in reads])
            outside = np.setdiff1d(np.arange(len(labels)), own)
            for way, change in ROW_WAYS.items():
                random = generator("rows", way, split.name, seed)
                other = pipeline.fit(*change(values, labels, split.roles, outside, random))
                for name, one in clean.items():
                    if one.reads == reads and (where := _moved(one, other.get(name))):
                        first = str(labels.index[outside[0]])
                        yield Leak(
                            f"fitted {horizon}", f"{name}{where}", len(outside), first, None, split.name,
                            f"it may read {' and '.join(reads)} rows", way, "rows",
                        )  # fmt: skip


def _moved(one: Fitted, other: Fitted | None) -> str:
    """Where two states differ, such as ['scale'], '' when nowhere."""
    if other is None:
        return ": gone"
    if encode_state({"state": one.state}) == encode_state({"state": other.state}):
        return ""
    return _first_difference(one.state, other.state) or ": its type"


def _first_difference(one: object, two: object) -> str:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted({*one, *two}, key=str):
            if key not in one or key not in two:
                return f"[{key!r}]"
            if _moved(Fitted(one[key]), Fitted(two[key])):
                return f"[{key!r}]" + _first_difference(one[key], two[key])
    return " "


# ---- five ways to change rows ------------------------------------------------------------------------------------
# Each takes (values, labels, roles, outside, random) and gives (values, labels, roles); rows that are not `outside`
# keep every bit.


def _rescale(values, labels, roles, outside, random):
    """Inputs a thousand times as large, returns five times, every outcome the same side."""
    return _changed(values, labels, outside, lambda x: x * 1000.0 + 7.0, lambda column: column * 5.0, sides=1), roles


def _mirror(values, labels, roles, outside, random):
    """Inputs and returns with the other sign, sides exchanged."""
    return _changed(values, labels, outside, lambda x: -3.0 * x, lambda column: -column, sides=-1), roles


def _shuffle(values, labels, roles, outside, random):
    """Rows in another order under the same times."""
    order = random.permutation(outside)
    values, mixed = values.copy(), labels.copy()
    values[outside] = values[order]
    for k in range(mixed.shape[1]):
        mixed.isetitem(k, _replaced(labels.iloc[:, k], outside, labels.iloc[:, k].array[order]))
    return (values, mixed), roles


def _other_lives(values, labels, roles, outside, random):
    """Labels that live far longer, every second one ambiguous; inputs of another size."""
    values, other = values.copy(), labels.copy()
    values[outside] = random.normal(5.0, 50.0, (len(outside), values.shape[1])).astype(values.dtype)
    if "exit_bar" in labels:
        other["exit_bar"] = _replaced(labels["exit_bar"], outside, labels["exit_bar"].array[outside] + 400)
    if "label_end" in labels:
        longer = labels["label_end"].array[outside] + pd.Timedelta(days=3)
        other["label_end"] = _replaced(labels["label_end"], outside, longer)
    if "barrier" in labels:
        other["barrier"] = _replaced(labels["barrier"], outside[::2], "ambiguous")
    return (values, other), roles


def _delete(values, labels, roles, outside, random):
    """Two thirds of the rows gone; the roles point at the same rows as before, where they are still there."""
    kept = np.ones(len(labels), bool)
    kept[outside] = random.random(len(outside)) < 1 / 3
    place = np.cumsum(kept) - 1
    moved = {name: place[np.asarray(rows)[kept[rows]]] for name, rows in roles.items()}
    return (values[kept], labels[kept]), moved


def _changed(values, labels, outside, inputs: Callable, numbers: Callable, sides: int) -> tuple:
    values, other = values.copy(), labels.copy()
    values[outside] = inputs(values[outside]).astype(values.dtype)
    for name, column in labels.items():
        if column.dtype.kind == "f":
            new = numbers(column.array[outside])
            other[name] = _replaced(column, outside, abs(new) if name == "close" else new)
    if "label" in labels:
        side = np.abs(labels["label"].array[outside]) if sides > 0 else -labels["label"].array[outside]
        other["label"] = _replaced(labels["label"], outside, np.where(side == 0, sides, side))
    return values, other


def _replaced(column: pd.Series, rows: np.ndarray, new: object) -> pd.Series:
    column = column.copy()
    column.iloc[rows] = new
    return column


def _flat(way: Callable) -> Callable:
    def change(*given):
        (values, labels), roles = way(*given)
        return values, labels, roles

    return change


ROW_WAYS: dict[str, Callable] = {
    "rescale": _flat(_rescale),
    "mirror": _flat(_mirror),
    "shuffle": _flat(_shuffle),
    "longer labels": _flat(_other_lives),
    "delete": _flat(_delete),
}
