"""Metrics against scikit-learn, hand-worked numbers and brute force."""

import numpy as np
import pytest
from sklearn import metrics as sk

from ml_factory.errors import FactoryError
from tests.contract import doors

LABELS = [-1, 0, 1]


def sample(n: int, seed: int, classes=LABELS):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([1.5, 1.0, 2.0], n).round(2)  # rounded: ties in the scores
    p[:, 1] = 1 - p[:, 0] - p[:, 2]
    return rng.choice(classes, n), np.clip(p, 0, 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_classification_metrics_equal_scikit_learn(seed):
    y, p = sample(400, seed)
    got = dict(doors.classification_metrics(y, p))
    guess = p.argmax(axis=1) - 1
    assert got["log_loss"] == pytest.approx(sk.log_loss(y, p, labels=LABELS), rel=1e-12)
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(y, guess), rel=1e-12)
    squares = sum(np.mean((p[:, k + 1] - (y == k)) ** 2) for k in LABELS)
    assert got["brier"] == pytest.approx(squares, rel=1e-12)


def test_classification_metrics_of_single_class_equal_hand_computed_values():
    got = dict(doors.classification_metrics(np.zeros(5, int), np.tile([0.2, 0.5, 0.3], (5, 1))))
    assert got["accuracy"] == 1 and got["log_loss"] == pytest.approx(np.log(2))
    assert got["brier"] == pytest.approx(0.04 + 0.25 + 0.09)


def test_expected_calibration_error_separates_two_highest_bins():
    p = np.array([[0.95, 0.05, 0.0], [0.9, 0.1, 0.0]])  # of 15 bins the last and the one before
    assert doors.expected_calibration_error([0, -1], p) == pytest.approx((0.95 + 0.1) / 2)


def test_classification_metrics_ece_equals_hand_computed_values():
    # Two rows say 0.6 of class long, one of them is right: |0.5 - 0.6|. Two say 0.8 and are right: |1 - 0.8|.
    p = np.array([[0.2, 0.2, 0.6], [0.2, 0.2, 0.6], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
    got = dict(doors.classification_metrics([1, 0, -1, 1], p))
    assert got["ece"] == pytest.approx(0.5 * 0.1 + 0.5 * 0.2)

    # 0.6 is the upper edge of a bin of width 1/15: it and 0.61 are judged apart.
    edge = np.array([[0.2, 0.2, 0.6], [0.19, 0.2, 0.61]])
    assert dict(doors.classification_metrics([1, 0], edge))["ece"] == pytest.approx(0.5 * 0.4 + 0.5 * 0.61)


def test_row_log_loss_of_zero_probability_is_36_nats():
    assert doors.row_log_loss([1], [[1.0, 0.0, 0.0]])[0] == pytest.approx(36.04, abs=0.01)


@pytest.mark.parametrize(
    ("y", "p", "words"),
    [
        ([2], [[0.2, 0.3, 0.5]], "Unknown label"),
        ([1, 0], [[0.2, 0.3, 0.5]], "differ in shape"),
        ([1], [[0.2, 0.3, np.nan]], "hold no probabilities"),
        ([1], [[0.2, 0.3, 0.6]], "sum to 1"),
        ([], np.empty((0, 3)), "No rows to evaluate"),
    ],
)
def test_classification_metrics_invalid_input_raises_error(y, p, words):
    with pytest.raises(FactoryError, match=words):
        dict(doors.classification_metrics(y, p))


# ---- the table -------------------------------------------------------------------------------------------------


def test_metrics_table_gain_is_log_loss_difference_to_prior():
    rng = np.random.default_rng(3)
    p = rng.dirichlet([2, 2, 2], 3000)
    y = (p.cumsum(axis=1) < rng.random((3000, 1))).sum(axis=1) - 1
    table = doors.compute_forecast_metrics(
        {"model": p, "prior": doors.prior_baseline_probabilities(y, None, 3000)}, y, horizon=5
    )
    assert list(table.index) == ["model", "prior"]
    difference = table.loc["prior", "log_loss"] - table.loc["model", "log_loss"]
    assert table.loc["model", "log_loss_gain"] == pytest.approx(difference)
    assert table.loc["model", "gain_low"] > 0.1 and table.loc["prior", "log_loss_gain"] == 0
    assert table.loc["model", "rows"] == table.loc["model", "effective_rows"] == 3000


def test_row_log_loss_equals_touch_loss_plus_direction_loss():
    p = np.array([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])
    side = doors.direction_loss_by_class(p)[np.arange(3), [2, 1, 0]]
    np.testing.assert_allclose(side, [-np.log(0.3 / 0.5), 0.0, -np.log(0.6 / 0.9)], rtol=1e-12)
    touch = -np.log([0.5, 0.5, 0.9])
    np.testing.assert_allclose(doors.row_log_loss([1, 0, -1], p), touch + side, rtol=1e-12)


def test_metrics_table_forecast_of_hour_only_has_zero_direction_gain():
    rng = np.random.default_rng(3)
    busy = np.arange(4000) % 2 == 0
    y = np.where(rng.random(4000) < np.where(busy, 0.9, 0.2), rng.choice([-1, 1], 4000), 0)
    hour = np.where(busy[:, None], [0.45, 0.1, 0.45], [0.1, 0.8, 0.1])
    seer = np.where(np.arange(3) == (y + 1)[:, None], 0.8, 0.1)
    flat = np.tile([np.mean(y != 0) / 2, np.mean(y == 0), np.mean(y != 0) / 2], (4000, 1))
    table = doors.compute_forecast_metrics({"hour": hour, "seer": seer, "prior": flat}, y)
    assert table.loc["hour", "gain_low"] > 0.2 and abs(table.loc["hour", "direction_gain"]) < 1e-12
    assert table.loc["seer", "direction_low"] > 0.2


def test_loss_by_class_at_observed_class_equals_row_loss():
    rng = np.random.default_rng(5)
    p, y = rng.dirichlet([2, 2, 2], 50), rng.integers(-1, 2, 50)
    rows = np.arange(50)
    np.testing.assert_array_equal(doors.negative_log_probabilities(p)[rows, y + 1], doors.row_log_loss(y, p))
    by_hand = -np.log(np.array([0.2 / 0.8, 1.0, 0.6 / 0.8]))
    np.testing.assert_allclose(doors.direction_loss_by_class(np.array([[0.2, 0.2, 0.6]])), [by_hand], atol=1e-15)
