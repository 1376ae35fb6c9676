"""Combinatorial folds: the docstring's twelve rows, the rule beside every block, skfolio's arrays and paths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skfolio.model_selection import CombinatorialPurgedCV

from ml_factory.errors import SettingsError
from tests.contract.doors import combinatorial_purged_folds, purged_kfold
from tests.contract.split_cases import any_labels, as_lists, drawn, fixed_horizon, may_stay, shown, times_of


def test_combinatorial_purged_12_rows_equal_docstring_example():
    folds = combinatorial_purged_folds(fixed_horizon(12, 1), blocks=3, test_blocks=2, embargo=1)
    assert as_lists(folds) == [
        ([10, 11], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([6], [0, 1, 2, 3, 8, 9, 10, 11]),
        ([0, 1, 2], [4, 5, 6, 7, 8, 9, 10, 11]),
    ]
    assert folds.paths.tolist() == [[0, 0, 1], [1, 2, 2]]
    picture = combinatorial_purged_folds.__doc__
    assert as_lists(folds) == [shown(picture, number) for number in range(3)]
    taken = [[int(cell) for cell in drawn(picture, f"path {path}")] for path in range(2)]
    assert taken == np.repeat(folds.paths, 4, axis=1).tolist()


@settings(max_examples=300, deadline=None)
@given(rows=any_labels(), blocks=st.integers(2, 6), share=st.integers(1, 5), embargo=st.integers(0, 6))
def test_combinatorial_purged_training_rows_equal_purging_rule(rows, blocks, share, embargo):
    times, ends = times_of(rows)
    test_blocks = min(share, blocks - 1)
    parts = np.array_split(np.arange(len(rows)), blocks)
    try:
        folds = combinatorial_purged_folds(rows, blocks, test_blocks, embargo)
    except SettingsError as error:
        assert "keeps no training row" in str(error)
        return
    assert len(folds) == math.comb(blocks, test_blocks) == len({tuple(tested) for tested in folds.tested})
    for (train, test), tested in zip(folds, folds.tested, strict=True):
        assert test.tolist() == np.concatenate([parts[g] for g in tested]).tolist()
        second = np.setdiff1d(np.arange(len(rows)), test)
        wanted = [r for r in second if all(may_stay(times, ends, r, parts[g], embargo) for g in tested)]
        assert train.tolist() == wanted
        # Neighbouring blocks are one block: taken together they drop the same rows.
        runs = np.split(test, np.flatnonzero(np.diff(test) > 1) + 1)
        assert wanted == [r for r in second if all(may_stay(times, ends, r, run, embargo) for run in runs)]


def test_combinatorial_purged_fold_without_training_rows_raises_settings_error():
    rows = fixed_horizon(12, 2)
    times, ends = times_of(rows)
    parts = np.array_split(np.arange(12), 4)
    assert not any(may_stay(times, ends, r, parts[0], 1) and may_stay(times, ends, r, parts[2], 1) for r in parts[1])
    with pytest.raises(SettingsError, match="Fold 1 keeps no training row"):
        combinatorial_purged_folds(rows, 4, 2, 1)


@pytest.mark.parametrize(("blocks", "test_blocks"), [(3, 2), (6, 2), (6, 3), (5, 4), (4, 1)])
def test_combinatorial_purged_paths_use_each_forecast_once(blocks, test_blocks):
    folds = combinatorial_purged_folds(fixed_horizon(240, 2), blocks, test_blocks, 1)
    paths = folds.paths
    assert paths.shape == (math.comb(blocks, test_blocks) * test_blocks // blocks, blocks)
    used = [(int(fold), g) for path in paths for g, fold in enumerate(path)]
    assert sorted(used) == sorted((fold, int(g)) for fold, tested in enumerate(folds.tested) for g in tested)


@pytest.mark.parametrize(
    ("n", "blocks", "test_blocks", "horizon", "embargo"),
    [(120, 6, 2, 7, 5), (120, 6, 3, 1, 0), (90, 3, 2, 0, 4), (200, 10, 8, 3, 3), (120, 5, 2, 10, 1)],
)
def test_combinatorial_purged_folds_and_paths_equal_skfolio(n, blocks, test_blocks, horizon, embargo):
    """A label of h rows is skfolio's purged_size=h.

    Its blocks are n // N rows and a longer last one; ours differ by a row at most: the same where N divides n.
    """
    theirs = CombinatorialPurgedCV(blocks, test_blocks, purged_size=horizon, embargo_size=embargo)
    rows = fixed_horizon(n, horizon)
    folds = combinatorial_purged_folds(rows, blocks, test_blocks, embargo)
    assert as_lists(folds) == [(train.tolist(), np.concatenate(tests).tolist()) for train, tests in theirs.split(rows)]
    assert folds.paths.T.tolist() == theirs.recombined_paths.tolist()
    ids = theirs.get_path_ids()  # [fold, nth block it judges] -> path
    for path, taken in enumerate(folds.paths):
        for g, fold in enumerate(taken):
            assert ids[fold, folds.tested[fold].tolist().index(g)] == path


def test_combinatorial_purged_one_test_block_equals_purged_kfold():
    rows = fixed_horizon(100, 3)
    assert as_lists(combinatorial_purged_folds(rows, 5, 1, 4)) == as_lists(purged_kfold(rows, 5, 4))


def test_combinatorial_purged_invalid_arguments_raise_settings_error():
    rows = fixed_horizon(40, 1)
    for blocks, test_blocks, embargo, where in [
        (1, 1, 0, "blocks"), (41, 2, 0, "blocks"), (4, 4, 0, "test_blocks"), (4, 0, 0, "test_blocks"),
        (4, 2, -1, "embargo"), (20, 10, 0, "184,756 ways"),
    ]:  # fmt: skip
        with pytest.raises(SettingsError, match=where):
            combinatorial_purged_folds(rows, blocks, test_blocks, embargo)
