"""Temperature and biases against a plain search, reliability against scikit-learn."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.signal import lfilter
from sklearn.calibration import calibration_curve

from tests.contract import doors


def drawn(n: int, seed: int, sharpness: float = 1.0):
    """Labels drawn from true probabilities, and what a model that is too sure says."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    y = (doors.softmax(z).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1) - 1
    return y, doors.softmax(sharpness * z)


def moved(p, temperature: float, bias) -> np.ndarray:
    """What a model says whose calibration is the inverse of these."""
    return doors.softmax((np.log(p) - np.asarray(bias)) * temperature)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_calibration_fit_minimises_penalised_loss(seed, sharpness):
    y, p = drawn(500, seed, sharpness)
    rows = doors.independent_row_count(y, p)

    def loss(theta):
        q = p ** np.exp(-theta[0]) * np.exp(theta[1:])
        nll = -np.mean(np.log((q / q.sum(axis=1, keepdims=True))[np.arange(500), y + 1]))
        return rows * nll + 0.5 * (theta[0] / 0.5) ** 2 + 0.5 * ((theta[1:] / 0.2) ** 2).sum()

    best = minimize(loss, np.zeros(4), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000}).x
    fitted = doors.Calibration.fit(doors.floored_log_probabilities(p), y)
    assert fitted.temperature == pytest.approx(np.exp(best[0]), rel=1e-4)
    np.testing.assert_allclose(fitted.bias, best[1:], atol=1e-4)
    q = p ** (1 / fitted.temperature) * np.exp(fitted.bias)
    np.testing.assert_allclose(fitted.apply(p), q / q.sum(axis=1, keepdims=True), rtol=1e-10)


def test_calibration_fit_on_many_rows_recovers_temperature_and_biases():
    y, p = drawn(60_000, 3)
    fitted = doors.Calibration.fit(doors.floored_log_probabilities(moved(p, 2.5, (0.1, -0.4, 0.3))), y)
    assert fitted.temperature == pytest.approx(2.5, rel=0.03)
    np.testing.assert_allclose(fitted.bias, (0.1, -0.4, 0.3), atol=0.03)
    np.testing.assert_allclose(fitted.apply(p).sum(axis=1), 1, atol=1e-12)


def test_calibration_fit_on_few_or_repeated_rows_stays_near_identity():
    y, p = drawn(60_000, 3)
    printed = doors.floored_log_probabilities(moved(p, 1.0, (0.2, -0.4, 0.2)))
    biases = [abs(doors.Calibration.fit(printed[:n], y[:n]).bias[1]) for n in (30, 60_000)]
    repeated = doors.Calibration.fit(np.repeat(printed[:30], 40, axis=0), np.repeat(y[:30], 40), horizon=40)
    assert biases[0] < 0.2 < biases[1] and abs(repeated.bias[1]) < 0.2
    assert doors.Calibration.fit(printed[:3], y[:3], horizon=20).bias == pytest.approx((0, 0, 0), abs=0.02)


def test_independent_rows_with_repeated_outcomes_count_each_outcome_once():
    y, p = drawn(4000, 8)
    assert doors.independent_row_count(y, p) == pytest.approx(4000, rel=0.35)
    repeated = doors.independent_row_count(np.repeat(y, 10), np.repeat(p, 10, axis=0), horizon=10)
    assert repeated == pytest.approx(4000, rel=0.35)
    assert doors.independent_row_count(y[:5], p[:5], horizon=5) == 1.0  # too few to measure: overlap alone


def test_calibration_fit_of_uninformed_or_wrong_model_stays_within_bounds():
    _, p = drawn(3000, 5)
    wrong = (p.argmax(axis=1) + 1) % 3 - 1  # always the class after the favourite
    assert 3 < doors.Calibration.fit(doors.floored_log_probabilities(p), wrong).temperature <= doors.Calibration.HIGHEST
    assert (
        doors.Calibration.LOWEST
        <= doors.Calibration.fit(doors.floored_log_probabilities(p), p.argmax(axis=1) - 1).temperature
        < 0.5
    )
    flat = doors.Calibration.fit(np.log(np.full((9, 3), 1 / 3)), np.arange(9) % 3 - 1)
    assert flat.temperature == pytest.approx(1.0) and flat.bias == pytest.approx((0, 0, 0), abs=1e-9)


def test_calibration_invert_after_apply_returns_probabilities():
    _, p = drawn(500, 6, sharpness=2.0)
    for one in (
        doors.Calibration(),
        doors.Calibration(1.7),
        doors.Calibration(0.4, (0.5, -0.2, -0.3)),
        doors.Calibration(6.0, (-1.0, 0.6, 0.4)),
    ):
        np.testing.assert_allclose(one.invert(one.apply(p)), p, rtol=1e-9, atol=1e-12)


def test_calibration_fit_without_one_class_leaves_bias_of_class_at_zero():
    """Meta-labels have no short side: what is fitted is what two classes alone give."""
    y, p = drawn(4000, 9)
    y, p = y[y >= 0], p[y >= 0] * [0, 1, 1]
    p /= p.sum(axis=1, keepdims=True)
    fitted = doors.Calibration.fit(
        doors.floored_log_probabilities(moved(np.maximum(p, 1e-300), 2.0, (0, -0.3, 0.3)) * [0, 1, 1]), y
    )
    assert fitted.bias[0] == pytest.approx(0, abs=1e-6)
    assert fitted.temperature == pytest.approx(2.0, rel=0.1) and fitted.bias[2] == pytest.approx(0.3, abs=0.1)


def test_calibration_fit_with_zero_probabilities_stays_finite():
    p = np.array([[1.0, 0.0, 0.0], [0.3, 0.0, 0.7], [0.6, 0.0, 0.4], [0.0, 0.0, 1.0]])
    fitted = doors.Calibration.fit(doors.floored_log_probabilities(p), [-1, 1, 1, 1])
    assert np.isfinite(fitted.apply(p)).all()


def test_calibration_by_class_equals_hand_computed_values():
    p = np.array([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.6, 0.1, 0.3]])
    table = doors.calibration_by_class([0, 1, -1, -1], p)
    assert table["class"].tolist() == ["short", "neutral", "long"] and table["rows"].tolist() == [4, 4, 4]
    np.testing.assert_allclose(table["predicted"], [0.4, 0.3, 0.3])
    np.testing.assert_allclose(table["observed"], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(table["difference"], [-0.1, 0.05, 0.05])


def test_calibration_by_class_interval_covers_true_probabilities():
    inside = []
    for seed in range(40):
        table = doors.calibration_by_class(*drawn(800, seed))
        inside += ((table["low"] <= 0) & (table["high"] >= 0)).tolist()
    assert 0.9 <= np.mean(inside) < 1
    y, p = drawn(8000, 1)
    biased = doors.calibration_by_class(y, moved(p, 1, (0, 0.5, 0)))
    assert biased["high"][1] < 0 < biased["low"][0]


def slow(half_life: int, n: int, rng, columns: int = 1) -> np.ndarray:
    """Autoregressions of unit variance, (n, columns)."""
    phi = 0.5 ** (1 / half_life)
    noise = rng.normal(size=(n, columns)) * np.sqrt(1 - phi**2)
    noise[0] /= np.sqrt(1 - phi**2)
    return lfilter([1], [1, -phi], noise, axis=0)


def slow_forecasts(seed: int, n: int = 6000):
    """Labels whose class mix drifts (half-life 1,000 rows), and forecasts (200) that know nothing of it."""
    rng = np.random.default_rng(seed)
    mix = slow(1000, n, rng)[:, 0] / 2
    shares = doors.softmax(np.column_stack([-mix, np.zeros(n), mix]))
    y = (shares.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1) - 1
    return y, doors.softmax(slow(200, n, rng, 3) / 2)


def test_calibration_by_class_interval_widens_for_autocorrelated_forecasts():
    """Without `by_outcome_NK` 69 % of them miss, and 483 rows count: the noise of the outcomes hides the drift."""
    tables = [doors.calibration_by_class(*slow_forecasts(seed), horizon=20).iloc[2] for seed in range(60)]
    true = np.mean([one["difference"] for one in tables])
    assert np.mean([one["low"] > true or one["high"] < true for one in tables]) < 0.5
    rows = [doors.independent_row_count(*slow_forecasts(seed), horizon=20) for seed in range(10)]
    assert np.median(rows) < 200


def test_reliability_equals_scikit_learn_calibration_curve():
    y, p = drawn(2000, 6)
    table = doors.reliability_table(y, p)
    for k in (-1, 0, 1):
        happened, printed = calibration_curve(y == k, p[:, k + 1], n_bins=10, strategy="quantile")
        mine = table[table["class"] == k]
        np.testing.assert_allclose(mine["probability"], printed, rtol=1e-12)
        np.testing.assert_allclose(mine["frequency"], happened, rtol=1e-12)
        assert mine["rows"].sum() == 2000


def test_reliability_error_equals_hand_computed_value():
    p = np.array([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1]])
    table = doors.reliability_table([1, 0, -1, -1], p)
    high = table[(table["class"] == 1) & (table["probability"] > 0.5)].iloc[0]
    assert high["frequency"] == 0.5 and high["probability"] == pytest.approx(0.7) and high["rows"] == 2
    guarded = (1 + 2) / (2 + 4)  # Agresti-Coull
    assert high["error"] == pytest.approx(np.sqrt(guarded * (1 - guarded) / 6))


def test_reliability_with_overlapping_labels_has_larger_errors():
    y, p = drawn(2000, 7)
    assert (doors.reliability_table(y, p, horizon=20)["error"] > 3 * doors.reliability_table(y, p)["error"]).all()


def test_reliability_of_constant_forecast_has_one_bin():
    table = doors.reliability_table([1, 0, -1], np.tile([0.2, 0.3, 0.5], (3, 1)))
    assert table["frequency"].tolist() == pytest.approx([1 / 3] * 3)
