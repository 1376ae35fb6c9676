"""The join on `known_at` as a person would do it with two lists of bars."""

import numpy as np
import pytest

from ml_factory.data.resample import resample_bars
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.features.engine import compute_family_columns
from ml_factory.features.momentum import FAMILY
from ml_factory.features.multi_timeframe import timeframe_column_name, timeframe_staleness

MINUTE_NS = 60_000_000_000


@pytest.mark.parametrize("minutes", [15, 60])
def test_multi_timeframe_row_uses_latest_complete_coarse_bar(real_bars, markets, minutes):
    bars, market = real_bars("XAUUSD")
    matrix = build_features(bars, market, FeatureSpec(frames=(minutes,), families=("momentum",)), dtype="float64")
    coarse = resample_bars(bars, market, minutes)
    column = compute_family_columns(FAMILY, coarse, market, True)["rsi_14"]
    got = matrix.values[:, matrix.names.index(timeframe_column_name("rsi_14", minutes))]
    for row in np.random.default_rng(0).integers(0, len(matrix), 300):
        complete = [k for k in range(len(coarse)) if coarse.known_at[k] <= matrix.known_at[row]]
        assert got[row] == column[complete[-1]]


def test_staleness_counts_minutes_since_known_at_of_joined_bar():
    base = np.array([60, 65, 70, 120]) * MINUTE_NS
    coarse = np.array([0, 60, 120]) * MINUTE_NS
    ages = timeframe_staleness(base, coarse, np.array([1, 1, 1, 2]))
    assert ages == {"mean": 3.75, "median": 2.5, "p99": pytest.approx(9.85), "max": 10.0}
    assert np.isnan(timeframe_staleness(base[:0], coarse, np.array([], int))["max"])


def test_frame_staleness_of_24h_market_has_expected_medians(real_bars):
    """24-hour days have no break, so the oldest hour in sight is 55 minutes old at a 5-minute row."""
    from ml_factory.data.sessions import MarketSpec

    bars, _ = real_bars("XAUUSD")
    day = bars[~((bars.index.day_of_week == 5) | (bars.index.hour.isin([21, 22, 23])))]
    matrix = build_features(day, MarketSpec("X", "24h", None, True), FeatureSpec(families=("regime",)))
    assert {name: ages["median"] for name, ages in matrix.frame_staleness.items()} == {"15m": 5, "30m": 15, "60m": 30}


def test_column_at_names_frames_in_minutes_hours_and_days():
    names = [timeframe_column_name("rsi_14", minutes) for minutes in (1, 5, 10, 15, 20, 25, 30, 45, 60, 240, 1440)]
    wanted = ("1m", "5m", "10m", "15m", "20m", "25m", "30m", "45m", "60m", "4h", "1d")
    assert names == [f"rsi_14@{frame}" for frame in wanted]


@pytest.mark.parametrize("count", [1, 2, 101, 70_001])
def test_staleness_of_random_rows_equals_numpy_statistics(count):
    random = np.random.default_rng(count)
    coarse = np.sort(random.choice(10 * count + 10, count + 1, replace=False)) * MINUTE_NS
    rows = np.sort(random.integers(0, count + 1, count))
    base = coarse[rows] + random.integers(0, 500, count) * MINUTE_NS
    age = (base - coarse[rows]) / MINUTE_NS
    want = {"mean": age.mean(), "median": np.median(age), "p99": np.quantile(age, 0.99), "max": age.max()}
    assert timeframe_staleness(base, coarse, rows) == pytest.approx(want, rel=1e-12)
