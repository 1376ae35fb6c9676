"""Deciles of the forecast and the information coefficient: against scipy, by hand, and on simulated null series."""

import numpy as np
import pandas as pd
import pytest
from scipy.signal import lfilter
from scipy.stats import spearmanr

from tests.contract.doors import decile_returns, information_coefficient

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("ties", [False, True])
def test_information_coefficient_equals_scipy_spearman(ties):
    x, y = RNG.normal(size=700), RNG.normal(size=700)
    y = y + 0.3 * x
    x = x.round(1) if ties else x
    found = information_coefficient(x, y)
    assert found.mean == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert found.low < found.mean < found.high and found.rows == 700


def test_information_coefficient_of_overlapping_null_series_is_rarely_above_zero():
    """20-bar overlapping returns against a slow forecast: an interval for independent rows is far too short."""
    wrong = naive = 0
    for _ in range(200):
        walk = RNG.normal(size=1220)
        forecast = np.convolve(RNG.normal(size=1249), np.ones(50), "valid")[:1200]
        ret = np.convolve(walk, np.ones(20), "valid")[:1200]
        found = information_coefficient(forecast, ret, horizon=20)
        wrong += found.low > 0
        naive += found.mean > 1.96 / np.sqrt(1200)
    assert wrong <= 16 and naive > 40  # 2.5 % would be 5


def test_information_coefficient_interval_widens_for_autocorrelated_forecasts():
    """Forecast and return both drift (half-life 1,000 rows), apart: without `by_outcome_NK` 54 % miss 0."""
    wrong, phi = 0, 0.5**0.001
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = rng.normal(size=(6000, 2)) * np.sqrt(1 - phi**2)
        noise[0] /= np.sqrt(1 - phi**2)
        forecast, drift = lfilter([1], [1, -phi], noise, axis=0).T
        found = information_coefficient(forecast, drift / 2 + rng.normal(size=6000), horizon=20)
        wrong += found.low > 0 or found.high < 0
    assert wrong <= 35


def test_decile_returns_equal_hand_computed_values():
    forecast = RNG.permutation(1000) / 1000
    ret = np.where(forecast >= 0.9, 2e-4, np.where(forecast < 0.1, -1e-4, 0.0))
    ret[forecast == 0.5] = np.nan  # an ambiguous row
    times = pd.date_range("2024-01-02", periods=1000, freq="5min", tz="UTC")
    table, _ = decile_returns(forecast, ret, horizon=2, times_N=times)
    assert table.index.tolist() == list(range(1, 11)) and table["rows"].sum() == 999
    assert table.loc[10, "ret_bp"] == pytest.approx(2.0) and table.loc[1, "ret_bp"] == pytest.approx(-1, abs=0.02)
    assert table["forecast"].is_monotonic_increasing
    kept = np.isfinite(ret)
    wanted = pd.Series(forecast[kept]).groupby(pd.qcut(forecast[kept], 10, labels=range(1, 11)), observed=True).mean()
    np.testing.assert_allclose(table["forecast"], wanted, atol=2e-3)


@pytest.mark.parametrize(("forecast", "ret"), [(np.zeros(500), RNG.normal(size=500)), (RNG.random(99), RNG.random(99))])
def test_decile_returns_of_constant_forecast_or_few_rows_are_none(forecast, ret):
    assert decile_returns(forecast, ret) is None
