"""Activity bars against a plain twin, hand-worked minutes, their own prefixes and a feed in any chunks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.data.activity_bars import (
    KINDS,
    ActivityBarStream,
    ImbalanceBarSpec,
    activity_bars,
    build_base_and_minute_bars,
    resolve_activity_bar_size,
)
from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec, assign_sessions
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError

COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")
SIZES = {"volume": 2_500.0, "dollar": 12e6, "tick_imbalance": 12 * 40.0}
SPEC = ImbalanceBarSpec(expected_minutes=12, span=5, bound=3)


def market(calendar: str = "cme", has_volume: bool = True) -> MarketSpec:
    return MarketSpec("TEST", calendar, 0.25, has_volume)


def gappy(calendar: str, days: int = 6, seed: int = 1) -> pd.DataFrame:
    """Bars with holes, over a daylight-saving change, with a roll in mid-session."""
    bars = synthetic_bars(days, "null", seed, calendar, start="2024-03-06", missing=0.05)
    rng = np.random.default_rng(seed)
    keep = np.ones(len(bars), bool)
    for at in rng.integers(0, len(bars), 12):
        keep[at : at + rng.choice([5, 61, 150])] = False
    bars = bars[keep]
    return bars.assign(contract=np.where(np.arange(len(bars)) < len(bars) // 2 + 7, 202403, 202406))


def sampled(kind: str, bars: pd.DataFrame, place: MarketSpec, given_settings: bool = True):
    return activity_bars(bars, place, kind, SIZES[kind] if given_settings else None, SPEC)


def reference(kind: str, bars: pd.DataFrame, place: MarketSpec) -> list[tuple]:
    """The same, one minute at a time in plain Python."""
    sessions = assign_sessions(bars.index.as_unit("ns").asi8, place.calendar)
    rows, segment, previous, b, held = [], -1, None, 1.0, []
    expected_minutes, expected = float(SPEC.expected_minutes), 40.0
    first = threshold = SIZES[kind]
    for k, (stamp, bar) in enumerate(zip(bars.index, bars.itertuples(), strict=True)):
        if not sessions.inside[k]:
            continue
        here = (int(sessions.id[k]), int(sessions.close_ns[k]), bar.contract)
        fresh = previous is None or here != previous[1] or stamp.value - previous[0] > 61 * MINUTE_NS
        if fresh:
            held, flow, total, segment = [], [], 0.0, segment + 1
        step = bar.close - (bar.open if fresh else previous[2])
        b = float(np.sign(step)) or b
        previous = (stamp.value, here, bar.close)
        held.append((stamp.value, bar))
        flow.append({"volume": bar.volume, "dollar": bar.volume * bar.close, "tick_imbalance": b * bar.volume}[kind])
        total += flow[-1]
        if abs(total) < threshold:
            continue
        inside = [one for _, one in held]
        prices = (inside[0].open, max(x.high for x in inside), min(x.low for x in inside), bar.close)
        volume = sum(x.volume for x in inside)
        rows.append((held[0][0], stamp.value + MINUTE_NS, *prices, volume, here[0], segment))
        if kind == "tick_imbalance":
            expected_minutes += 2 / (SPEC.span + 1) * (len(held) - expected_minutes)
            for one in flow:
                expected += 2 / (SPEC.span * SPEC.expected_minutes + 1) * (one - expected)
            threshold = min(max(expected_minutes * abs(expected), first / SPEC.bound), first * SPEC.bound)
        held, flow, total = [], [], 0.0
    return rows


@pytest.mark.parametrize("calendar", ["cme", "us_equity", "24h"])
@pytest.mark.parametrize("kind", KINDS)
def test_activity_bars_with_gaps_equal_minute_by_minute_reference(kind, calendar):
    bars = gappy(calendar)
    frame = sampled(kind, bars, market(calendar))
    got = list(zip(*(getattr(frame, name).tolist() for name in COLUMNS), strict=True))
    assert got == reference(kind, bars, market(calendar))
    assert len(frame) > 40 and frame.minutes == 0 and (np.diff(frame.known_at) > 0).all()
    assert len(np.unique(frame.segment)) > 5


@pytest.mark.parametrize("estimated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activity_bars_with_later_bars_appended_keep_earlier_rows(kind, estimated):
    bars = gappy("us_equity", days=26)
    place = market("us_equity")
    whole = sampled(kind, bars, place, given_settings=not estimated)
    stamps = bars.index.as_unit("ns").asi8
    days = np.unique(assign_sessions(stamps, "us_equity").id)
    known_from = int(np.searchsorted(stamps, int(days[20]) * DAY_NS)) + 1 if estimated else 1
    if estimated:
        (note,) = resolve_activity_bar_size(place, kind, None, bars, SPEC).inferred_fact_warnings()
        assert "first 20 sessions" in note and "--bar-size" in note and whole.session.min() == days[20]
    assert len(whole) > 50

    @settings(max_examples=25, deadline=None)
    @given(cut=st.integers(known_from, len(bars)), absurd=st.booleans())
    def check(cut, absurd):
        part = bars.iloc[:cut]
        if absurd:
            future = bars.iloc[cut:]
            part = pd.concat([part, future.assign(**{name: future[name] * 3.3 for name in COLUMNS[2:7]})])
        frame = sampled(kind, part, place, given_settings=not estimated)
        known_until = stamps[cut - 1] + MINUTE_NS
        rows = int((whole.known_at <= known_until).sum())
        assert int((frame.known_at <= known_until).sum()) == rows
        for name in COLUMNS:
            assert getattr(frame, name)[:rows].tobytes() == getattr(whole, name)[:rows].tobytes(), name

    check()


def minutes_of(close: list[float], volume: list[float], start: str = "2024-01-10 10:00") -> pd.DataFrame:
    index = pd.date_range(start, periods=len(close), freq="1min", tz="UTC")
    close = np.array(close)
    opens = np.concatenate([close[:1], close[:-1]])
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    columns = {"open": opens, "high": high, "low": low, "close": close, "volume": np.array(volume, float)}
    return pd.DataFrame(columns, index=index)


def test_activity_bars_volume_and_dollar_equal_hand_computed_rows():
    bars = minutes_of([10, 11, 9, 10, 10, 12], [4, 5, 3, 10, 2, 7])
    frame = activity_bars(bars, market(), "volume", 9)
    assert frame.volume.tolist() == [9, 13, 9]  # 4 + 5 reach it; 3 + 10 go over, and 4 are not carried on
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["10:00", "10:02", "10:04"]
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["10:02", "10:04", "10:06"]
    assert (frame.high.tolist(), frame.low.tolist()) == ([11, 11, 12], [10, 9, 10])
    frame = activity_bars(bars, market(), "dollar", 100)
    assert frame.volume.tolist() == [12, 10, 9]  # 40 + 55 + 27 = 122; 100 is enough; 20 + 84 = 104
    assert len(activity_bars(bars, market(), "volume", 32)) == 0  # 31 in all: the unfinished bar is not emitted


def test_activity_bars_tick_imbalance_equal_hand_computed_rows():
    # signs: the first opens at its close and counts as up; then up, down, unchanged (down again), up, up
    bars = minutes_of([10, 11, 10, 10, 11, 12], [1, 2, 3, 4, 5, 6])
    spec = ImbalanceBarSpec(expected_minutes=1, span=3, bound=10)
    frame = activity_bars(bars, market(), "tick_imbalance", 4, spec)
    # Sums 1, 3, 0, -4: the first bar ends. Weights are 2 / (3 + 1): E[T] = 1 + (4 - 1) / 2 = 2.5, and E[b v] goes from
    # 4 over 2.5, 2.25, -0.375 to -2.1875. The threshold is 5.47: +5 is not enough, +5 +6 is.
    assert frame.volume.tolist() == [10, 11]
    held = activity_bars(bars, market(), "tick_imbalance", 4, replace(spec, bound=1))
    assert held.volume.tolist() == [10, 5, 6]  # and 4 all the time where it may not move
    unweighted = activity_bars(bars.drop(columns="volume"), market(has_volume=False), "tick_imbalance", 4, spec)
    assert unweighted.volume is None and len(unweighted) == 0  # +1, +2, +1, 0, +1, +2 never reach 4


def test_activity_bars_with_estimated_threshold_give_about_50_bars_per_session():
    bars = synthetic_bars(40, "null", 3, "us_equity")
    for kind in ("volume", "dollar"):
        frame = activity_bars(bars, market("us_equity"), kind)
        assert len(np.unique(frame.session)) == 20
        assert 30 < len(frame) / 20 < 55
    frame = activity_bars(bars, market("us_equity"), "tick_imbalance")
    assert 390 / 120 < len(frame) / 20 < 390 / 7.5  # 30 minutes a bar, times or by the square of the bound


@pytest.mark.parametrize("kind", KINDS)
def test_activity_stream_random_chunks_and_restored_states_equal_whole_file(kind):
    bars, place = gappy("cme", days=26), market()
    place = resolve_activity_bar_size(place, kind, SIZES[kind])
    whole, rng = activity_bars(bars, place, kind, spec=SPEC), np.random.default_rng(0)
    cuts = np.unique(np.concatenate([[0, len(bars)], rng.integers(0, len(bars), 400)]))
    stream, parts = ActivityBarStream(place, kind, SPEC), []
    for number, (first, stop) in enumerate(pairwise(cuts)):
        if number % 7 == 0:
            state, stream = stream.get_state(), ActivityBarStream(place, kind, SPEC)
            stream.load_state(state)
        parts.append(stream.push(bars.iloc[first:stop]))
        end = int(bars.index.as_unit("ns").asi8[stop - 1]) + MINUTE_NS
        assert (parts[-1].known_at <= end).all() and len(stream.advance(end)) == 0
    for name in COLUMNS:
        assert np.concatenate([getattr(one, name) for one in parts]).tobytes() == getattr(whole, name).tobytes(), name
    other = ActivityBarStream(resolve_activity_bar_size(market(), kind, SIZES[kind] + 1), kind, SPEC)
    with pytest.raises(SettingsError, match="state is of another stream"):
        other.load_state(stream.get_state())


def test_base_and_minute_bars_by_volume_minutes_sum_to_activity_bar():
    bars, place = gappy("us_equity"), resolve_activity_bar_size(market("us_equity"), "volume", 2_500.0)
    base, minute_bars = build_base_and_minute_bars(bars, place, "volume")
    first, stop = np.searchsorted(minute_bars.start, base.start), np.searchsorted(minute_bars.start, base.known_at)
    for k in range(0, len(base), 7):
        inside = slice(first[k], stop[k])
        assert minute_bars.volume[inside].sum() == base.volume[k]
        assert (minute_bars.high[inside].max(), minute_bars.low[inside].min()) == (base.high[k], base.low[k])
    assert build_base_and_minute_bars(bars, place, 1)[1] is None
    assert len(build_base_and_minute_bars(bars, place, 5)[0]) == len(resample_bars(bars, place, 5))


def test_activity_bars_invalid_settings_or_missing_volume_raise_error():
    bars = gappy("cme", days=3)
    for kind in ("volume", "dollar"):
        with pytest.raises(BarsError, match=r"These bars need volume.*time or tick_imbalance"):
            activity_bars(bars, market(has_volume=False), kind, 5)
    with pytest.raises(BarsError, match="more than 20 sessions"):
        activity_bars(bars, market(), "dollar")
    for size in (0, -1.0, np.nan, np.inf):
        with pytest.raises(SettingsError, match="bar_size"):
            activity_bars(bars, market(), "volume", size)
    with pytest.raises(SettingsError, match="No such bars"):
        activity_bars(bars, market(), "volumes", 5)
    with pytest.raises(SettingsError, match="size of a bar is unknown"):
        ActivityBarStream(market(), "volume")
    with pytest.raises(BarsError, match="Nothing was traded"):
        activity_bars(synthetic_bars(22, calendar="us_equity").assign(volume=0.0), market("us_equity"), "volume")
    for wrong in ({"expected_minutes": 0}, {"span": 0}, {"bound": np.inf}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            ImbalanceBarSpec(**wrong)
    with pytest.raises(BarsError, match=r"Bars overlap.*row 5.*before the bar before it ends"):
        activity_bars(pd.concat([bars.iloc[:5], bars.iloc[4:9]]), market(), "volume", 5)
    assert len(activity_bars(bars.iloc[:0], market(), "volume", 5)) == 0
