"""Windows put together from halves, against the plain definition, wherever the block begins."""

from itertools import pairwise

import numpy as np
import pytest

from ml_factory.features import rolling_std_slope
from ml_factory.features.rolling import FLOOR, HISTORY

RNG = np.random.default_rng(3)
COUNT = 400
SERIES = {
    "prices": 4000.0 + np.cumsum(RNG.normal(size=COUNT)),
    "returns": RNG.normal(0, 1e-4, COUNT),
    "dead": np.concatenate([np.full(150, 0.1), RNG.normal(size=50), np.full(200, 7.3)]),
}
CUTS = (0, 1, 2, 50, 51, 203, COUNT)


def by_blocks(kernel, x, cuts=CUTS):
    """Rows of all blocks; `kernel` gets x as a family sees it."""
    padded = np.concatenate([np.full(HISTORY, np.nan), x])
    return np.concatenate([kernel(padded[a : b + HISTORY].copy())[HISTORY:] for a, b in pairwise(cuts)])


def rolling(of, x, n):
    return np.array([np.nan] * (n - 1) + [of(x[i - n + 1 : i + 1]) for i in range(n - 1, len(x))])


def doubled(x, doublings):
    """(mean, sum of squares about it) of 3 * 2**doublings values."""
    n = 3
    first = HISTORY - 3 * (2**doublings - 1)
    mean, spread = rolling_std_slope.rolling_moments_of_three(x, first)
    for _ in range(doublings):
        first += n
        mean, spread = rolling_std_slope.double_rolling_moments(mean, spread, n, first)
        n *= 2
    return mean, spread


@pytest.mark.parametrize("doublings", [0, 1, 5])
@pytest.mark.parametrize("series", SERIES)
def test_doubled_moments_equal_rolling_definition(series, doublings):
    x, n = SERIES[series], 3 * 2**doublings
    for place, of in ((0, np.mean), (1, lambda w: np.sum((w - w.mean()) ** 2))):
        got = by_blocks(lambda block, place=place: doubled(block, doublings)[place], x)
        np.testing.assert_allclose(got, rolling(of, x, n), rtol=1e-10, atol=1e-22)
        np.testing.assert_array_equal(
            got, by_blocks(lambda block, place=place: doubled(block, doublings)[place], x, (0, COUNT))
        )


def test_doubled_moments_of_constant_window_are_exact():
    mean, spread = doubled(np.full(HISTORY + 100, 0.1), 5)
    assert set(mean[HISTORY:].tolist()) == {0.1}
    assert set(spread[HISTORY:].tolist()) == {0.0}
    assert set(rolling_std_slope.rolling_std_from_moments(spread, 96, HISTORY)[HISTORY:].tolist()) == {FLOOR}


@pytest.mark.parametrize("series", SERIES)
def test_deviation_48_and_line_24_equal_definition(series):
    x = SERIES[series]
    want = np.maximum(rolling(np.std, x, 48), FLOOR)
    np.testing.assert_allclose(
        by_blocks(lambda block: rolling_std_slope.rolling_std_48(block, HISTORY), x), want, rtol=1e-10
    )
    times = np.arange(24) - 11.5
    want = rolling(lambda w: times @ w, x, 24)
    got = by_blocks(lambda block: rolling_std_slope.rolling_slope_sums_24(block, HISTORY)[0], x)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12 * np.abs(x).max() * 144)
