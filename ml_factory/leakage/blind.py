"""Check what learns: splits respect purging and embargo, and nothing learnt depends on rows that it may not read.

A blind run learns again after the forbidden rows were changed; its numbers must be the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from ml_factory.leakage.tables import Leak, state_difference
from ml_factory.seeding import seeded_generator

Roles = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Split:
    """Rows by their role.

    roles : name -> positions into the labels' rows; "train" is fitted on, every other role is evaluated
    embargo : rows left out after an evaluated block, at least the model's input window
    """

    name: str
    roles: Roles
    embargo: int = 0


@dataclass(frozen=True)
class Fitted:
    """Something learnt.

    state : its numbers, in anything `serialize_state` takes
    reads : roles whose rows it may read
    forecasts : it may read the inputs of all rows, though no outcome outside `reads`
    part : names it in leaks, where it is not the part that is checked
    """

    state: object
    reads: tuple[str, ...] = ("train",)
    forecasts: bool = False
    part: str = ""


Fit = Callable[[np.ndarray, pd.DataFrame, Roles], dict[str, Fitted]]


def find_unpurged_rows(labels: pd.DataFrame, split: Split, part: str) -> Iterator[Leak]:
    """Yield a leak for rows that must not be in training: the rule of `targets/splits.py`, coded separately.

    A row stays if its label ended before the block's first row was known, or if the row `embargo` places before it is
    known after the block's latest label ended. Adjacent rows of one role are one block.
    """
    known_at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    label_end = pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8
    for train_role, test_role in product(("train", "validation"), ("validation", "test")):
        rows, judged = (np.asarray(split.roles.get(role, ()), np.int64) for role in (train_role, test_role))
        if train_role == test_role or not len(rows) or not len(judged):
            continue
        bad, judged = np.zeros(len(rows), bool), np.sort(judged)
        for block in np.split(judged, np.flatnonzero(np.diff(judged) != 1) + 1):
            before = label_end[rows] < known_at[block[0]]
            earlier = rows - split.embargo
            after = (earlier >= 0) & (known_at[np.maximum(earlier, 0)] > label_end[block].max())
            bad |= ~(before | after)
        if bad.any():
            first = str(labels.index[rows[bad].min()])
            who = f"{split.name}: {train_role} against {test_role}".removeprefix(": ")
            yield Leak(part, who, int(bad.sum()), first, split.name, "purge and embargo", "none", "rows")


def find_blind_leaks(fit: Fit, values: np.ndarray, labels: pd.DataFrame, split: Split, part: str) -> Iterator[Leak]:
    """Yield a leak for everything learnt that changes with rows it may not read.

    values : [L, F], the feature rows of `labels`
    """
    clean = fit(values, labels, split.roles)
    for reads, forecasts in sorted({(one.reads, one.forecasts) for one in clean.values()}):
        outside = np.setdiff1d(np.arange(len(labels)), np.concatenate([split.roles[role] for role in reads]))
        random = seeded_generator("blind", split.name, *reads)
        way, given = "other outcomes", (values, _disturb_outcomes(labels, outside), split.roles)
        if not forecasts:
            way, given = "other rows", _other_rows(*given, outside, random)
        blind = fit(*given)
        for name, one in clean.items():
            if (one.reads, one.forecasts) != (reads, forecasts):
                continue
            where = state_difference(one.state, blind[name].state) if name in blind else (": gone", 1)
            if where:
                yield Leak(
                    one.part or part, f"{name}{where[0] or ' '}", len(outside), str(labels.index[outside[0]]),
                    split.name, f"it may read {' and '.join(reads)} rows", way, "rows",
                )  # fmt: skip


def _disturb_outcomes(labels: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """Return the labels with other outcomes in these rows: each class becomes the next one, returns change sign and
    size, labels last far longer, and every second one is ambiguous.
    """
    other, classes = labels.copy(), sorted(labels["label"].unique())
    following = dict(zip(classes, [*classes[1:], classes[0]], strict=True))
    changed = {"label": labels["label"].map(following), "label_end": labels["label_end"] + pd.Timedelta(days=3)}
    numbers = [name for name, column in labels.items() if column.dtype.kind == "f" and name != "close"]
    changed |= {name: -5.0 * labels[name] for name in numbers}
    changed |= {name: labels[name] + 400 for name in ("exit_bar",) if name in labels}
    every = np.arange(len(labels))
    for name, column in changed.items():
        other[name] = labels[name].where(~np.isin(every, rows), column.astype(labels[name].dtype))
    if "barrier" in labels:
        other["barrier"] = labels["barrier"].where(~np.isin(every, rows[::2]), "ambiguous")
    return other


def _other_rows(values: np.ndarray, labels: pd.DataFrame, roles: Roles, rows: np.ndarray, random) -> tuple:
    """Return values, labels and roles without two thirds of these rows, with other features and prices in the rest."""
    every, values = np.arange(len(labels)), values.copy()
    kept = ~np.isin(every, rows[random.random(len(rows)) >= 1 / 3])
    values[rows] = random.normal(5.0, 50.0, (len(rows), values.shape[1])).astype(values.dtype)
    if "close" in labels:
        labels = labels.assign(close=labels["close"].where(~np.isin(every, rows), 1.7 * labels["close"]))
    place = np.cumsum(kept) - 1
    moved = {name: place[np.asarray(one)[kept[one]]] for name, one in roles.items()}
    return values[kept], labels[kept], moved
