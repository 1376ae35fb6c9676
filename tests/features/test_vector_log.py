"""The logarithm on vector registers against the library's, in units of the last place."""

import math

import numpy as np
import pytest

from ml_factory.features.vector_log import vectorized_log

RNG = np.random.default_rng(3)
RANGES = {
    "ratios near 1": np.exp(RNG.normal(0.0, 1e-3, 100_000)),
    "next to 1": 1.0 + np.arange(-5_000, 5_000) * 2.0**-52,
    "prices": RNG.uniform(1e-4, 1e5, 100_000),
    "every size": np.exp(RNG.uniform(-708.0, 709.0, 100_000)),
    "edges of the series": np.ldexp(math.sqrt(0.5) * (1.0 + RNG.normal(0, 1e-15, 2_000)), RNG.integers(-9, 9, 2_000)),
    "powers of 2": 2.0 ** np.arange(-1022, 1024),
}


def logs(x):
    out = np.empty(len(x))
    vectorized_log(np.ascontiguousarray(x), out)
    return out


@pytest.mark.parametrize("name", RANGES)
def test_logarithms_are_within_1_ulp_of_math_log(name):
    x = RANGES[name]
    got, library = logs(x), np.array([math.log(value) for value in x])
    unit = np.spacing(np.abs(library))
    assert np.all(np.abs(got - library) <= unit)
    truth = np.log(x.astype(np.longdouble))
    if np.finfo(np.longdouble).nmant > 52:
        assert np.all(np.abs(got - truth) <= 0.85 * unit)


def test_logarithms_of_zero_negative_nan_and_inf_equal_numpy():
    odd = np.array([0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 5e-324, 1e-310, 1.0])
    with np.errstate(all="ignore"):
        want = np.log(odd)
    np.testing.assert_allclose(logs(odd), want, rtol=3e-16)
    assert logs(np.ones(1))[0] == 0.0


def test_logarithms_of_slices_equal_slices_of_logarithms():
    x = RANGES["prices"][:1_000]
    whole = logs(x)
    for begin, stop in ((0, 1), (1, 2), (3, 20), (17, 1_000), (999, 1_000)):
        np.testing.assert_array_equal(logs(x[begin:stop]), whole[begin:stop])
