"""Every window and recursion against the plain definition, wherever the block begins."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from ml_factory.features import rolling
from ml_factory.features.ewm import ewm_means
from ml_factory.features.rolling import HISTORY

RNG = np.random.default_rng(5)
COUNT = 700
SERIES = {
    "walk": 4000.0 + np.cumsum(RNG.normal(size=COUNT)),
    "ties": RNG.integers(0, 4, COUNT).astype(float),
    "dead": np.concatenate([np.full(290, 0.1), RNG.normal(size=60), np.full(350, 7.3)]),
    "late": np.concatenate([np.full(3, np.nan), RNG.normal(size=COUNT - 3)]),
}
OTHER = RNG.normal(size=COUNT)


def block(x, begin, stop):
    """(x as a kernel sees rows begin to stop, number of the first)."""
    padded = np.concatenate([np.full(HISTORY, np.nan), x])
    return padded[begin : stop + HISTORY].copy()


def each(kernel):
    """(x, n) -> values of all rows; `kernel` gets blocks of any length."""

    def run(x, n, cuts=(0, COUNT)):
        parts = [kernel(block(x, a, b), block(OTHER, a, b), n, a)[HISTORY:] for a, b in pairwise(cuts)]
        return np.concatenate(parts)

    return run


WEIGHTS = {n: np.arange(1.0, n + 1) for n in (4, 64)}
WINDOWS = {
    "sum": (lambda x, y, n, t0: rolling.rolling_sum(x, n, t0, HISTORY), lambda w, _: math.fsum(w)),
    "std": (lambda x, y, n, t0: rolling.rolling_std(x, n, t0, HISTORY), lambda w, _: np.std(w)),
    "covariance": (
        lambda x, y, n, t0: rolling.rolling_covariance(x, y, n, t0, HISTORY),
        lambda w, v: np.mean(w * v) - w.mean() * v.mean(),
    ),
    "correlation": (
        lambda x, y, n, t0: rolling.rolling_correlation(x, y, n, t0, HISTORY),
        lambda w, v: np.corrcoef(w, v)[0, 1] if np.ptp(w) and np.ptp(v) else 0.0,
    ),
    "max": (lambda x, y, n, t0: rolling.rolling_max(x, n, t0, HISTORY), lambda w, _: np.max(w)),
    "min": (lambda x, y, n, t0: rolling.rolling_min(x, n, t0, HISTORY), lambda w, _: np.min(w)),
    "argmax": (
        lambda x, y, n, t0: rolling.bars_since_rolling_max(x, n, t0, HISTORY),
        lambda w, _: len(w) - 1 - np.max(np.flatnonzero(w == w.max())),
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 7, 64, 250])
@pytest.mark.parametrize(("series", "name"), [*product(SERIES, WINDOWS)])
def test_rolling_window_kernels_equal_definition_for_any_block_cuts(series, name, n):
    x = SERIES[series]
    kernel, reference = WINDOWS[name]
    want = np.full(COUNT, np.nan)
    for i in range(n - 1, COUNT):
        window = x[i - n + 1 : i + 1]
        want[i] = np.nan if np.isnan(window).any() else reference(window, OTHER[i - n + 1 : i + 1])
    whole = each(kernel)(x, n)
    np.testing.assert_allclose(whole, want, rtol=1e-9, atol=2e-9)
    cuts = (0, 1, 2, 9, 100, 101, 300, 513, 699, COUNT)
    np.testing.assert_array_equal(each(kernel)(x, n, cuts), whole)


@pytest.mark.parametrize("n", [4, 64])
def test_weighted_sum_equals_definition(n):
    x, weights = SERIES["walk"], WEIGHTS[n]
    got = each(lambda x, _, n, t0: rolling.rolling_weighted_sum(x, WEIGHTS[n], HISTORY))(x, n)
    want = [weights @ x[i - n + 1 : i + 1][::-1] for i in range(n - 1, COUNT)]
    np.testing.assert_allclose(got[n - 1 :], want, rtol=1e-12)
    assert np.isnan(got[: n - 1]).all()


@pytest.mark.parametrize("name", ["std", "covariance"])
def test_rolling_std_and_covariance_of_constant_window_are_exactly_zero(name):
    assert set(each(WINDOWS[name][0])(np.full(COUNT, 0.1), 7)[6:].tolist()) == {0.0}


def test_window_correlation_is_bounded_and_zero_for_constant_series():
    x = block(SERIES["walk"], 0, COUNT)
    same = rolling.rolling_correlation(x, 3.0 * x, 20, 0, HISTORY)[HISTORY + 19 :]
    assert np.abs(same - 1.0).max() < 1e-9
    assert same.max() <= 1.0
    assert set(rolling.rolling_correlation(x, np.full(len(x), 2.0), 20, 0, HISTORY)[HISTORY + 19 :]) == {0.0}


@pytest.mark.parametrize("alpha", [2 / 11, 1 / 10])
@pytest.mark.parametrize("cuts", [(0, COUNT), (0, 1, 5, 11, 12, 13, 14, 100, 102, COUNT)])
def test_recursive_means_start_at_plain_mean_and_skip_nan(alpha, cuts):
    x = SERIES["late"].copy()
    x[100] = np.nan
    mean = x[3:13].mean()
    want = [np.nan] * 12 + [mean]
    for value in x[13:]:
        mean = mean if np.isnan(value) else (1 - alpha) * mean + alpha * value
        want.append(mean)
    state, got = np.zeros((2, 4)), []
    for begin, stop in pairwise(cuts):
        both = np.stack([block(x, begin, stop), block(OTHER, begin, stop)])
        ewm_means(both, np.array([10.0, 5.0]), np.array([alpha, 0.5]), state)
        got.append(both[:, HISTORY:])
    got = np.concatenate(got, axis=1)
    np.testing.assert_allclose(got[0], want, rtol=1e-12)
    assert got[1, 4] == pytest.approx(OTHER[:5].mean())


@pytest.mark.parametrize("count", [1, 2, 6, 7, 10, 13])
def test_recursive_means_bits_do_not_depend_on_other_series_or_blocks(count):
    """Alone, with others, wherever blocks begin, and beside a series that lacks a value."""
    x = np.random.default_rng(count).standard_normal((count, COUNT))
    n, alpha = np.arange(3.0, 3.0 + count), 1.0 / np.arange(2, 2 + count)

    def means(x_KN, n, alpha, cuts=(0, COUNT)) -> np.ndarray:
        state, got = np.zeros((len(x_KN), 4)), []
        for begin, stop in pairwise(cuts):
            part = np.stack([block(series, begin, stop) for series in x_KN])
            ewm_means(part, n, alpha, state)
            got.append(part[:, HISTORY:])
        return np.concatenate(got, axis=1)

    alone = np.concatenate([means(x[k : k + 1], n[k : k + 1], alpha[k : k + 1]) for k in range(count)])
    np.testing.assert_array_equal(means(x, n, alpha), alone)
    np.testing.assert_array_equal(means(x, n, alpha, (0, 1, 9, 30, 31, 400, COUNT)), alone)
    x[0, 200] = np.nan
    np.testing.assert_array_equal(means(x, n, alpha)[1:], alone[1:])
    assert np.isfinite(means(x, n, alpha)[0, 200:]).all()


def test_ratio_with_zero_denominator_returns_default():
    pairs = ((1.0, 2.0), (0.0, 0.0), (np.nan, 0.0), (3.0, 0.0), (3.0, np.nan))
    got = [rolling.safe_ratio(a, b, 0.25) for a, b in pairs]
    np.testing.assert_array_equal(got, [0.5, 0.25, np.nan, 0.25, np.nan])


def test_deviation_of_zeros_is_floor():
    assert rolling.rolling_return_std(np.zeros(HISTORY + 40), 10, 40, HISTORY)[-1] == rolling.FLOOR
