"""Walk-forward folds: the docstrings' twelve rows, the rule row by row, and skfolio's arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skfolio.model_selection import WalkForward

from ml_factory.errors import SettingsError
from tests.contract.doors import walk_forward_expanding, walk_forward_rolling
from tests.contract.split_cases import TWELVE, any_labels, as_lists, drawn, fixed_horizon, may_stay, shown, times_of


def test_walk_forward_expanding_12_rows_equal_docstring_example():
    folds = walk_forward_expanding(TWELVE, 3)
    assert as_lists(folds) == [
        ([0], [3, 4, 5]),
        ([0, 1, 2, 3], [6, 7, 8]),
        ([0, 1, 2, 3, 4, 5, 6], [9, 10, 11]),
    ]
    assert as_lists(folds) == [shown(walk_forward_expanding.__doc__, number) for number in range(3)]


def test_walk_forward_rolling_12_rows_equal_docstring_example():
    folds = walk_forward_rolling(TWELVE, 3, window=3)
    assert as_lists(folds) == [([0], [3, 4, 5]), ([1, 2, 3], [6, 7, 8]), ([4, 5, 6], [9, 10, 11])]
    assert as_lists(folds) == [shown(walk_forward_rolling.__doc__, number) for number in range(3)]
    assert drawn(walk_forward_rolling.__doc__, "fold 2")[:4] == ["<"] * 4
    assert as_lists(walk_forward_rolling(TWELVE, 3)) == [([0], [3, 4, 5]), ([3], [6, 7, 8]), ([6], [9, 10, 11])]


@settings(max_examples=300, deadline=None)
@given(rows=any_labels(), folds=st.integers(1, 6), window=st.integers(1, 40))
def test_walk_forward_training_rows_equal_purging_rule(rows, folds, window):
    times, ends = times_of(rows)
    blocks = np.array_split(np.arange(len(rows)), folds + 1)[1:]
    wanted = [[r for r in range(block[0]) if may_stay(times, ends, r, block, 0)] for block in blocks]
    if not all(wanted):
        with pytest.raises(SettingsError, match="keeps no training row"):
            walk_forward_expanding(rows, folds)
        return
    blocks = [block.tolist() for block in blocks]
    assert as_lists(walk_forward_expanding(rows, folds)) == list(zip(wanted, blocks, strict=True))
    # A dropped row breaks the rule or is older than the `window` rows that keep it.
    recent = [kept[-window:] for kept in wanted]
    assert as_lists(walk_forward_rolling(rows, folds, min(window, len(rows)))) == list(zip(recent, blocks, strict=True))
    for train, test in walk_forward_expanding(rows, folds):
        assert ends[train].max() < times[test[0]] and train[-1] < test[0]


@pytest.mark.parametrize(("block", "horizon", "folds"), [(20, 7, 4), (9, 1, 3), (50, 12, 1)])
def test_walk_forward_folds_equal_skfolio(block, horizon, folds):
    """skfolio fixes the number of rows trained on and drops `purged_size` rows between; ours fixes the blocks.

    The same arrays where the first block is its train_size + purged_size and every block its test_size.
    """
    rows = fixed_horizon(block * (folds + 1), horizon)
    theirs = {"test_size": block, "train_size": block - horizon, "purged_size": horizon}
    rolling = as_lists(WalkForward(**theirs).split(rows))
    assert len(rolling) == folds and as_lists(walk_forward_rolling(rows, folds)) == rolling
    expanding = as_lists(WalkForward(**theirs, expand_train=True).split(rows))
    assert as_lists(walk_forward_expanding(rows, folds)) == expanding


def test_walk_forward_invalid_arguments_raise_settings_error():
    for folds in (0, 12, True, 2.0, "five"):
        with pytest.raises(SettingsError, match="folds"):
            walk_forward_expanding(TWELVE, folds)
    for window in (0, 13, 1.5):
        with pytest.raises(SettingsError, match="window"):
            walk_forward_rolling(TWELVE, 3, window)
    with pytest.raises(SettingsError, match="keeps no training row"):
        walk_forward_expanding(TWELVE, 5)
    with pytest.raises(SettingsError):
        walk_forward_expanding(TWELVE.iloc[:0], 1)
