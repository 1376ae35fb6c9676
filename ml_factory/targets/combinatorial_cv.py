"""Combinatorial purged cross-validation: many paths through the same past, each row tested several times.

Source: Lopez de Prado, *Advances in Financial Machine Learning* (2018), chapter 12.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from ml_factory.errors import SettingsError
from ml_factory.targets.splits import (
    check_split_count,
    check_split_embargo,
    label_start_and_end,
    no_training_row_error,
    purge_keep_mask,
)

MOST_FOLDS = 1_000  # each is a training


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
        return np.flatnonzero(self._kept(fold)), np.concatenate([self.block(g) for g in self.tested[fold]])

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

    def _kept(self, fold: int) -> np.ndarray:
        kept = np.ones(self.edges[-1], bool)
        for g in self.tested[fold]:
            kept[self.edges[g] : self.edges[g + 1]] = False
            kept[self.left_out[g]] = False
        return kept


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
    check_split_count(blocks, "blocks", 2, max(len(labels), 2), "use blocks=6")
    check_split_count(test_blocks, "test_blocks", 1, blocks - 1, "use test_blocks=2")
    check_split_embargo(embargo, "embargo")
    if math.comb(blocks, test_blocks) > MOST_FOLDS:
        raise SettingsError(
            "There would be too many folds",
            where="blocks, test_blocks",
            got=f"{math.comb(blocks, test_blocks):,} ways to choose {test_blocks} of {blocks}",
            wanted=f"at most {MOST_FOLDS:,}, since each is a training",
            next_step="use blocks=6, test_blocks=2: 15 folds, 5 paths",
        )
    known_at, label_end = label_start_and_end(labels)
    rows, left_out = np.arange(len(labels)), []
    parts = np.array_split(rows, blocks)
    for part in parts:
        outside = np.delete(rows, part)
        left_out.append(outside[~purge_keep_mask(known_at, label_end, outside, part, embargo)])
    edges = np.cumsum([0, *map(len, parts)])
    folds = CombinatorialFolds(edges, np.array(list(combinations(range(blocks), test_blocks))), tuple(left_out))
    for number in range(len(folds)):
        if not folds._kept(number).any():
            raise no_training_row_error(
                number, len(labels), f"{test_blocks} of {blocks} blocks, embargo of {embargo} rows"
            )
    return folds
