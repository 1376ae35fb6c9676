"""XGBoost models as arrays: the booster made of them is the library's own to the bit, and damage is refused."""

import numpy as np
import pytest
import xgboost as xgb

from ml_factory.errors import CheckpointError
from ml_factory.models.xgboost_trees import merge_xgboost_trees, xgboost_booster_from_trees, xgboost_tree_arrays

FEATURES = 5


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, FEATURES)).astype(np.float32)
    x[generator.random(x.shape) < 0.1] = np.nan
    return x, np.where(np.nan_to_num(x[:, 0]) > 1, 2, generator.integers(0, 3, 400))


def trained(rows, rounds: int = 4, **params) -> xgb.Booster:
    x, y = rows
    given = {"objective": "multi:softprob", "num_class": 3, "verbosity": 0, "nthread": 1, "max_depth": 4, **params}
    return xgb.train(given, xgb.DMatrix(x, y), rounds)


@pytest.mark.parametrize("params", [{}, {"base_score": 0.5}, {"max_depth": 1}, {"min_child_weight": 1e6}], ids=str)
def test_booster_of_trees_of_booster_predicts_and_explains_equal_to_the_bit(rows, params):
    x, own = rows[0], trained(rows, **params)
    rebuilt = xgboost_booster_from_trees(xgboost_tree_arrays(own), FEATURES, 1)
    for asked in ({}, {"output_margin": True}, {"pred_contribs": True}, {"pred_leaf": True}):
        np.testing.assert_array_equal(rebuilt.predict(xgb.DMatrix(x), **asked), own.predict(xgb.DMatrix(x), **asked))
    np.testing.assert_array_equal(rebuilt.inplace_predict(x), own.inplace_predict(x))
    assert rebuilt.get_score(importance_type="total_gain") == own.get_score(importance_type="total_gain")
    for name, array in xgboost_tree_arrays(rebuilt).items():
        np.testing.assert_array_equal(array, xgboost_tree_arrays(own)[name], err_msg=name)


def test_merge_trees_keeps_the_first_rounds_of_all_blocks(rows):
    one, other = xgboost_tree_arrays(trained(rows, 3)), xgboost_tree_arrays(trained(rows, 2, seed=1, subsample=0.5))
    merged = merge_xgboost_trees([one, other], 4)
    assert len(merged["nodes"]) == 12 and len(merged["left_children"]) == merged["nodes"].sum()
    np.testing.assert_array_equal(merged["nodes"], np.concatenate([one["nodes"], other["nodes"][:3]]))
    margin = xgboost_booster_from_trees(merged, FEATURES, 1).predict(xgb.DMatrix(rows[0]), output_margin=True)
    assert margin.shape == (400, 3) and np.isfinite(margin).all()


def changed(trees: dict, **values) -> dict:
    """Return a copy of the trees in which `name=(index, value)` was written."""
    copy = {name: array.copy() for name, array in trees.items()}
    for name, (index, value) in values.items():
        copy[name][index] = value
    return copy


DAMAGE = {
    "root as its own child": lambda trees: changed(trees, left_children=(0, 0)),
    "child in another tree": lambda trees: changed(trees, left_children=(0, int(trees["nodes"][0]))),
    "negative child": lambda trees: changed(trees, left_children=(0, -7)),
    "one child": lambda trees: changed(trees, right_children=(0, -1)),
    "two parents": lambda trees: changed(trees, left_children=(0, int(trees["right_children"][0]))),
    "column beyond the last": lambda trees: changed(trees, split_indices=(0, FEATURES)),
    "negative column": lambda trees: changed(trees, split_indices=(0, -1)),
    "side of missing values": lambda trees: changed(trees, default_left=(0, 7)),
    "empty tree": lambda trees: changed(trees, nodes=(0, 0)),
    "sizes": lambda trees: changed(trees, nodes=(0, 10**6)),
    "base score": lambda trees: changed(trees, base_score=(0, np.nan)),
    "no array": lambda trees: {**trees, "left_children": [0, 1]},
    "another type": lambda trees: {**trees, "split_conditions": trees["split_conditions"].astype(np.float64)},
    "two trees": lambda trees: {**trees, "nodes": trees["nodes"][:2]},
    "an array less": lambda trees: {name: array for name, array in trees.items() if name != "sum_hessian"},
    "text": lambda trees: "binf",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_booster_of_damaged_trees_raises(rows, damage):
    with pytest.raises(CheckpointError, match="damaged or not one of ours"):
        xgboost_booster_from_trees(DAMAGE[damage](xgboost_tree_arrays(trained(rows))), FEATURES, 1)


def test_booster_of_chain_deeper_than_recursion_allows_raises():
    count = 4001  # a chain: every left child is a leaf
    left, right = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    left[0:-1:2], right[0:-1:2] = np.arange(1, count, 2), np.arange(2, count, 2)
    chain = {name: np.zeros(3 * count, np.float32) for name in ("split_conditions", "base_weights", "loss_changes")}
    chain |= {"left_children": np.tile(left, 3), "right_children": np.tile(right, 3)}
    chain |= {"split_indices": np.zeros(3 * count, np.int32), "default_left": np.zeros(3 * count, np.uint8)}
    chain |= {"sum_hessian": np.ones(3 * count, np.float32), "nodes": np.full(3, count, np.int32)}
    with pytest.raises(CheckpointError, match="damaged"):
        xgboost_booster_from_trees({**chain, "base_score": np.zeros(3, np.float32)}, FEATURES, 1)


@pytest.mark.parametrize("seed", range(4))
def test_booster_of_trees_with_random_changes_raises_or_predicts(rows, seed):
    generator, trees, refused = np.random.default_rng(seed), xgboost_tree_arrays(trained(rows)), 0
    for _ in range(60):
        name = generator.choice(sorted(trees))
        copy = {key: array.copy() for key, array in trees.items()}
        raw = copy[name].view(np.uint8)
        raw[generator.integers(len(raw), size=3)] = generator.integers(256, size=3)
        try:
            booster = xgboost_booster_from_trees(copy, FEATURES, 1)
        except CheckpointError:
            refused += 1
            continue
        assert booster.inplace_predict(rows[0]).shape == (400, 3)
        booster.predict(xgb.DMatrix(rows[0]), pred_contribs=True)
    assert 10 < refused < 60


def test_model_in_the_librarys_own_bytes_is_named_as_older():
    with pytest.raises(CheckpointError, match="earlier version of ml_factory"):
        xgboost_booster_from_trees(b"binf", FEATURES, 1)
