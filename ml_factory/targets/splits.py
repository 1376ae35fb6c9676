"""Purged splits of the labelled rows, with embargo: no label overlaps the boundary of training and evaluation.

The rule, for a training row and an evaluated block of rows (validation, a test fold, each block of a combinatorial
fold). The row stays only if
  - its `label_end` is before the block's first `known_at`, strictly; or
  - the row `embargo` places before it is known after the block's latest `label_end`, strictly.
So with embargo >= the model's input window in rows, no window of a training row that follows the block holds a row that
the block's labels were made of. (AFML 7.4; embargo counted in rows, as skfolio does.) A feature's own memory is longer
than that: an average over 60-minute bars is influenced by the block for a while, which gives a training row something
old, never the block anything new.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, SettingsError, wrong_field_error
from ml_factory.targets.label_table import usable_label_rows


@dataclass(frozen=True)
class SplitSpec:
    """Shares of the labelled rows in time order; the rest is test.

    In the chronological split no training row follows a block, so the embargo applies to folds only.

    train, validation : shares
    embargo_bars : rows, at least the model's input window
    """

    train: float = 0.7
    validation: float = 0.15
    embargo_bars: int = 64

    def __post_init__(self):
        for name in ("train", "validation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                what, step = "The rows cannot be split like this", "use for example train=0.7, validation=0.15"
                raise wrong_field_error(self, name, what, wanted="a share between 0 and 1", next_step=step)
        if not self.train + self.validation < 1 or not math.isfinite(self.train + self.validation):
            raise SettingsError(
                "The rows cannot be split like this",
                where="SplitSpec.train + SplitSpec.validation",
                got=self.train + self.validation,
                wanted="less than 1, so that test rows remain",
                next_step="use for example train=0.7, validation=0.15",
            )
        check_split_embargo(self.embargo_bars, "SplitSpec.embargo_bars")


def chronological_split(labels: pd.DataFrame, spec: SplitSpec) -> dict[str, np.ndarray]:
    """Split into train, then validation, then test: int64 positions into the rows of `labels`.

    Twelve rows whose labels end two rows later, train=0.5, validation=0.25 (. is purged):

        row         0  1  2  3  4  5  6  7  8  9 10 11
        train       0  1  2  3  .  .
        validation                    6  .  .
        test                                   9 10 11

    Rows marked `inferred` (`label_table.mark_inferred_labels`) are in no part, and the shares are of the others.

    Raises SettingsError when a part would be empty, BarsError when every row is marked.
    """
    known_at, label_end = label_start_and_end(labels)
    rows = usable_label_rows(labels)
    n = len(rows)
    if not n and len(labels):
        raise BarsError(
            "All rows are in the sessions that the market's facts were inferred from",
            where=f"{len(labels)} labelled rows", got="no row after the first 20 sessions", wanted="rows to learn from",
            next_step="give calendar= and tick= (prepare --calendar, --tick), or more bars",
        )  # fmt: skip
    first, second = int(n * spec.train), int(n * (spec.train + spec.validation))
    train, validation, test = np.split(rows, [first, second])
    parts = {"train": train, "validation": validation, "test": test}
    if all(map(len, parts.values())):
        parts["validation"] = purge_training_rows(known_at, label_end, validation, test, spec.embargo_bars)
        parts["train"] = purge_training_rows(known_at, label_end, train, rows[first:], spec.embargo_bars)
    for name, rows in parts.items():
        if not len(rows):
            raise SettingsError(
                f"No {name} row is left",
                where=f"{n} labelled rows",
                got=f"train={spec.train}, validation={spec.validation}",
                wanted=f"a {name} part longer than the labels' horizon",
                next_step="give more bars, or use a smaller horizon",
            )
    return parts


def purged_kfold(labels: pd.DataFrame, folds: int, embargo: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) for each of `folds` contiguous test blocks: int64 positions into the rows of `labels`.

    Twelve rows whose labels end two rows later, folds=3, embargo=1 (T tests, . is purged, e is embargoed):

        row      0  1  2  3  4  5  6  7  8  9 10 11
        fold 0   T  T  T  T  .  .  e  7  8  9 10 11
        fold 1   0  1  .  .  T  T  T  T  .  .  e 11
        fold 2   0  1  2  3  4  5  .  .  T  T  T  T

    Raises SettingsError when a fold would keep no training row.
    """
    check_split_count(folds, "folds", 2, len(labels), "use folds=5")
    check_split_embargo(embargo, "embargo")
    known_at, label_end = label_start_and_end(labels)
    rows, pairs = np.arange(len(labels)), []
    for number, test in enumerate(np.array_split(rows, folds)):
        train = purge_training_rows(known_at, label_end, np.delete(rows, test), test, embargo)
        if not len(train):
            raise no_training_row_error(number, len(labels), f"{folds} folds, embargo of {embargo} rows")
        pairs.append((train, test))
    return pairs


def purge_training_rows(
    known_at: np.ndarray, label_end: np.ndarray, rows: np.ndarray, block: np.ndarray, embargo: int
) -> np.ndarray:
    """Return the training rows that stay next to `block` by the rule of this module; arguments as in
    `purge_keep_mask`.
    """
    return rows[purge_keep_mask(known_at, label_end, rows, block, embargo)]


def purge_keep_mask(
    known_at: np.ndarray, label_end: np.ndarray, rows: np.ndarray, block: np.ndarray, embargo: int
) -> np.ndarray:
    """Return bool[len(rows)]: rows that stay by the rule of this module.

    known_at, label_end : int64[N] ns of all labelled rows
    rows, block : int64 positions into them; the block's rows are contiguous
    embargo : rows
    """
    # known_at increases, so "embargo places before it is known after T" is one position from which on rows stay.
    free = int(np.searchsorted(known_at, label_end[block].max(), side="right")) + embargo
    return (label_end[rows] < known_at[block[0]]) | (rows >= free)


def label_start_and_end(labels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[N] ns: known_at and label_end of every row."""
    known_at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    return known_at, pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8


def check_split_count(value: object, where: str, least: int, most: int, next_step: str) -> None:
    """Raise SettingsError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise SettingsError(
            "The rows cannot be split like this",
            where=where,
            got=repr(value),
            wanted=f"a whole number from {least} to {most}",
            next_step=next_step,
        )


def check_split_embargo(value: object, where: str) -> None:
    """Raise SettingsError unless `value` is a number of rows."""
    check_split_count(value, where, 0, 10**9, "use the length of the model's input window")


def no_training_row_error(fold: int, rows: int, how: str) -> SettingsError:
    """Return the error for a fold whose training rows are all purged."""
    return SettingsError(
        f"Fold {fold} keeps no training row",
        where=f"{rows} labelled rows",
        got=how,
        wanted="a block that leaves training rows",
        next_step="use fewer folds, a smaller embargo or more bars",
    )
