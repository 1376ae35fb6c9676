"""The user's own features: proved before they may be used, and bound to their source."""

import re
import sys

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import LookAheadError, SettingsError
from tests.contract.doors import FeatureSpec, build_features, custom, feature, feature_column_names, resolve_market_spec


def rolling_mean_gap(bars):
    close = pd.Series(bars.close)
    return (close / close.rolling(30).mean() - 1.0).fillna(0.0)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(custom, "_FEATURES", {})


def test_custom_feature_is_added_as_last_column(real_bars):
    feature(rolling_mean_gap, memory=30)
    bars, market = real_bars("SPY")
    spec = FeatureSpec(frames=(15,), custom=("rolling_mean_gap",))
    assert re.fullmatch(r"rolling_mean_gap#[0-9a-f]{12}", spec.custom[0])
    assert FeatureSpec(**spec.to_dict()) == spec
    assert spec.warmup_bars >= 640
    matrix = build_features(bars, market, spec)
    assert matrix.names == feature_column_names(market, spec)
    assert matrix.names[-1] == "rolling_mean_gap"
    want = (pd.Series(matrix.base.close) / pd.Series(matrix.base.close).rolling(30).mean() - 1.0).to_numpy()
    np.testing.assert_array_equal(matrix.values[:, -1], want[matrix.first :].astype(np.float32))
    plain = build_features(bars, market, FeatureSpec(frames=(15,)))
    np.testing.assert_array_equal(matrix.values[:, :-1], plain.values)


def with_series_methods(bars):
    return (bars.close / bars.close.rolling(30).mean() - 1.0).fillna(0.0) + 0.0 * bars.high.shift(1).fillna(0.0)


def test_custom_feature_bars_columns_have_series_methods_and_are_read_only():
    """The methods of pandas, the bits of arrays: existing features keep theirs."""
    feature(with_series_methods, memory=30)
    seen = custom._read_only(bars := custom.custom_feature_proof_bars(300))
    close = pd.Series(bars.close)
    pd.testing.assert_series_equal(seen.close.rolling(5).mean(), close.rolling(5).mean(), check_exact=True)
    pd.testing.assert_series_equal(seen.close.groupby(seen.session).cummax(), close.groupby(bars.session).cummax())
    np.testing.assert_array_equal(np.asarray(seen.close[1:] / seen.close[:-1]), bars.close[1:] / bars.close[:-1])
    assert float(seen.close.std()) == float(bars.close.std()) != float(close.std())  # NumPy's, where both have it
    with pytest.raises(AttributeError, match="rollling"):
        _ = seen.close.rollling
    with pytest.raises(ValueError, match="read-only"):
        seen.close[0] = 1.0


def rare(bars):
    """Looks one bar ahead in one row of a thousand."""
    out = np.zeros(len(bars))
    peeks = np.arange(500, len(bars) - 1, 1000)
    out[peeks] = bars.close[peeks + 1]
    return out


def after_a_large_volume(bars):
    return np.where(bars.volume > 2_000, np.append(bars.close[1:], 0.0) / bars.close - 1.0, 0.0)


def remembered(bars, met={}):  # noqa: B006 - the fault to be found
    """Keeps the first close it meets of each moment, from one call to the next."""
    for moment, close in zip(bars.known_at.tolist(), bars.close.tolist(), strict=True):
        met.setdefault(moment, close)
    return [met.get(moment + 300_000_000_000, 0.0) for moment in bars.known_at.tolist()]


@pytest.mark.parametrize("leak", [after_a_large_volume, remembered])
def test_custom_feature_with_look_ahead_raises_look_ahead_error(leak):
    with pytest.raises(LookAheadError, match=f"looks ahead.*{leak.__name__}.*bar"):
        feature(leak, memory=64)
    with pytest.raises(SettingsError, match="not defined here"):
        FeatureSpec(custom=(leak.__name__,))


def test_custom_feature_with_rare_look_ahead_raises_look_ahead_error():
    with pytest.raises(LookAheadError, match="rare"):
        feature(rare, memory=1)


def test_custom_feature_with_longer_memory_than_declared_raises_error():
    def since_the_start(bars):
        return np.cumsum(np.append(0.0, np.diff(np.log(bars.close))))

    with pytest.raises(LookAheadError, match=r"needs more bars.*last 64 bars"):
        feature(since_the_start, memory=64)


@pytest.mark.parametrize(
    ("made", "settings", "message"),
    [
        (lambda bars: bars.close[1:], {"name": "short"}, "one number a bar"),
        (lambda bars: bars.close, {"name": "Not A Name"}, "small letters"),
        (lambda bars: bars.close, {"name": "x", "memory": 0}, "memory.*0"),
    ],
)
def test_custom_feature_invalid_result_or_settings_raise_settings_error(made, settings, message):
    with pytest.raises(SettingsError, match=message):
        feature(made, **settings)


def test_custom_feature_writing_to_bars_raises_value_error():
    def vandal(bars):
        bars.close[:] = 0.0
        return bars.close

    with pytest.raises(ValueError, match="read-only"):
        feature(vandal)


def test_custom_feature_that_fails_is_one_line_with_its_place_and_says_that_volume_is_absent():
    def misspelt(bars):
        return bars.closee.rolling(5).mean()

    with pytest.raises(SettingsError, match=r"misspelt, test_custom.py line \d+.*got AttributeError.*closee"):
        feature(misspelt)

    def volume_gap(bars):
        return bars.volume / bars.volume.rolling(20, min_periods=1).max()

    feature(volume_gap, memory=20)
    bars = synthetic_market(SyntheticSpec(days=8)).bars.drop(columns="volume")
    market = resolve_market_spec("TEST", calendar="cme", tick=0.25)
    with pytest.raises(SettingsError, match=r"volume_gap, test_custom.py line.*these bars have no volume") as caught:
        build_features(bars, market, FeatureSpec(families=("momentum",), custom=("volume_gap",)))
    assert "\n" not in str(caught.value)


def test_custom_feature_redefined_under_same_name_has_other_signature():
    feature(rolling_mean_gap, memory=30)
    signed = FeatureSpec(custom=("rolling_mean_gap",)).custom
    feature(rolling_mean_gap, memory=60)
    with pytest.raises(SettingsError, match=r"not the one the data was prepared with.*prepare again"):
        custom.get_custom_feature(signed[0])


def test_custom_feature_closure_values_are_part_of_signature():
    def momentum_of(lag):
        def momentum(bars, floor=0.5 * lag):
            return np.maximum([bars.close[max(i - lag, 0)] for i in range(len(bars))] - bars.close, floor)

        return momentum

    feature(momentum_of(2), memory=8)
    signed = custom.signed_custom_feature_name("momentum")
    feature(momentum_of(2), memory=8)
    assert custom.signed_custom_feature_name("momentum") == signed
    feature(momentum_of(3), memory=8)
    assert custom.signed_custom_feature_name("momentum") != signed


def test_custom_feature_global_value_is_part_of_signature(monkeypatch):
    feature(scaled, memory=2)
    signed = custom.signed_custom_feature_name("scaled")
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    feature(scaled, memory=2)
    assert custom.signed_custom_feature_name("scaled") != signed


SCALE = 2.0


def scaled(bars):
    return [SCALE * (close - open_) for open_, close in zip(bars.open, bars.close, strict=True)]


def test_custom_feature_with_infinite_values_after_warmup_raises_error(real_bars):
    @feature(memory=2)
    def late(bars):
        with np.errstate(divide="ignore"):
            return np.log(np.abs(bars.close - bars.open))

    bars, market = real_bars("SPY")
    with pytest.raises(SettingsError, match=r"missing or infinite.*late.*divide by what cannot be 0"):
        build_features(bars, market, FeatureSpec(frames=(), custom=("late",)))


def test_custom_feature_missing_on_last_bars_alone_names_look_ahead(real_bars):
    @feature(memory=2)
    def peek(bars):
        ahead = np.asarray(bars.close.shift(-1))
        return ahead if len(bars) > 5_000 else np.ones(len(bars))  # the decorator's synthetic market is shorter

    bars, market = real_bars("SPY")
    with pytest.raises(SettingsError, match=r"missing or infinite.*peek.*1 bars.*only the last bars lack looks ahead"):
        build_features(bars, market, FeatureSpec(frames=(), custom=("peek",)))
