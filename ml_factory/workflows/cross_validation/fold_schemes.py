"""Cross-validation schemes, and the plan of a cross-validation: training, test and left-out rows of each fold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_fold_scheme
from ml_factory.ensemble.out_of_fold import Fold
from ml_factory.targets.splits import (
    CombinatorialFolds,
    combinatorial_purged_folds,
    purged_kfold,
    walk_forward_expanding,
    walk_forward_rolling,
)
from ml_factory.targets.weights import effective_sample_size
from ml_factory.workflows.prepared_dataset import PreparedDataset, limit_training_rows


@dataclass(frozen=True)
class FoldSchemeSpec:
    """Settings of a cross-validation scheme.

    name : one of `argument_checks.SCHEMES`.
    folds : number of test blocks; of "combinatorial" the blocks to choose from.
    test_blocks : of "combinatorial", number of test blocks per fold.
    window : of "walk_forward_rolling", number of training rows; None: as many as the first fold has.
    """

    name: str = "purged_kfold"
    folds: int = 5
    test_blocks: int = 2
    window: int | None = None

    def __post_init__(self):
        check_fold_scheme(self.name)

    def cut(self, labels: pd.DataFrame, embargo: int) -> Sequence[Fold]:
        """Return (train, test) positions into `labels` of each fold. Raises SettingsError when the rows cannot be cut
        like this.
        """
        if self.name == "purged_kfold":
            return purged_kfold(labels, self.folds, embargo)
        if self.name == "walk_forward_expanding":
            return walk_forward_expanding(labels, self.folds)
        if self.name == "walk_forward_rolling":
            return walk_forward_rolling(labels, self.folds, self.window)
        return combinatorial_purged_folds(labels, self.folds, self.test_blocks, embargo)

    def to_dict(self) -> dict:
        """Return the settings that determine the folds, for the run's record."""
        own = {"walk_forward_rolling": {"window": self.window}, "combinatorial": {"test_blocks": self.test_blocks}}
        return {"scheme": self.name, "folds": self.folds} | own.get(self.name, {})


@dataclass(frozen=True)
class FoldPlan:
    """Rows, folds and test blocks of a cross-validation.

    rows : int64 positions into the labels' rows.
    labels : the labels of these rows.
    folds : (train, test) positions into `rows`, purged and embargoed.
    usable : bool, rows with a full input window.
    block : int64, test block of each row, -1 for none.
    paths : int64 (paths, blocks), the fold whose forecast of each block a path takes; None where each row is tested
        once.
    quick_limits : limits of QUICK.
    embargo : rows left out behind a test block.
    """

    rows: np.ndarray
    labels: pd.DataFrame
    folds: Sequence[Fold]
    usable: np.ndarray
    block: np.ndarray
    paths: np.ndarray | None
    quick_limits: dict
    embargo: int

    def table(self) -> pd.DataFrame:
        """Return per fold the number of training, test and left-out rows (purged, embargoed, without a window, or by
        QUICK).

        effective_train, effective_test : number of non-overlapping rows with the same information.
        """
        return pd.DataFrame(
            [
                {
                    "fold": number,
                    "train": len(train),
                    "test": len(test),
                    "left_out": len(self.rows) - len(train) - len(test),
                    "effective_train": effective_sample_size(self.labels.iloc[train]),
                    "effective_test": effective_sample_size(self.labels.iloc[test]),
                }
                for number, (train, test) in enumerate(self.folds)
            ]
        )


def plan_folds(
    data: PreparedDataset, rows: np.ndarray, folds: int | FoldSchemeSpec, lookback: int, limit: int = 0
) -> FoldPlan:
    """Cut `rows` into folds; the embargo is at least the model's input window.

    folds : number of purged folds, or the whole scheme.
    limit : most training rows of all folds together, which QUICK sets; 0 for none.
    """
    scheme = folds if isinstance(folds, FoldSchemeSpec) else FoldSchemeSpec(folds=folds)
    labels, embargo = data.labels.iloc[rows], _embargo_of(data, lookback)
    cut = scheme.cut(labels, embargo)
    block, paths = np.full(len(rows), -1), None
    if isinstance(cut, CombinatorialFolds):
        block, paths = np.repeat(np.arange(len(cut.edges) - 1), np.diff(cut.edges)), cut.paths
    else:
        for number, (_, test) in enumerate(cut):
            block[test] = number
    quick_limits = {}
    if limit:
        kept = [(*limit_training_rows(train, max(1, limit // len(cut))), test) for train, test in cut]
        limits = [limit["training rows"] for _, limit, _ in kept if limit]
        quick_limits = {"rows of a fold": limits[-1]} if limits else {}
        cut = [(train, test) for train, _, test in kept]
    return FoldPlan(rows, labels, cut, data.full_window_mask(lookback)[rows], block, paths, quick_limits, embargo)


def _embargo_of(data: PreparedDataset, lookback: int) -> int:
    """Return the rows left out behind a test block: as set, and at least the model's input window."""
    return max(int(data.settings["data"]["splits"]["embargo_bars"]), lookback)
