"""Splits against the rule itself, row by row, and against the twelve rows the docstrings print."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.errors import SettingsError
from tests.contract.doors import SplitSpec, chronological_split, purge_training_rows, purged_kfold
from tests.contract.split_cases import (
    TWELVE,
    any_labels,
    as_lists,
    drawn,
    fixed_horizon,
    labels,
    may_stay,
    shown,
    times_of,
)


def test_holdout_12_rows_equal_docstring_example():
    parts = chronological_split(TWELVE, SplitSpec(train=0.5, validation=0.25))
    assert {name: rows.tolist() for name, rows in parts.items()} == {
        "train": [0, 1, 2, 3],
        "validation": [6],
        "test": [9, 10, 11],
    }
    assert all(rows.dtype == np.int64 for rows in parts.values())
    assert drawn(chronological_split.__doc__, "train") == ["0", "1", "2", "3", ".", "."] + [""] * 6
    assert drawn(chronological_split.__doc__, "validation") == [""] * 6 + ["6", ".", "."] + [""] * 3
    assert drawn(chronological_split.__doc__, "test") == [""] * 9 + ["9", "10", "11"]


def test_purged_kfold_12_rows_equal_docstring_example():
    pairs = purged_kfold(TWELVE, folds=3, embargo=1)
    assert as_lists(pairs) == [
        ([7, 8, 9, 10, 11], [0, 1, 2, 3]),
        ([0, 1, 11], [4, 5, 6, 7]),
        ([0, 1, 2, 3, 4, 5], [8, 9, 10, 11]),
    ]
    assert as_lists(pairs) == [shown(purged_kfold.__doc__, number) for number in range(3)]


@settings(max_examples=300, deadline=None)
@given(rows=any_labels(), folds=st.integers(2, 6), embargo=st.integers(0, 8))
def test_purged_kfold_training_rows_equal_purging_rule(rows, folds, embargo):
    times, ends = times_of(rows)
    everything = np.arange(len(rows))
    blocks = np.array_split(everything, folds)
    wanted = [
        [r for r in everything if r not in block and may_stay(times, ends, r, block, embargo)] for block in blocks
    ]
    if not all(wanted):
        with pytest.raises(SettingsError, match="keeps no training row"):
            purged_kfold(rows, folds, embargo)
        return
    pairs = purged_kfold(rows, folds, embargo)
    assert np.concatenate([test for _, test in pairs]).tolist() == everything.tolist()
    for (train, test), block, allowed in zip(pairs, blocks, wanted, strict=True):
        assert test.tolist() == block.tolist() and train.tolist() == allowed
        # in plain terms: no training label lives while a test label does, nor does a window of `embargo` rows after it
        for row in train:
            assert ends[row] < times[test[0]] or times[max(row - embargo, 0)] > ends[test].max()


@settings(max_examples=300, deadline=None)
@given(rows=any_labels(), train=st.floats(0.2, 0.7), validation=st.floats(0.1, 0.29), embargo=st.integers(0, 8))
def test_holdout_rows_equal_purging_rule(rows, train, validation, embargo):
    times, ends = times_of(rows)
    first, second = int(len(rows) * train), int(len(rows) * (train + validation))
    blocks = [np.arange(first), np.arange(first, second), np.arange(second, len(rows))]
    wanted = {
        "train": [r for r in blocks[0] if len(blocks[1]) and ends[r] < times[first]],
        "validation": [r for r in blocks[1] if second < len(rows) and ends[r] < times[second]],
        "test": blocks[2].tolist(),
    }
    if not all(wanted.values()):
        with pytest.raises(SettingsError, match="row is left"):
            chronological_split(rows, SplitSpec(train, validation, embargo))
        return
    parts = chronological_split(rows, SplitSpec(train, validation, embargo))
    assert {name: part.tolist() for name, part in parts.items()} == wanted


def test_purge_drops_label_that_ends_at_first_test_row():
    """Strictly before: the bar in which the label ends is the bar the test row knows."""
    rows = labels([0, 1, 2, 3], [1, 2, 3, 4])
    times, ends = times_of(rows)
    assert purge_training_rows(times, ends, np.arange(2), np.array([2, 3]), 0).tolist() == [0]


def test_purge_uses_latest_label_end_of_test_block():
    rows = labels(range(8), [1, 2, 6, 4, 5, 6, 7, 8])
    times, ends = times_of(rows)
    assert purge_training_rows(times, ends, np.array([0, 4, 5, 6, 7]), np.array([2, 3]), 0).tolist() == [0, 7]


def test_purged_kfold_embargo_of_lookback_keeps_windows_after_test_labels():
    """With embargo = lookback, the bars of every later training window begin after the block's labels ended."""
    rng = np.random.default_rng(0)
    known_at = np.cumsum(rng.integers(5, 20, 300))
    rows = labels(known_at, known_at + rng.integers(1, 100, 300))
    lookback = 16
    for train, test in purged_kfold(rows, 5, lookback):
        latest = rows["label_end"].iloc[test].max()
        for row in train[train > test[-1]]:
            first_bar_of_window = row - lookback + 1
            begins = rows.index[first_bar_of_window - 1]  # a bar begins no earlier than the one before is known
            assert begins > latest


def test_purged_kfold_fixed_horizon_drops_horizon_before_and_embargo_after():
    """Labels of a fixed horizon of h rows: h rows go before the block, h + embargo after it."""
    n, horizon, embargo = 100, 7, 5
    rows = fixed_horizon(n, horizon)
    for train, test in purged_kfold(rows, 4, embargo):
        wanted = np.ones(n, bool)
        wanted[max(test[0] - horizon, 0) : test[-1] + 1 + horizon + embargo] = False
        assert train.tolist() == np.flatnonzero(wanted).tolist()


def test_splits_of_too_few_rows_raise_settings_error():
    with pytest.raises(SettingsError, match="row is left"):
        chronological_split(TWELVE.iloc[:2], SplitSpec())
    with pytest.raises(SettingsError, match="row is left"):
        chronological_split(TWELVE.iloc[:0], SplitSpec())
    for folds in (1, 13, "five", True, 2.0):
        with pytest.raises(SettingsError, match="folds"):
            purged_kfold(TWELVE, folds, 0)
    with pytest.raises(SettingsError, match="embargo"):
        purged_kfold(TWELVE, 3, -1)
