"""XGBoost models as arrays: the booster made of them is the library's own to the bit."""

import numpy as np
import pytest
import xgboost as xgb

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
