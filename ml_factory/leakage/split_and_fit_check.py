"""Check what is fitted: splits respect purging and embargo, and no fitted number depends on other rows."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd

from ml_factory.leakage.pipeline_under_test import FittedObjectUnderTest, PipelineUnderTest, SplitUnderTest
from ml_factory.leakage.timed_tables import Leak, TimedTable
from ml_factory.seeding import seeded_generator
from ml_factory.storage.serialization import serialize_state


def match_labels_to_features(labels: pd.DataFrame, features: TimedTable) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the labels that have a row of features, and the positions of those rows."""
    at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    row = np.searchsorted(features.at, at)
    present = (row < len(features)) & (features.at[np.minimum(row, len(features) - 1)] == at)
    return labels[present], row[present]


def find_purge_violations(labels: pd.DataFrame, split: SplitUnderTest) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (pair of roles, rows that must not be in training): the rule of `targets/splits.py`, coded separately.

    A row stays if its label ended before the block's first row was known, or if the row `embargo` places before it is
    known after the block's latest label ended. Adjacent rows of one role are one block.
    """
    known_at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    label_end = pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8
    for train_role, test_role in _role_pairs(split.roles):
        rows = np.asarray(split.roles[train_role])
        bad = np.zeros(len(rows), bool)
        for block in _blocks(np.sort(np.asarray(split.roles[test_role]))):
            before = label_end[rows] < known_at[block[0]]
            earlier = rows - split.embargo
            after = (earlier >= 0) & (known_at[np.maximum(earlier, 0)] > label_end[block].max())
            bad |= ~(before | after)
        if bad.any():
            yield f"{train_role} against {test_role}", rows[bad]


def _role_pairs(roles: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    pairs = [("train", role) for role in roles if role != "train"]
    return pairs + ([("validation", "test")] if {"validation", "test"} <= set(roles) else [])


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []


def check_splits_are_purged(labels: pd.DataFrame, splits: list[SplitUnderTest], horizon: str) -> Iterator[Leak]:
    """Yield a leak for every split with training rows whose labels overlap an evaluated block."""
    for split in splits:
        for who, rows in find_purge_violations(labels, split):
            first = str(labels.index[rows.min()])
            yield Leak(f"split {horizon}", f"{split.name}: {who}", len(rows), first, None, split.name, "purge and "
                       "embargo", "none", "rows")  # fmt: skip


def check_fitted_for_leaks(
    pipeline: PipelineUnderTest,
    values: np.ndarray,
    labels: pd.DataFrame,
    splits: list[SplitUnderTest],
    horizon: str,
    seed: int = 0,
) -> Iterator[Leak]:
    """Yield a leak for every fitted object that changes with rows that it may not read.

    Each object is fitted again after all rows but those it may read were changed in five ways; its numbers must be the
    same bits.

    values : [L, F], the feature rows of `labels`
    """
    for split in splits:
        clean = pipeline.fit(values, labels, split.roles)
        for reads in sorted({one.reads for one in clean.values()}):
            own = np.concatenate([np.asarray(split.roles[role]) for role in reads])
            outside = np.setdiff1d(np.arange(len(labels)), own)
            for way, change in ROW_PERTURBATIONS.items():
                random = seeded_generator("rows", way, split.name, seed)
                other = pipeline.fit(*change(values, labels, split.roles, outside, random))
                for name, one in clean.items():
                    if one.reads == reads and (where := _state_difference(one, other.get(name))):
                        first = str(labels.index[outside[0]])
                        yield Leak(
                            f"fitted {horizon}", f"{name}{where}", len(outside), first, None, split.name,
                            f"it may read {' and '.join(reads)} rows", way, "rows",
                        )  # fmt: skip


def _state_difference(one: FittedObjectUnderTest, other: FittedObjectUnderTest | None) -> str:
    """Return the path where two states differ, such as ['scale']; '' for equal states."""
    if other is None:
        return ": gone"
    if serialize_state({"state": one.state}) == serialize_state({"state": other.state}):
        return ""
    return _first_difference(one.state, other.state) or ": its type"


def _first_difference(one: object, two: object) -> str:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted({*one, *two}, key=str):
            if key not in one or key not in two:
                return f"[{key!r}]"
            if _state_difference(FittedObjectUnderTest(one[key]), FittedObjectUnderTest(two[key])):
                return f"[{key!r}]" + _first_difference(one[key], two[key])
    return " "


# ---- five perturbations of rows ------------------------------------------------------------------------------------
# Each takes (values, labels, roles, outside, random) and returns (values, labels, roles); rows that are not `outside`
# keep every bit.


def _rescale(values, labels, roles, outside, random):
    """Scale inputs by a thousand, returns by five, and set every outcome to the same side."""
    return _changed(values, labels, outside, lambda x: x * 1000.0 + 7.0, lambda column: column * 5.0, sides=1), roles


def _mirror(values, labels, roles, outside, random):
    """Flip the sign of inputs, returns and sides."""
    return _changed(values, labels, outside, lambda x: -3.0 * x, lambda column: -column, sides=-1), roles


def _shuffle(values, labels, roles, outside, random):
    """Permute the rows under the same times."""
    order = random.permutation(outside)
    values, mixed = values.copy(), labels.copy()
    values[outside] = values[order]
    for k in range(mixed.shape[1]):
        mixed.isetitem(k, _replaced(labels.iloc[:, k], outside, labels.iloc[:, k].array[order]))
    return (values, mixed), roles


def _longer_labels(values, labels, roles, outside, random):
    """Extend the labels far, make every second one ambiguous, and rescale inputs."""
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
    """Delete two thirds of the rows; the roles refer to the remaining ones."""
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


ROW_PERTURBATIONS: dict[str, Callable] = {
    "rescale": _flat(_rescale),
    "mirror": _flat(_mirror),
    "shuffle": _flat(_shuffle),
    "longer labels": _flat(_longer_labels),
    "delete": _flat(_delete),
}
