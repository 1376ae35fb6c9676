"""Purged splits of the labelled rows, with embargo: no label overlaps the boundary of training and evaluation.

One split in time order; folds: contiguous test blocks, blocks that walk forward (no training row follows one, so no
embargo is needed), and combinations of blocks (AFML chapter 12).

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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings, check_values
from ml_factory.errors import BarsError, SettingsError
from ml_factory.targets.label_table import usable_label_rows

MOST_FOLDS = 1_000  # of a combinatorial cross-validation: each is a training
Fold = tuple[np.ndarray, np.ndarray]
Folds = TypeVar("Folds", bound=Sequence[Fold])


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
        check_settings(self, train="(0, 1)", validation="(0, 1)", embargo_bars="[0, inf)")
        both = {"train + validation": self.train + self.validation}  # so that test rows remain
        check_values(both, **dict.fromkeys(both, "(0, 1)"))


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
    known_at, label_end = _label_start_and_end(labels)
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


def purged_kfold(labels: pd.DataFrame, folds: int, embargo: int) -> list[Fold]:
    """(train, test) for each of `folds` contiguous test blocks: int64 positions into the rows of `labels`.

    Twelve rows whose labels end two rows later, folds=3, embargo=1 (T tests, . is purged, e is embargoed):

        row      0  1  2  3  4  5  6  7  8  9 10 11
        fold 0   T  T  T  T  .  .  e  7  8  9 10 11
        fold 1   0  1  .  .  T  T  T  T  .  .  e 11
        fold 2   0  1  2  3  4  5  .  .  T  T  T  T

    Raises SettingsError when a fold would keep no training row.
    """
    _check_split_count(folds, "folds", 2, len(labels), "use folds=5")
    _check_split_count(embargo, "embargo", 0, 10**9, "use the length of the model's input window")
    known_at, label_end = _label_start_and_end(labels)
    rows, pairs = np.arange(len(labels)), []
    for test in np.array_split(rows, folds):
        pairs.append((purge_training_rows(known_at, label_end, np.delete(rows, test), test, embargo), test))
    return _with_training_rows(pairs, len(labels), f"{folds} folds, embargo of {embargo} rows")


def walk_forward_expanding(labels: pd.DataFrame, folds: int) -> list[Fold]:
    """Return (train, test) for each of `folds` test blocks, trained on all earlier rows: int64 positions.

    The rows are divided into folds + 1 blocks; the first is only trained on. Twelve rows whose labels end two rows
    later, folds=3 (T tests, . is purged):

        row      0  1  2  3  4  5  6  7  8  9 10 11
        fold 0   0  .  .  T  T  T
        fold 1   0  1  2  3  .  .  T  T  T
        fold 2   0  1  2  3  4  5  6  .  .  T  T  T

    Raises SettingsError when a fold would keep no training row.
    """
    _check_split_count(folds, "folds", 1, max(len(labels) - 1, 1), "use folds=5")
    known_at, label_end = _label_start_and_end(labels)
    pairs = []
    for test in np.array_split(np.arange(len(labels)), folds + 1)[1:]:
        train = purge_training_rows(known_at, label_end, np.arange(test[0]), test, 0) if len(test) else test
        pairs.append((train, test))
    return _with_training_rows(pairs, len(labels), f"{folds} folds that walk forward")


def walk_forward_rolling(labels: pd.DataFrame, folds: int, window: int | None = None) -> list[Fold]:
    """Return (train, test) as `walk_forward_expanding`, trained on the last `window` of its rows only.

    Twelve rows whose labels end two rows later, folds=3, window=3 (T tests, . is purged, < is older than the window):

        row      0  1  2  3  4  5  6  7  8  9 10 11
        fold 0   0  .  .  T  T  T
        fold 1   <  1  2  3  .  .  T  T  T
        fold 2   <  <  <  <  4  5  6  .  .  T  T  T

    window : rows; default: as many as the first fold has, so that every fold trains on equally many

    Raises SettingsError as `walk_forward_expanding`.
    """
    pairs = walk_forward_expanding(labels, folds)
    window = len(pairs[0][0]) if window is None else window
    _check_split_count(window, "window", 1, len(labels), "leave window out for that of the first fold")
    return [(train[-window:], test) for train, test in pairs]


@dataclass(frozen=True)
class CombinatorialFolds(Sequence):
    """Folds of a combinatorial cross-validation; item s is (train, test) of fold s, int64 positions, made on demand.

    edges : int64[N + 1], block g is rows edges[g]..edges[g + 1] - 1
    tested : int64[folds, k], the test blocks of each fold, in time order
    left_out : for each block, the positions outside it that purging and embargo remove
    """

    edges: np.ndarray
    tested: np.ndarray
    left_out: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.tested)

    def __getitem__(self, fold: int) -> tuple[np.ndarray, np.ndarray]:
        tested, kept = self.tested[fold], np.ones(self.edges[-1], bool)
        for g in tested:
            kept[self.block(g)] = False
            kept[self.left_out[g]] = False
        return np.flatnonzero(kept), np.concatenate([self.block(g) for g in tested])

    def block(self, g: int) -> np.ndarray:
        """Return the rows of block g, int64."""
        return np.arange(self.edges[g], self.edges[g + 1])

    @property
    def paths(self) -> np.ndarray:
        """The fold whose forecast of each block a path takes, int64[phi, N]; phi = k/N * C(N, k) (AFML 12.4).

        Path p takes, of each block, the p-th fold that tests it: every forecast is in exactly one path.
        """
        judging = [np.flatnonzero((self.tested == g).any(axis=1)) for g in range(len(self.edges) - 1)]
        return np.stack(judging, axis=1)


def combinatorial_purged_folds(labels: pd.DataFrame, blocks: int, test_blocks: int, embargo: int) -> CombinatorialFolds:
    """Return the folds of every choice of `test_blocks` of `blocks` contiguous blocks as the test: C(N, k) folds.

    The rule of `splits` holds for every test block of a fold. Twelve rows whose labels end one row later,
    blocks=3, test_blocks=2, embargo=1 (T tests, . is purged, e is embargoed), and whose forecast each path takes:

        row      0  1  2  3  4  5  6  7  8  9 10 11
        fold 0   T  T  T  T  T  T  T  T  .  e 10 11
        fold 1   T  T  T  T  .  e  6  .  T  T  T  T
        fold 2   0  1  2  .  T  T  T  T  T  T  T  T
        path 0   0  0  0  0  0  0  0  0  1  1  1  1
        path 1   1  1  1  1  2  2  2  2  2  2  2  2

    Raises SettingsError when a fold would keep no training row, or when there would be more than 1,000 folds.
    """
    _check_split_count(blocks, "blocks", 2, max(len(labels), 2), "use blocks=6")
    _check_split_count(test_blocks, "test_blocks", 1, blocks - 1, "use test_blocks=2")
    _check_split_count(embargo, "embargo", 0, 10**9, "use the length of the model's input window")
    if math.comb(blocks, test_blocks) > MOST_FOLDS:
        raise SettingsError(
            "There would be too many folds",
            where="blocks, test_blocks",
            got=f"{math.comb(blocks, test_blocks):,} ways to choose {test_blocks} of {blocks}",
            wanted=f"at most {MOST_FOLDS:,}, since each is a training",
            next_step="use blocks=6, test_blocks=2: 15 folds, 5 paths",
        )
    known_at, label_end = _label_start_and_end(labels)
    rows, left_out = np.arange(len(labels)), []
    parts = np.array_split(rows, blocks)
    for part in parts:
        outside = np.delete(rows, part)
        kept = purge_training_rows(known_at, label_end, outside, part, embargo)
        left_out.append(np.setdiff1d(outside, kept, assume_unique=True))
    edges = np.cumsum([0, *map(len, parts)])
    folds = CombinatorialFolds(edges, np.array(list(combinations(range(blocks), test_blocks))), tuple(left_out))
    return _with_training_rows(folds, len(labels), f"{test_blocks} of {blocks} blocks, embargo of {embargo} rows")


# ---- the rule --------------------------------------------------------------------------------------------------------


def purge_training_rows(
    known_at: np.ndarray, label_end: np.ndarray, rows: np.ndarray, block: np.ndarray, embargo: int
) -> np.ndarray:
    """Return the training rows that stay next to `block` by the rule of this module.

    known_at, label_end : int64[N] ns of all labelled rows
    rows, block : int64 positions into them; the block's rows are contiguous
    embargo : rows
    """
    # known_at increases, so "embargo places before it is known after T" is one position from which on rows stay.
    free = int(np.searchsorted(known_at, label_end[block].max(), side="right")) + embargo
    return rows[(label_end[rows] < known_at[block[0]]) | (rows >= free)]


def _label_start_and_end(labels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[N] ns: known_at and label_end of every row."""
    known_at = pd.DatetimeIndex(labels.index).as_unit("ns").asi8
    return known_at, pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8


def _check_split_count(value: object, where: str, least: int, most: int, next_step: str) -> None:
    """Raise SettingsError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise SettingsError(
            "The rows cannot be split like this",
            where=where,
            got=repr(value),
            wanted=f"a whole number from {least} to {most}",
            next_step=next_step,
        )


def _with_training_rows(folds: Folds, rows: int, how: str) -> Folds:
    """Return the folds; raise SettingsError for one whose training rows are all purged."""
    for number, (train, _) in enumerate(folds):
        if not len(train):
            raise SettingsError(
                f"Fold {number} keeps no training row",
                where=f"{rows} labelled rows",
                got=how,
                wanted="a block that leaves training rows",
                next_step="use fewer folds, a smaller embargo or more bars",
            )
    return folds
