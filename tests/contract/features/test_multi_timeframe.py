"""The join on `known_at` as a person would do it with two lists of bars."""

import numpy as np
import pytest

from ml_factory.data.synthetic import synthetic_bars
from tests.contract.doors import (
    FAMILIES,
    FeatureSpec,
    MarketSpec,
    build_features,
    compute_family_columns,
    resample_bars,
    timeframe_name,
)

momentum = FAMILIES["momentum"]


@pytest.mark.parametrize("minutes", [15, 60])
def test_multi_timeframe_row_uses_latest_complete_coarse_bar(real_bars, markets, minutes):
    bars, market = real_bars("XAUUSD")
    matrix = build_features(bars, market, FeatureSpec(frames=(minutes,), families=("momentum",)), dtype="float64")
    coarse = resample_bars(bars, market, minutes)
    column = compute_family_columns(momentum, coarse, market, True)["rsi_14"]
    got = matrix.values[:, matrix.names.index(f"rsi_14@{minutes}m")]
    for row in np.random.default_rng(0).integers(0, len(matrix), 300):
        complete = [k for k in range(len(coarse)) if coarse.known_at[k] <= matrix.known_at[row]]
        assert got[row] == column[complete[-1]]


def test_frame_staleness_without_a_break_is_below_the_frame_length():
    bars = synthetic_bars(days=9, calendar="24h", start="2024-03-05", missing=0.0)
    matrix = build_features(bars, MarketSpec("X", "24h", None, True), FeatureSpec(families=("regime",)))
    assert {name: ages["max"] for name, ages in matrix.frame_staleness.items()} == {"15m": 10, "30m": 25, "60m": 55}
    assert matrix.frame_staleness["60m"]["mean"] == pytest.approx(27.5, abs=0.2)


def test_timeframe_names_are_minutes_hours_and_days():
    assert [timeframe_name(minutes) for minutes in (5, 15, 60, 240, 1440)] == ["5m", "15m", "60m", "4h", "1d"]
