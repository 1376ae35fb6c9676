"""Temperature against a plain search, reliability against scikit-learn."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.calibration import calibration_curve

from ml_factory.errors import SettingsError
from ml_factory.evaluation.calibration import Temperature, log_probabilities, reliability, softmax


def drawn(n: int, seed: int, sharpness: float = 1.0):
    """Labels drawn from true probabilities, and what a model that is too sure says."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    y = (softmax(z).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1) - 1
    return y, softmax(sharpness * z)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_least_loss_is_found(seed, sharpness):
    y, p = drawn(500, seed, sharpness)
    w = np.random.default_rng(seed).uniform(0, 2, 500)

    def loss(log_t):
        q = p ** (1 / np.exp(log_t))
        q /= q.sum(axis=1, keepdims=True)
        return -np.average(np.log(q[np.arange(500), y + 1]), weights=w)

    best = minimize_scalar(loss, bounds=(np.log(0.2), np.log(20)), method="bounded", options={"xatol": 1e-10})
    fitted = Temperature.fit(log_probabilities(p), y, w)
    assert fitted.temperature == pytest.approx(np.exp(best.x), rel=1e-5)
    q = p ** (1 / fitted.temperature)
    np.testing.assert_allclose(fitted.apply(p), q / q.sum(axis=1, keepdims=True), rtol=1e-10)


def test_the_true_temperature_is_recovered():
    y, p = drawn(60_000, 3, sharpness=2.5)
    fitted = Temperature.fit(log_probabilities(p), y)
    assert fitted.temperature == pytest.approx(2.5, rel=0.03)
    calibrated = fitted.apply(p)
    assert (calibrated.argmax(axis=1) == p.argmax(axis=1)).all()
    np.testing.assert_allclose(calibrated.sum(axis=1), 1, atol=1e-12)


def test_only_the_given_rows_count():
    y, p = drawn(400, 4, sharpness=2.0)
    w = np.r_[np.ones(200), np.zeros(200)]
    first = Temperature.fit(log_probabilities(p[:200]), y[:200])
    assert Temperature.fit(log_probabilities(p), y, w).temperature == pytest.approx(first.temperature, rel=1e-9)


def test_bounds_and_the_uninformed():
    y, p = drawn(300, 5)
    assert Temperature.fit(log_probabilities(p), -y).temperature <= Temperature.HIGHEST
    wrong = (p.argmax(axis=1) + 1) % 3 - 1  # always the class after the favourite
    assert Temperature.fit(log_probabilities(p), wrong).temperature == Temperature.HIGHEST
    assert Temperature.fit(log_probabilities(p), p.argmax(axis=1) - 1).temperature == Temperature.LOWEST
    assert Temperature.fit(np.log(np.full((9, 3), 1 / 3)), np.arange(9) % 3 - 1).temperature == 1.0


def test_a_missing_class_and_zero_probabilities_pass():
    p = np.array([[1.0, 0.0, 0.0], [0.3, 0.0, 0.7], [0.6, 0.0, 0.4], [0.0, 0.0, 1.0]])
    fitted = Temperature.fit(log_probabilities(p), [-1, 1, 1, 1])
    assert np.isfinite(fitted.apply(p)).all()


def test_it_survives_json_and_refuses_nonsense():
    fitted = Temperature(1.37)
    assert Temperature.from_dict(fitted.to_dict()) == fitted
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="temperature"):
            Temperature(bad)


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_reliability_is_scikit_learns(strategy):
    y, p = drawn(2000, 6)
    table = reliability(y, p, 8, strategy=strategy)
    for k in (-1, 0, 1):
        happened, said = calibration_curve(y == k, p[:, k + 1], n_bins=8, strategy=strategy)
        mine = table[table["class"] == k]
        np.testing.assert_allclose(mine["probability"], said, rtol=1e-12)
        np.testing.assert_allclose(mine["frequency"], happened, rtol=1e-12)
        assert mine["rows"].sum() == 2000


def test_reliability_by_hand_with_weights():
    p = np.array([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1]])
    table = reliability([1, 0, -1, -1], p, 2, w=[3.0, 1.0, 1.0, 0.0], strategy="uniform")
    long = table[table["class"] == 1].set_index("low")
    assert long.loc[0.5, "frequency"] == 0.75 and long.loc[0.5, "probability"] == pytest.approx(0.7)
    assert long.loc[0.0, "rows"] == 1
    # Kish: (3 + 1)² / (3² + 1²) = 1.6 rows; Agresti-Coull: (1.2 + 2) / 5.6.
    guarded = 3.2 / 5.6
    assert long.loc[0.5, "error"] == pytest.approx(np.sqrt(guarded * (1 - guarded) / 5.6))


def test_overlapping_labels_witness_less():
    y, p = drawn(2000, 7)
    assert (reliability(y, p, horizon=20)["error"] > 3 * reliability(y, p)["error"]).all()


def test_a_constant_forecast_is_one_bin():
    table = reliability([1, 0, -1], np.tile([0.2, 0.3, 0.5], (3, 1)))
    assert table["frequency"].tolist() == pytest.approx([1 / 3] * 3)
