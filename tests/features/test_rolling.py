"""Every window and recursion against the plain definition, and against its own prefix."""

import math
from itertools import product

import numpy as np
import pytest

from ml_factory.features import rolling

RNG = np.random.default_rng(5)
SERIES = {
    "walk": 4000.0 + np.cumsum(RNG.normal(size=257)),
    "ties": RNG.integers(0, 4, 257).astype(float),
    "dead": np.concatenate([np.full(90, 0.1), RNG.normal(size=60), np.full(107, 7.3)]),
    "late": np.concatenate([np.full(3, np.nan), RNG.normal(size=254)]),
}
OTHER = RNG.normal(size=257)
WINDOWS = {
    "sum": (rolling.rolling_sum, lambda w, _: math.fsum(w)),
    "mean": (rolling.rolling_mean, lambda w, _: np.mean(w)),
    "std": (rolling.rolling_std, lambda w, _: np.std(w)),
    "rank": (rolling.rolling_rank, lambda w, _: np.mean((w < w[-1]) + 0.5 * (w == w[-1]))),
    "covariance": (
        lambda x, n: rolling.rolling_covariance(x, OTHER, n),
        lambda w, v: np.mean(w * v) - w.mean() * v.mean(),
    ),
    "deviation": (lambda x, n: rolling.rolling_absolute_deviation(x, n)[1], lambda w, _: np.mean(np.abs(w - w.mean()))),
    "distance": (lambda x, n: rolling.rolling_absolute_deviation(x, n)[0], lambda w, _: w[-1] - w.mean()),
    "weighted": (
        lambda x, n: rolling.weighted_sum(x, np.arange(1.0, n + 1)),
        lambda w, _: np.sum(w[::-1] * np.arange(1, len(w) + 1)),
    ),
    "max": (rolling.rolling_max, lambda w, _: np.max(w)),
    "min": (rolling.rolling_min, lambda w, _: np.min(w)),
    "argmax": (rolling.bars_since_max, lambda w, _: len(w) - 1 - np.max(np.flatnonzero(w == w.max()))),
}


@pytest.mark.parametrize("n", [1, 2, 7, 64, 257])
@pytest.mark.parametrize(
    ("series", "name"),
    [pair for pair in product(SERIES, WINDOWS) if pair not in {("late", "max"), ("late", "min"), ("late", "argmax")}],
)
def test_a_window_is_its_definition(series, name, n):
    x = SERIES[series]
    kernel, twin = WINDOWS[name]
    want = np.full(len(x), np.nan)
    for i in range(n - 1, len(x)):
        window, other = x[i - n + 1 : i + 1], OTHER[i - n + 1 : i + 1]
        want[i] = np.nan if np.isnan(window).any() else twin(window, other)
    got = kernel(x, n)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    for cut in (100, 128, 191, 256):
        np.testing.assert_array_equal(kernel(x[:cut].copy(), min(n, 90))[:cut], kernel(x, min(n, 90))[:cut])


@pytest.mark.parametrize("name", ["std", "covariance", "deviation", "distance"])
def test_a_dead_window_gives_exactly_zero(name):
    assert WINDOWS[name][0](np.full(50, 0.1), 7)[6:].tolist() == [0.0] * 44


def test_a_window_shorter_than_the_file_is_all_missing():
    for kernel, _ in WINDOWS.values():
        assert np.isnan(kernel(np.ones(3), 5) if kernel is not WINDOWS["covariance"][0] else np.full(3, np.nan)).all()


@pytest.mark.parametrize(("smooth", "alpha"), [(rolling.ema, 2 / 11), (rolling.wilder, 1 / 10)])
def test_recursive_means_start_at_a_plain_mean_and_survive_a_missing_value(smooth, alpha):
    x = SERIES["late"].copy()
    x[100] = np.nan
    mean = x[3:13].mean()
    want = [np.nan] * 12 + [mean]
    for value in x[13:]:
        mean = mean if np.isnan(value) else (1 - alpha) * mean + alpha * value
        want.append(mean)
    np.testing.assert_allclose(smooth(x, 10), want, rtol=1e-12)


def test_ratio_of_nothing_to_nothing_is_the_named_value_and_leaves_no_trace():
    a, b = np.array([1.0, 0.0, np.nan, 3.0, 3.0]), np.array([2.0, 0.0, 0.0, 0.0, np.nan])
    np.testing.assert_array_equal(rolling.ratio(a, b, empty=0.25), [0.5, 0.25, np.nan, 0.25, np.nan])


def test_lag_longer_than_the_file():
    np.testing.assert_array_equal(rolling.lag(np.arange(3.0), 2), [np.nan, np.nan, 0.0])
    assert np.isnan(rolling.lag(np.arange(3.0), 5)).all()


def test_sessions_restart_what_is_counted_since_the_open():
    session, x = np.array([4, 4, 4, 9, 9], np.int32), np.array([2.0, 5.0, 1.0, 3.0, 2.0])
    assert rolling.session_sum(x, session).tolist() == [2, 7, 8, 3, 5]
    assert rolling.session_max(x, session).tolist() == [2, 5, 5, 3, 3]
    assert rolling.session_first(x, session).tolist() == [2, 2, 2, 3, 3]


def test_functions_of_one_number():
    x = np.linspace(0.1, 3.0, 37)
    sine, cosine = rolling.circle(x)
    for got, plain in ((rolling.log(x), math.log), (rolling.erf(x), math.erf), (rolling.tanh(x), math.tanh)):
        assert got.tolist() == [plain(value) for value in x]
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * x), atol=1e-15)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * x), atol=1e-15)


def test_correlation_stays_in_bounds_and_is_zero_for_a_dead_side():
    x = SERIES["walk"]
    assert np.abs(rolling.rolling_correlation(x, 3.0 * x, 20)[19:] - 1.0).max() < 1e-9
    assert rolling.rolling_correlation(x, 3.0 * x, 20)[19:].max() <= 1.0
    assert set(rolling.rolling_correlation(x, np.full(len(x), 2.0), 20)[19:]) == {0.0}


def test_ranges_and_deviations_have_a_floor():
    still = np.full(40, 5000.0)
    assert rolling.average_true_range(still, still, still)[-1] == 5000.0 * rolling.FLOOR
    assert rolling.deviation(still, 10)[-1] == rolling.FLOOR
