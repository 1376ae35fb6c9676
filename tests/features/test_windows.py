"""Every window against the plain definition, and the same bits wherever the array begins."""

import math

import numpy as np
import pytest

from ml_factory.features import windows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a ratio of nothing to nothing is replaced
RNG = np.random.default_rng(5)
COUNT = 400
SERIES = {
    "walk": 4000.0 + np.cumsum(RNG.normal(size=COUNT)),
    "ties": RNG.integers(0, 4, COUNT).astype(float),
    "dead": np.concatenate([np.full(150, 0.1), RNG.normal(size=60), np.full(190, 7.3)]),
    "late": np.concatenate([np.full(3, np.nan), RNG.normal(size=COUNT - 3)]),
}
OTHER = RNG.normal(size=COUNT)
WEIGHTS = RNG.normal(size=40)
CASES = {
    "sum": (lambda x, y, n: windows.window_sum(x, n), lambda w, _: math.fsum(w)),
    "mean": (lambda x, y, n: windows.window_mean(x, n), lambda w, _: np.mean(w)),
    "weighted": (
        lambda x, y, n: windows.window_weighted_sum(x, WEIGHTS[:n]), lambda w, _: math.fsum(WEIGHTS[: len(w)] * w[::-1])
    ),
    "std": (lambda x, y, n: windows.window_std(x, n), lambda w, _: np.std(w)),
    "third": (lambda x, y, n: windows.window_moment(x, n, 3), lambda w, _: np.mean((w - w.mean()) ** 3)),
    "fourth": (lambda x, y, n: windows.window_moment(x, n, 4), lambda w, _: np.mean((w - w.mean()) ** 4)),
    "covariance": (lambda x, y, n: windows.window_covariances(x, y, n)[0], lambda w, v: np.cov(w, v, ddof=0)[0, 1]),
    "correlation": (
        windows.window_correlation, lambda w, v: np.corrcoef(w, v)[0, 1] if np.ptp(w) and np.ptp(v) else 0.0
    ),
    "max": (lambda x, y, n: windows.window_max(x, n), lambda w, _: np.max(w)),
    "min": (lambda x, y, n: windows.window_min(x, n), lambda w, _: np.min(w)),
    "since max": (
        lambda x, y, n: windows.window_bars_since_max(x, n), lambda w, _: len(w) - 1 - np.flatnonzero(w == w.max())[-1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("name", CASES)
def test_window_equals_definition_and_same_bits_from_any_begin(name, series):
    window, definition = CASES[name]
    x = SERIES[series]
    for n in (2, 7, 40):
        found = window(x, OTHER, n)
        missing = n - 1 + np.isnan(x).sum()
        assert np.isnan(found[:missing]).all() and np.isfinite(found[missing:]).all()
        wanted = [definition(x[i - n + 1 : i + 1], OTHER[i - n + 1 : i + 1]) for i in range(missing, COUNT)]
        scale = np.ptp(x[missing:]) ** {"third": 3, "fourth": 4}.get(name, 1)
        np.testing.assert_allclose(found[missing:], wanted, rtol=1e-9, atol=1e-12 * max(scale, 1.0))
        for begin in (1, 90, COUNT - n):
            later = window(x[begin:].copy(), OTHER[begin:].copy(), n)
            np.testing.assert_array_equal(later[n - 1 :], found[begin + n - 1 :])


def test_windows_of_equal_values_are_exact():
    x = np.full(60, 0.1)
    assert set(windows.window_mean(x, 20)[19:]) == {0.1}
    assert set(windows.window_std(x, 20)[19:]) == set(windows.window_correlation(x, OTHER[:60], 20)[19:]) == {0.0}


def test_exponential_mean_starts_at_mean_skips_missing_and_continues_from_state():
    x = np.array([np.nan, 1.0, 3.0, np.nan, 6.0, 7.0])
    whole = windows.exponential_mean(x, 0, 2.0, 0.5, np.zeros(2))
    np.testing.assert_array_equal(whole, [np.nan, np.nan, 2.0, 2.0, 4.0, 5.5])
    state = np.zeros(2)
    parts = [windows.exponential_mean(x[:4], 0, 2.0, 0.5, state), windows.exponential_mean(x, 4, 2.0, 0.5, state)[4:]]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_ratio_and_balance_of_nothing_are_neutral_and_missing_stays_missing():
    a, b = np.array([1.0, 0.0, 2.0, np.nan, 1.0]), np.array([2.0, 0.0, 0.0, 0.0, np.nan])
    np.testing.assert_array_equal(windows.ratio(a, b, 0.5), [0.5, 0.5, 0.5, np.nan, np.nan])
    np.testing.assert_array_equal(windows.balance(a, b), [-1 / 3, 0.0, 1.0, np.nan, np.nan])
    np.testing.assert_array_equal(windows.lag(a, 2), [np.nan, np.nan, 1.0, 0.0, 2.0])
