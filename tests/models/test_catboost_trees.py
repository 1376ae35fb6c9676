"""CatBoost models as arrays: the model made of them predicts as the library's own to the bit."""

import signal

import catboost
import numpy as np
import pytest

from ml_factory.models.catboost_trees import catboost_model_from_trees, catboost_tree_arrays

FEATURES = 5


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, FEATURES)).astype(np.float32)
    x[:, 2] = 1.0  # a column without borders
    x[generator.random(x.shape) < 0.1] = np.nan
    x[:, 4] = np.nan_to_num(x[:, 4])
    return x, np.where(np.nan_to_num(x[:, 0]) > 1, 2, generator.integers(0, 3, 600))


def trained(rows, **params) -> catboost.CatBoost:
    given = {
        "classes_count": 3,
        "loss_function": "MultiClass",
        "iterations": 20,
        "depth": 4,
        "thread_count": 1,
        "allow_writing_files": False,
    }
    model = catboost.CatBoost({**given, "logging_level": "Silent", **params})
    return model.fit(catboost.Pool(*rows))


@pytest.mark.parametrize("params", [{}, {"depth": 1}, {"nan_mode": "Max"}, {"iterations": 1}], ids=str)
def test_model_of_trees_of_model_predicts_equal_to_the_bit(rows, params):
    own = trained(rows, **params)
    rebuilt = catboost_model_from_trees(catboost_tree_arrays(own), FEATURES)
    for kind in ("RawFormulaVal", "Probability"):
        np.testing.assert_array_equal(
            rebuilt.predict(rows[0], prediction_type=kind), own.predict(rows[0], prediction_type=kind)
        )
    shares = [model.get_feature_importance(type="PredictionValuesChange") for model in (rebuilt, own)]
    np.testing.assert_allclose(*shares, rtol=1e-12)
    for name, array in catboost_tree_arrays(rebuilt).items():
        np.testing.assert_array_equal(array, catboost_tree_arrays(own)[name], err_msg=name)


def test_trees_of_shrunk_model_are_its_first_rounds(rows):
    whole, shrunk = trained(rows), trained(rows)
    shrunk.shrink(7)
    rebuilt = catboost_model_from_trees(catboost_tree_arrays(shrunk), FEATURES)
    asked = {"prediction_type": "RawFormulaVal"}
    np.testing.assert_array_equal(rebuilt.predict(rows[0], **asked), whole.predict(rows[0], ntree_end=7, **asked))


def test_model_of_trees_of_model_that_never_saw_a_class_gives_it_no_probability(rows):
    x, y = rows
    own = trained((x, np.maximum(y, 1)))
    rebuilt = catboost_model_from_trees(catboost_tree_arrays(own), FEATURES)
    probability = rebuilt.predict(x, prediction_type="Probability")
    np.testing.assert_array_equal(probability, own.predict(x, prediction_type="Probability"))
    assert probability.shape == (600, 3) and not probability[:, 0].any()


KILLED = """
import os, signal, sys, tempfile
import numpy as np
tempfile.tempdir = sys.argv[1]
from ml_factory.models.registry import build_model
kill = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if sys.argv[2] == "kill" else (lambda *_: None)
x, y = np.random.default_rng(0).normal(size=(200, 3)).astype("f"), np.arange(200) % 3 - 1
build_model("catboost", rounds=10).fit(x, y, validation=(x, y), callbacks=[kill])
"""


def test_catboost_fit_removes_temporary_files_of_killed_fit(tmp_path, spawn):
    assert spawn(KILLED, tmp_path, "kill").wait() == -signal.SIGKILL
    (left,) = tmp_path.rglob("catboost-*")
    assert any(left.iterdir())
    assert spawn(KILLED, tmp_path, "end").wait() == 0
    assert not list(tmp_path.rglob("catboost-*"))
