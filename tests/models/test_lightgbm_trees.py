"""The compiled walk through LightGBM's trees against the library, to the bit."""

import lightgbm as lgb
import numpy as np
import pytest

from ml_factory.models import lightgbm_trees
from ml_factory.models.lightgbm_trees import SHARE, LightGBMModelText, compile_lightgbm_trees

PLAIN = {"objective": "multiclass", "num_class": 3, "num_threads": 1, "verbosity": -1, "min_data_in_leaf": 3}


def rows(n: int = 700, seed: int = 0, missing: bool = True):
    """Features on many scales, with zeros, ties, values smaller than LightGBM's zero, and missing ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 7)).astype(np.float32) * np.float32(10.0) ** rng.integers(-3, 4, 7).astype(np.float32)
    x[:, 2] = np.round(rng.normal(size=n))
    x[rng.random(x.shape) < 0.1] = 0
    x[rng.random(x.shape) < 0.03] = np.float32(1e-36)
    x[rng.random(x.shape) < 0.03] = -np.float32(1e-35)
    if missing:
        x[rng.random(x.shape) < 0.1] = np.nan
    y = np.digitize(np.nan_to_num(x[:, 3] * np.sign(x[:, 2])) + rng.normal(size=n), [-0.5, 0.5])
    return x, y


def trained(x, y, rounds: int = 12, **params) -> lgb.Booster:
    return lgb.train({**PLAIN, **params}, lgb.Dataset(x, y, params={"verbosity": -1}), rounds)


def compiled(booster: lgb.Booster):
    return compile_lightgbm_trees(LightGBMModelText.split(booster.model_to_string()).trees, classes=3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "params",
    [
        {"max_depth": 5},
        {"num_leaves": 63},  # deep on one side
        {"max_depth": 1},
        {"use_missing": False},
        {"extra_trees": True, "num_leaves": 40},
        {"min_data_in_leaf": 400},  # no split: single leaves
    ],
    ids=lambda params: next(iter(params)),
)
def test_compiled_trees_scores_equal_lightgbm_bitwise(params, seed):
    x, y = rows(seed=seed, missing=seed != 3)
    booster = trained(x, y, **params)
    asked, _ = rows(500, seed + 100)  # with missing values also where none were seen in training
    score = np.zeros((len(asked), 3))
    compiled(booster).add_leaf_values(score, asked)
    np.testing.assert_array_equal(score, booster.predict(asked, raw_score=True))
    np.testing.assert_allclose(compiled(booster).probabilities(asked), booster.predict(asked), rtol=1e-12)


def test_compiled_trees_rows_at_split_thresholds_equal_lightgbm():
    """The thresholds themselves, and the float32 on either side of each."""
    x, y = rows()
    booster = trained(x, y, max_depth=4)
    text = LightGBMModelText.split(booster.model_to_string()).trees
    thresholds = np.array(
        [
            float(t)
            for tree in text
            for line in tree.splitlines()
            if line.startswith("threshold=")
            for t in line[10:].split()
        ]
    )
    near = thresholds.astype(np.float32)
    near = near[np.isfinite(near)]  # the last may be no bound at all, and infinite features are refused
    near = np.concatenate([near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))])
    asked = np.random.default_rng(1).choice(near, size=(2_000, 7))
    score = np.zeros((len(asked), 3))
    compiled(booster).add_leaf_values(score, asked)
    np.testing.assert_array_equal(score, booster.predict(asked, raw_score=True))


def test_compiled_trees_added_in_blocks_equal_whole_model():
    x, y = rows()
    booster = trained(x, y)
    trees = LightGBMModelText.split(booster.model_to_string()).trees
    parts, whole = np.zeros((len(x), 3)), np.zeros((len(x), 3))
    for first in range(0, len(trees), 6):
        compile_lightgbm_trees(trees[first : first + 6], classes=3).add_leaf_values(parts, x)
    compile_lightgbm_trees(trees, classes=3).add_leaf_values(whole, x)
    np.testing.assert_array_equal(parts, whole)


def test_compiled_trees_two_threads_equal_one_thread():
    x, y = rows()
    trees = compiled(trained(x, y))
    many = np.tile(x, (2 * SHARE // len(x) + 1, 1))
    np.testing.assert_array_equal(trees.probabilities(many, threads=2), trees.probabilities(many, threads=1))


TREE = {
    "num_cat": "0", "split_feature": "0 1", "threshold": "0.5 0.25", "decision_type": "2 2", "left_child": "1 -1",
    "right_child": "-3 -2", "leaf_value": "0.1 0.2 0.3",
}  # fmt: skip


def test_compile_trees_of_small_tree_adds_its_leaves():
    score, x = np.zeros((4, 1)), np.float32([[0, 0], [0, 1], [1, 0], [1, 1]])
    compile_lightgbm_trees(
        ["Tree=0\n" + "\n".join(f"{name}={value}" for name, value in TREE.items())], classes=1
    ).add_leaf_values(score, x)
    np.testing.assert_array_equal(score[:, 0], [0.1, 0.2, 0.3, 0.3])


def test_model_text_split_and_join_round_trips():
    x, y = rows()
    text = trained(x, y).model_to_string()
    assert LightGBMModelText.split(text).join() == text
    parts = LightGBMModelText.split(text)
    less = lgb.Booster(model_str=LightGBMModelText(parts.head, parts.trees[3:], parts.tail).join())
    whole = lgb.Booster(model_str=text)
    np.testing.assert_allclose(
        less.predict(x, raw_score=True), whole.predict(x, raw_score=True, start_iteration=1), rtol=1e-12
    )


@pytest.mark.parametrize("largest", [0, 1, 2])
def test_softmax_of_large_score_of_any_class_does_not_overflow(largest):
    score = np.zeros((1, 3))
    score[0, largest] = 1000.0
    lightgbm_trees._softmax(score)
    assert score[0].tolist() == [float(k == largest) for k in range(3)]
