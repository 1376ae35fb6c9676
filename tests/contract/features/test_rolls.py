"""A roll moves the price and no feature: whatever the way of joining, returns are those of the contract held."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.contract import doors

MARKET = doors.MarketSpec("ES", "24h", None, True)
SPEC = doors.FeatureSpec(frames=(15,))
ROLLS = (("ESM4", "2024-03-06 12:02+00:00"), ("ESU4", "2024-03-08 07:31+00:00"))  # inside a bucket, in mid-session


def one_contract(name: str, close: np.ndarray, index: pd.DatetimeIndex) -> pd.DataFrame:
    opens = np.concatenate([close[:1], close[:-1]])
    columns = {"open": opens, "high": np.maximum(opens, close), "low": np.minimum(opens, close), "close": close}
    volume = 1.0 + np.arange(len(close)) % 89
    return pd.DataFrame({"contract": name, **columns, "volume": volume}, index=index)


@pytest.fixture(scope="module")
def contracts() -> pd.DataFrame:
    """Three contracts of one walk, each 20 % above the one before: a step that no feature could miss."""
    index = pd.date_range("2024-03-01", periods=9 * 1440, freq="1min", tz="UTC", name="timestamp")
    walk = 5000 * np.exp(np.cumsum(np.random.default_rng(3).normal(0, 3e-4, len(index))))
    parts = [one_contract(name, walk * 1.2**k, index) for k, name in enumerate(("ESH4", "ESM4", "ESU4"))]
    return pd.concat(parts).sort_index(kind="stable")


def rolled(contracts: pd.DataFrame) -> pd.DataFrame:
    return doors.build_continuous_contract(contracts, doors.RollSpec(first="ESH4", forced=ROLLS), MARKET)[0]


@pytest.mark.parametrize("minutes", [1, 5])
def test_build_features_across_rolls_equals_series_without_step(contracts, minutes):
    spec, bars = doors.FeatureSpec(base_minutes=minutes, frames=(15,)), rolled(contracts)
    smooth = bars.assign(chain=1.0, **{name: bars[name] * bars["chain"] for name in ("open", "high", "low", "close")})
    plain, ratio = (doors.build_features(one, MARKET, spec) for one in (bars, smooth))
    assert np.array_equal(plain.known_at, ratio.known_at)
    apart = np.abs(plain.values.astype(float) - ratio.values) / np.maximum(ratio.values.std(axis=0), 1e-12)
    assert apart.max() < 1e-3, plain.names[int(apart.max(axis=0).argmax())]
    jump = np.abs(np.diff(np.log(plain.close))).max()
    assert jump == pytest.approx(np.log(1.2), abs=0.01)  # labels and reports keep the prices that traded
    assert np.abs(np.diff(np.log(ratio.close))).max() < 0.01


def test_chain_factor_of_contracts_without_common_minute_removes_roll_return(contracts):
    at = pd.Timestamp(ROLLS[0][1])
    near = contracts[(contracts["contract"] == "ESH4") & (contracts.index < at)]
    far = contracts[(contracts["contract"] == "ESM4") & (contracts.index >= at)]
    spec = doors.RollSpec(first="ESH4", forced=ROLLS[:1])
    bars, _ = doors.build_continuous_contract(pd.concat([near, far]), spec, MARKET)
    row = bars.index.get_loc(at)
    through = bars["close"] * bars["chain"]
    assert np.log(bars["open"].iloc[row] / bars["close"].iloc[row - 1]) == pytest.approx(np.log(1.2), abs=0.01)
    assert bars["open"].iloc[row] * bars["chain"].iloc[row] == pytest.approx(through.iloc[row - 1], rel=1e-12)
    assert (bars["chain"].iloc[:row] == 1.0).all() and bars["chain"].iloc[row:].nunique() == 1


def test_check_bars_already_joined_contracts_chain_at_last_close(contracts):
    own = rolled(contracts).drop(columns="chain")
    bars, _ = doors.validate_bars(own.reset_index(), market=MARKET)
    rolls = np.flatnonzero(np.diff(bars["contract"])) + 1
    assert len(rolls) == 2
    opens, close = (bars[name].to_numpy() * bars["chain"].to_numpy() for name in ("open", "close"))
    assert np.allclose(opens[rolls], close[rolls - 1], rtol=1e-12)
    inside = np.setdiff1d(np.arange(1, len(bars)), rolls)
    own_close = own["close"].to_numpy()
    own_steps = np.log(own_close[inside] / own_close[inside - 1])
    assert np.allclose(np.log(close[inside] / close[inside - 1]), own_steps, atol=1e-12)


def test_feature_stream_across_rolls_equals_whole_file(contracts):
    bars = rolled(contracts)
    whole = doors.build_features(bars, MARKET, SPEC)
    stream, rows, row = doors.FeatureStream(MARKET, SPEC), [], 0
    random = np.random.default_rng(1)
    edges = [bars.index.get_loc(pd.Timestamp(at)) for _, at in ROLLS]
    singly = {edge + k for edge in edges for k in range(-9, 9)}
    while row < len(bars):
        step = 1 if row in singly else int(random.integers(1, 40))
        step = next((k for k in range(1, step) if row + k in singly), step)
        rows.append(stream.push(bars.iloc[row : row + step]))
        state = stream.get_state()
        stream = doors.FeatureStream(MARKET, SPEC)
        stream.load_state(state)
        row += step
    known_at = np.concatenate([one.known_at for one in rows])
    assert np.array_equal(known_at, whole.known_at[: len(known_at)]) and len(known_at) >= len(whole) - 1
    values = np.concatenate([one.values for one in rows])
    assert np.array_equal(values, whole.values[: len(values)])
    assert np.array_equal(np.concatenate([one.close for one in rows]), whole.close[: len(values)])


def test_feature_windows_with_spans_cross_holes_but_not_rolls(contracts):
    bars, stretches = rolled(contracts), 3
    hole = bars.index[len(bars) // 4 :][:200]
    bars = bars.drop(hole)
    inside, across = (doors.build_features(bars, MARKET, replace(SPEC, spans=spans)) for spans in (False, True))
    assert np.array_equal(inside.values, across.values)  # no column depends on it
    assert len(np.unique(inside.segment)) > 5 and len(np.unique(across.segment)) == stretches
    rolls = {across.known_at[row] for row in np.flatnonzero(np.diff(across.segment)) + 1}
    bucket = np.array([pd.Timestamp(at).value for _, at in ROLLS])
    ends = inside.known_at[np.searchsorted(inside.known_at - 5 * doors.MINUTE_NS, bucket, side="right") - 1]
    assert rolls <= set(ends) | set(inside.known_at) and len(rolls) == stretches - 1
    rows, lookback = np.arange(len(across)), 48
    kept = [
        set(np.flatnonzero(doors.mask_rows_with_full_window(one.segment, rows, lookback))) for one in (inside, across)
    ]
    steps = np.flatnonzero(np.diff(across.segment)) + 1
    assert kept[1] == {
        row for row in rows[lookback - 1 :] if not any(row - lookback < step - 1 < row for step in steps)
    }
    assert kept[0] < kept[1]
    stream, pieces = doors.FeatureStream(MARKET, replace(SPEC, spans=True)), []
    for first in range(0, len(bars), 1711):
        pieces.append(stream.push(bars.iloc[first : first + 1711]).segment)
        state = stream.get_state()
        stream = doors.FeatureStream(MARKET, replace(SPEC, spans=True))
        stream.load_state(state)
    fed = np.concatenate(pieces)
    assert np.array_equal(fed, across.segment[: len(fed)]) and len(fed) >= len(across) - 1


def test_base_frame_chain_equals_factor_of_first_contract_in_bucket(contracts):
    bars = rolled(contracts)
    for minutes in (1, 5, 60, 1440):
        frame = doors.resample_bars(bars, MARKET, minutes)
        first = np.searchsorted(bars.index.as_unit("ns").asi8, frame.start)
        last = np.searchsorted(bars.index.as_unit("ns").asi8, frame.known_at - doors.MINUTE_NS, side="right") - 1
        assert np.array_equal(frame.chain, bars["chain"].to_numpy()[first])
        whole = bars["contract"].to_numpy()[first] == bars["contract"].to_numpy()[last]
        through = (bars["close"] * bars["chain"]).to_numpy()[last]
        assert np.allclose(doors.apply_roll_adjustment(frame).close[whole], through[whole], rtol=1e-15)


def test_custom_feature_across_roll_sees_no_price_step(contracts, monkeypatch):
    monkeypatch.setattr(doors.custom, "_FEATURES", dict(doors.custom._FEATURES))  # what is defined here ends here

    @doors.custom.feature(memory=2, name="last_step")
    def last_step(bars):
        return np.append(0.0, np.diff(np.log(bars.close)))

    matrix = doors.build_features(rolled(contracts), MARKET, doors.FeatureSpec(frames=(15,), custom=("last_step",)))
    assert np.abs(matrix.values[:, -1]).max() < 0.02
