"""The matrix as a whole: which columns, which rows, and that nothing comes from the future."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError
from tests.contract.doors import (
    FAMILIES,
    FeatureSpec,
    MarketSpec,
    balance,
    build_features,
    compute_family_columns,
    feature_column_names,
    frame_name,
    ratio,
    window_sum,
)

SYMBOLS = ("ES", "SPY", "XAUUSD")


@pytest.fixture(scope="module")
def whole(real_bars):
    """symbol -> the matrix of its whole file in float64."""
    kept = {}

    def of(symbol):
        if symbol not in kept:
            kept[symbol] = build_features(*real_bars(symbol), dtype="float64")
        return kept[symbol]

    return of


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_build_features_columns_are_finite_varying_and_as_declared(whole, markets, symbol):
    matrix = whole(symbol)
    assert matrix.names == feature_column_names(markets[symbol])
    assert len(set(matrix.names)) == len(matrix.names) == matrix.values.shape[1]
    assert np.isfinite(matrix.values).all()
    spread = matrix.values.std(axis=0)
    assert [name for name, alive in zip(matrix.names, spread > 0, strict=True) if not alive] == []
    assert (np.diff(matrix.known_at) > 0).all()
    assert matrix.close.tolist() == matrix.base.close[matrix.first :].tolist()
    for of_row in (matrix.segment, matrix.known_at):
        assert len(of_row) == len(matrix)


@pytest.mark.parametrize("symbol", ["NQ", "BTCUSD"])
def test_build_features_training_rows_of_long_files_have_distinct_columns(real_bars, symbol):
    bars, market = real_bars(symbol)
    matrix = build_features(bars, market, FeatureSpec(5, (15, 60)))
    train = matrix.values[: int(0.7 * len(matrix))]
    assert np.isfinite(train).all()
    rows = train[:: len(train) // 20_000].astype(np.float64)
    assert (rows.std(axis=0) > 0).all()
    pearson = np.abs(np.corrcoef(rows.T))
    spearman = np.abs(np.corrcoef(np.apply_along_axis(rankdata, 0, rows).T))
    references = np.argwhere(np.triu(np.minimum(pearson, spearman), 1) > 0.999)
    assert [(matrix.names[i], matrix.names[j]) for i, j in references] == []


def test_column_names_of_single_families_concatenate_to_all_columns():
    market = MarketSpec("MES", "cme", 0.25, True)
    everything = feature_column_names(market, FeatureSpec(frames=()))
    apart = [
        name for family in FAMILIES for name in feature_column_names(market, FeatureSpec(frames=(), families=(family,)))
    ]
    assert apart == everything


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_build_features_scaled_prices_and_volumes_keep_values(real_bars, whole, symbol):
    bars, market = real_bars(symbol)
    scales = dict.fromkeys(("open", "high", "low", "close"), 2.0**-7) | {"volume": 2.0**9}
    scaled = bars * [scales[name] for name in bars.columns]
    found, wanted = build_features(scaled, market, dtype="float64").values, whole(symbol).values
    # Logarithms of other levels are rounded elsewhere: nothing else may differ.
    assert (np.abs(found - wanted) / wanted.std(axis=0)).max() < 1e-6


def test_build_features_float32_equals_rounded_float64(real_bars, whole):
    stored = build_features(*real_bars("SPY"))
    assert stored.values.dtype == np.float32
    np.testing.assert_array_equal(stored.values, whole("SPY").values.astype(np.float32))
    frame = stored.to_frame()
    assert str(frame.index.dtype) == "datetime64[ns, UTC]"
    assert frame.index.name == "known_at"
    assert list(frame.columns) == stored.names


def doji(b):
    """A family of its own: small bodies."""
    small = abs(b.close - b.open) / b.atr
    yield "doji", small
    if not b.coarse:
        yield (
            "doji_share_12",
            window_sum(1.0 * (small < 0.1) + 0.0 * small, 12) / 12.0,
        )


def test_new_family_is_one_function_and_its_columns_join_the_matrix(real_bars, monkeypatch):
    monkeypatch.setitem(FAMILIES, "doji", doji)
    matrix = build_features(*real_bars("SPY"), FeatureSpec(frames=(15,), families=("momentum", "doji")))
    assert matrix.names[25:27] == ["doji", "doji_share_12"] and matrix.names[-1] == "doji@15m"
    share = matrix.values[:, 26]
    assert np.isfinite(matrix.values).all() and 0.0 == share.min() < share.max() <= 1.0


def hand_made(days=12, volume=1.0, price=100.0):
    """One-minute bars of regular New York hours from 4 March 2024 on; the clocks change on 10 March."""
    opens = pd.bdate_range("2024-03-04", periods=days, tz="America/New_York") + pd.Timedelta(hours=9.5)
    minutes = pd.to_timedelta(np.tile(np.arange(390), days), unit="min")
    index = (opens.repeat(390) + minutes).tz_convert("UTC").as_unit("ns").rename("timestamp")
    return pd.DataFrame({**dict.fromkeys(("open", "high", "low", "close"), price), "volume": volume}, index=index)


@pytest.mark.parametrize("volume", [0.0, 7.0])
def test_build_features_constant_prices_give_finite_values(volume):
    market = MarketSpec("SPY", "us_equity", 0.01, True)
    matrix = build_features(hand_made(volume=volume, price=0.1), market, FeatureSpec(frames=(10,)), dtype="float64")
    assert np.isfinite(matrix.values).all()
    still = dict(zip(matrix.names, matrix.values[-1], strict=True))
    assert still["rsi_14"] == still["stochastic_14@10m"] == still["mfi_14"] == 50.0
    assert abs(still["macd_12_26"]) < 1e-6
    assert still["bollinger_place_20"] == still["overnight_gap"] == still["return_48"] == still["adx_14"] == 0.0


def test_feature_columns_after_dead_stretch_are_finite_and_bounded(rough, markets):
    """After the dead stretch no column carries a missing or infinite value, or one that only the stretch explains."""
    for family in FAMILIES.values():
        for name, column in compute_family_columns(family, rough, markets["SPY"], False).items():
            assert np.isfinite(column[320:]).all(), name
            assert np.abs(column[320:]).max() < 1e7, name


def test_build_features_first_row_follows_session_open_and_warm_frames(real_bars):
    bars, market = real_bars("ES")
    matrix = build_features(bars, market, FeatureSpec(base_minutes=1, frames=()))
    assert matrix.base.session[matrix.first] != matrix.base.session[0]
    assert matrix.base.session[matrix.first - 1] == matrix.base.session[0]  # 320 minutes are less than a session
    assert build_features(bars, market, FeatureSpec(frames=(60,))).first >= 110 * 12 - 12


def test_build_features_too_few_bars_error_names_needed_count(real_bars):
    bars, market = real_bars("ES")
    with pytest.raises(BarsError, match=r"ES.*10 bars of 5m, 320 wanted; 3 bars of 15m, 110 wanted.*longer history"):
        build_features(bars.iloc[:50], market)
    with pytest.raises(BarsError, match="0 bars"):
        build_features(bars.iloc[:0], market)


def test_build_features_missing_declared_volume_raises_bars_error(real_bars, markets):
    with pytest.raises(BarsError, match="volume"):
        build_features(real_bars("ES")[0], replace(markets["ES"], has_volume=True))


def test_feature_spec_round_trips_and_gives_warmup_bars():
    spec = FeatureSpec(frames=[15, 60])
    assert FeatureSpec(**spec.to_dict()) == spec
    assert spec.to_dict()["frames"] == [15, 60]
    assert spec.warmup_bars == 321 * 12
    assert FeatureSpec(frames=()).warmup_bars == 640


def test_frame_staleness_without_a_break_is_below_the_frame_length():
    bars = synthetic_bars(days=9, calendar="24h", start="2024-03-05", missing=0.0)
    matrix = build_features(bars, MarketSpec("X", "24h", None, True), FeatureSpec(families=("regime",)))
    assert {name: ages["max"] for name, ages in matrix.frame_staleness.items()} == {"15m": 10, "30m": 25, "60m": 55}
    assert matrix.frame_staleness["60m"]["mean"] == pytest.approx(27.5, abs=0.2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ratio_and_balance_of_nothing_are_neutral_and_missing_stays_missing():
    a, b = np.array([1.0, 0.0, 2.0, np.nan, 1.0]), np.array([2.0, 0.0, 0.0, 0.0, np.nan])
    np.testing.assert_array_equal(ratio(a, b, 0.5), [0.5, 0.5, 0.5, np.nan, np.nan])
    np.testing.assert_array_equal(balance(a, b), [-1 / 3, 0.0, 1.0, np.nan, np.nan])


def test_timeframe_names_are_minutes_hours_and_days():
    assert [frame_name(minutes) for minutes in (5, 15, 60, 240, 1440)] == ["5m", "15m", "60m", "4h", "1d"]
