"""Frames against a bar-by-bar twin, and against their own prefixes."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.data.resample import asof_rows, base_frame
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, sessions_of
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError

COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")


def market(calendar: str, **settings) -> MarketSpec:
    return MarketSpec("TEST", calendar, 0.25, True, **settings)


def gappy(calendar: str, seed: int, days: int = 8) -> pd.DataFrame:
    """Bars with single minutes, stretches and hours removed, around a daylight-saving change."""
    bars = synthetic_bars(days, "null", seed, calendar, start="2024-03-06", missing=0.1)
    rng = np.random.default_rng(seed)
    keep = np.ones(len(bars), bool)
    for at in rng.integers(0, len(bars), 25):
        keep[at : at + rng.choice([3, 17, 61, 130])] = False
    return bars[keep]


def twin(bars: pd.DataFrame, spec: MarketSpec, minutes: int) -> list[tuple]:
    """The same frame, one bar at a time in plain Python."""
    rows, segment, previous, current = [], -1, None, None
    sessions = sessions_of(bars.index.as_unit("ns").asi8, spec.calendar)
    feed_end = bars.index[-1].value + MINUTE_NS
    for i, (stamp, bar) in enumerate(zip(bars.index, bars.itertuples(), strict=True)):
        if not sessions.inside[i]:
            continue
        now, close = stamp.value, int(sessions.close_ns[i])
        edge = previous is None or (sessions.id[i], close) != previous[1:]
        if edge or now - previous[0] - MINUTE_NS > spec.hole_minutes * MINUTE_NS:
            segment += 1
        previous = (now, sessions.id[i], close)
        bucket = (now - int(sessions.open_ns[i])) // (minutes * MINUTE_NS)
        begin = int(sessions.open_ns[i]) + bucket * minutes * MINUTE_NS
        if edge or current is None or current[0] != begin:
            current = [begin, min(begin + minutes * MINUTE_NS, close), bar.open, bar.high, bar.low, bar.close, 0.0]
            current += [int(sessions.id[i]), segment]
            rows.append(current)
        current[3], current[4] = max(current[3], bar.high), min(current[4], bar.low)
        current[5], current[6] = bar.close, current[6] + bar.volume
    return [tuple(row) for row in rows if row[1] <= feed_end]


@pytest.mark.parametrize("calendar", ["cme", "us_equity", "24h"])
@pytest.mark.parametrize("minutes", [1, 5, 25, 60, 240, 1440])
def test_equals_the_bar_by_bar_twin(calendar, minutes):
    bars = gappy(calendar, seed=minutes)
    frame = base_frame(bars, market(calendar), minutes)
    got = list(zip(*(getattr(frame, name).tolist() for name in COLUMNS), strict=True))
    assert got == twin(bars, market(calendar), minutes)
    assert len(frame) > 5 and (np.diff(frame.known_at) > 0).all()


def test_more_bars_never_change_a_row():
    bars = gappy("cme", seed=3)
    whole = {minutes: base_frame(bars, market("cme"), minutes) for minutes in (5, 60, 240, 1440)}
    stamps = bars.index.as_unit("ns").asi8

    @settings(max_examples=60, deadline=None)
    @given(cut=st.integers(1, len(bars)), absurd=st.booleans())
    def check(cut, absurd):
        part = bars.iloc[:cut]
        if absurd and cut < len(bars):
            future = bars.iloc[cut:] * 1.7
            part = pd.concat([part, future.iloc[::-1].set_axis(future.index)])
        known_until = stamps[cut - 1] + MINUTE_NS
        for minutes, full in whole.items():
            frame = base_frame(part, market("cme"), minutes)
            rows = int((full.known_at <= known_until).sum())
            assert int((frame.known_at <= known_until).sum()) == rows
            if not absurd:
                assert len(frame) == rows  # the bucket in which the feed stops is not emitted
            for name in COLUMNS:
                assert getattr(frame, name)[:rows].tobytes() == getattr(full, name)[:rows].tobytes(), name

    check()


def test_hand_worked_bucket_and_session_end():
    # Wednesday 10 January 2024: the session ends 22:00 UTC (16:00 Chicago); the last 50-minute bucket starts 21:30.
    stamps = pd.to_datetime(["2024-01-10 21:08", "2024-01-10 21:12", "2024-01-10 21:40", "2024-01-10 23:05"], utc=True)
    bars = pd.DataFrame({"open": 1.0, "high": [3.0, 5, 4, 1], "low": 1.0, "close": [2.0, 2, 3, 1], "volume": 1.0})
    frame = base_frame(bars.set_index(stamps), market("cme"), 50)
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["20:40", "21:30"]
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["21:30", "22:00"]
    assert frame.high.tolist() == [5.0, 4.0] and frame.volume.tolist() == [2.0, 1.0]


def test_hole_opens_a_segment_and_a_quiet_hour_does_not():
    day = pd.Timestamp("2024-01-10", tz="UTC")
    for silence, segments in ((60, 1), (61, 2)):
        minutes = [*range(0, 30), *range(30 + silence, 120 + silence)]
        bars = pd.DataFrame(1.0, index=day + pd.to_timedelta(minutes, unit="min"), columns=["open", "high", "low"])
        frame = base_frame(bars.assign(close=1.0, volume=1.0), market("24h"), 5)
        assert len(np.unique(frame.segment)) == segments


def test_what_trades_on_after_a_scheduled_early_close_is_cut_apart():
    index = pd.date_range("2024-11-29 18:10", "2024-11-29 18:29", freq="1min", tz="UTC")
    bars = pd.DataFrame(1.0, index=index, columns=["open", "high", "low", "close", "volume"])
    frame = base_frame(bars, market("cme"), 10)  # index futures close at 18:15 that day
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["18:15", "18:20", "18:30"]
    assert frame.segment.tolist() == [0, 1, 1] and frame.volume.tolist() == [5, 5, 10]


def test_five_minute_bars_make_a_five_minute_frame():
    index = pd.date_range("2024-01-10 10:00", periods=4, freq="5min", tz="UTC")
    bars = pd.DataFrame(1.0, index=index, columns=["open", "high", "low", "close", "volume"])
    frame = base_frame(bars, market("24h"), 5, bar_minutes=5)
    assert len(frame) == 4 and frame.known_at[-1] == index[-1].value + 5 * MINUTE_NS
    assert len(base_frame(bars, market("24h"), 15, bar_minutes=5)) == 1
    with pytest.raises(SettingsError, match="multiple"):
        base_frame(bars, market("24h"), 7, bar_minutes=5)


def test_no_bars_and_no_volume():
    empty = synthetic_bars(2).iloc[:0]
    assert len(base_frame(empty, market("cme"), 5)) == 0
    bars = synthetic_bars(2).drop(columns="volume")
    assert base_frame(bars, MarketSpec("T", "cme", 0.25, False), 5).volume is None
    with pytest.raises(BarsError, match="volume"):
        base_frame(bars, market("cme"), 5)


def test_index_unit_does_not_matter():
    bars = synthetic_bars(3)
    other = bars.set_axis(bars.index.as_unit("us"))
    assert (base_frame(bars, market("cme"), 5).start == base_frame(other, market("cme"), 5).start).all()


def test_the_hour_is_visible_at_its_end_and_not_before():
    hour = pd.date_range("2024-01-10 11:00", periods=3, freq="60min").as_unit("ns").asi8  # known 11:00, 12:00, 13:00
    base = pd.date_range("2024-01-10 10:55", "2024-01-10 13:00", freq="5min").as_unit("ns").asi8
    rows = asof_rows(base, hour)
    assert rows[0] == -1 and rows[1] == 0
    assert rows[base == hour[1]] == 1 and rows[base == hour[1] - 5 * MINUTE_NS] == 0
    assert rows.tolist() == [max([j for j in range(3) if hour[j] <= t], default=-1) for t in base]
