"""Walk-forward folds: trained on the past, tested on the following block.

The rule of `splits` without training rows after a block: a training row stays only if its `label_end` is before the
block's first `known_at`, and no embargo is needed.
"""

import numpy as np
import pandas as pd

from ml_factory.targets.splits import check_split_count, label_start_and_end, no_training_row_error, purge_training_rows

Fold = tuple[np.ndarray, np.ndarray]


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
    check_split_count(folds, "folds", 1, max(len(labels) - 1, 1), "use folds=5")
    known_at, label_end = label_start_and_end(labels)
    pairs = []
    for number, test in enumerate(np.array_split(np.arange(len(labels)), folds + 1)[1:]):
        train = purge_training_rows(known_at, label_end, np.arange(test[0]), test, 0) if len(test) else test
        if not len(train):
            raise no_training_row_error(number, len(labels), f"{folds} folds that walk forward")
        pairs.append((train, test))
    return pairs


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
    check_split_count(window, "window", 1, len(labels), "leave window out for that of the first fold")
    return [(train[-window:], test) for train, test in pairs]
