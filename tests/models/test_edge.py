"""A fixed, small form of benchmarks/edge.py: the edge that was planted is found, and none where there is none."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks import edge
from benchmarks.edge import evaluated, rows_of
from ml_factory.evaluation.metrics import expected_calibration_error
from ml_factory.models.base import ModelFitResult
from ml_factory.models.registry import build_model

SMALL = {"lightgbm": {}, "lstm": {"epochs": 4}}


@pytest.fixture(scope="module", params=["planted", "null"])
def rows(request):
    return rows_of(request.param, seed=0, days=60)


@pytest.mark.soak
@pytest.mark.parametrize("name", SMALL)
def test_edge_benchmark_models_find_half_of_planted_edge_and_none_in_null(rows, name):
    found = evaluated(rows, build_model(name, threads=1, **SMALL[name]))
    if rows.market.spec.kind == "planted":
        assert found["oracle"] > 0.1 and 0.5 < found["share"] < 1, found
    else:
        assert found["errors"] < 2, found


def test_true_calibration_error_equals_ece_for_outcomes_and_0_for_truth():
    rng = np.random.default_rng(0)
    p, y = rng.dirichlet((2, 2, 2), 500), rng.integers(-1, 2, 500)
    assert edge.true_calibration_error(np.eye(3)[y + 1], p)[0] == pytest.approx(expected_calibration_error(y, p))
    assert edge.true_calibration_error(p, p) == (0.0, 0.0)
    noisy = np.clip(p + rng.normal(0, 0.15, (500, 1)) * (np.eye(3)[p.argmax(axis=1)] - 1 / 3), 0, 1)
    plain, debiased = edge.true_calibration_error(noisy, p)  # right on average: what is left is chance
    assert plain > 0.005 and debiased < plain
    moved = p - 0.1 * (np.eye(3)[p.argmax(axis=1)] - 1 / 3)
    # all bins are off by the same: no spread, so nothing is chance
    assert edge.true_calibration_error(moved, p) == pytest.approx((0.2 / 3, 0.2 / 3))


class Requested:
    """Notes which rows it is given for what, and forecasts a third."""

    name, lookback = "lightgbm", 1

    def __init__(self):
        self.forecast = []

    def fit(self, x, y, *, validation):
        self.learnt, self.held = (x, y), validation
        return ModelFitResult()

    def predict_proba(self, x):
        self.forecast.append(x)
        return np.full((len(x), 3), 1 / 3)


def test_edge_benchmark_evaluated_uses_test_rows_only_for_scoring(rows):
    """Learnt from training rows, stopped on validation rows, judged on the rest; labels of each end before the next."""
    model = Requested()
    facts = evaluated(rows, model)
    judging, *calibrating = model.forecast
    given = {"train": model.learnt, "validation": model.held, "test": (judging, None)}
    for name, (x, y) in given.items():
        expected = rows.take(model, name)
        np.testing.assert_array_equal(x, expected[0])
        assert y is None or np.array_equal(y, expected[1])
    assert facts["rows"] == len(judging)
    for x in calibrating:  # where the truth is known
        np.testing.assert_array_equal(x, model.held[0])
    labels = [rows.labels.iloc[rows.splits[name]] for name in ("train", "validation", "test")]
    for before, after in pairwise(labels):
        assert before["label_end"].max() <= after.index.min()
    shares = np.array([np.mean(rows.take(model, "train")[1] == side) for side in (-1, 0, 1)])
    y = rows.take(model, "test")[1]
    # Beside the shares of training rows: how much less their log loss is than that of a third each.
    assert facts["gain"] == pytest.approx(-np.log(shares)[y + 1].mean() - np.log(3), rel=0.01, abs=1e-4)
