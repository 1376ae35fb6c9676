"""Frames against a bar-by-bar twin, and against their own prefixes and chunks."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError
from tests.contract.doors import (
    DAY_NS,
    MINUTE_NS,
    BarStream,
    MarketSpec,
    ResampledBars,
    asof_rows,
    assign_sessions,
    resample_bars,
    trading_intervals,
)

FRAMES = (1, 5, 10, 15, 20, 25, 30, 45, 60, 240, 1440)
COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")


def market(calendar: str, **settings) -> MarketSpec:
    return MarketSpec("TEST", calendar, 0.25, True, **settings)


def reference(bars: pd.DataFrame, spec: MarketSpec, minutes: int) -> list[tuple]:
    """The same frame, one bar at a time in plain Python."""
    rows, segment, last, current = [], -1, None, None
    width, length = minutes * MINUTE_NS, spec.bar_minutes * MINUTE_NS
    sessions = assign_sessions(bars.index.as_unit("ns").asi8, spec.calendar)
    # where trading goes on after a scheduled early close, by asking the calendar at that close
    again = assign_sessions(sessions.close_ns, spec.calendar)
    first_close = assign_sessions(sessions.open_ns, spec.calendar).close_ns
    contracts = bars["contract"] if "contract" in bars else [None] * len(bars)
    for i, (stamp, bar, contract) in enumerate(zip(bars.index, bars.itertuples(), contracts, strict=True)):
        if not sessions.inside[i]:
            continue
        now, opened, close = stamp.value, int(sessions.open_ns[i]), int(sessions.close_ns[i])
        edge = last is None or (close, contract) != last[1:]
        segment += edge or now - last[0] - length > 60 * MINUTE_NS
        rolled = last is not None and contract != last[2]
        begin = opened + (now - opened) // width * width
        if current is None or now >= current["until"] or rolled:
            early = int(first_close[i])
            start, until = max(begin, early) if now >= early else begin, min(begin + width, close)
            if current is not None and now < current["until"]:
                start, current["known"] = now, now + length
                if until <= now + length:
                    rows.pop()
            current = {"until": until, "known": until, "at": (start, int(sessions.id[i]), segment), "bars": []}
            rows.append(current)
        if now + length > close and again.inside[i]:
            current["known"] = now + length
        current["bars"].append(bar)
        last = (now, close, contract)
    feed_end = bars.index[-1].value + length
    return [as_tuple(row) for row in rows if row["known"] <= feed_end]


def as_tuple(row: dict) -> tuple:
    (start, session, segment), bars = row["at"], row["bars"]
    prices = bars[0].open, max(bar.high for bar in bars), min(bar.low for bar in bars), bars[-1].close
    volume = 0.0
    for bar in bars:  # not sum(), which compensates
        volume += bar.volume
    return (start, row["known"], *prices, volume, session, segment)


def as_rows(frame: ResampledBars) -> list[tuple]:
    return list(zip(*(getattr(frame, name).tolist() for name in COLUMNS), strict=True))


# Daylight saving; early closes on 28 and 29 November.
@pytest.mark.parametrize(
    ("calendar", "start", "rolls"),
    [("cme", "2024-03-06", 12), ("cme", "2024-11-26", 0), ("us_equity", "2024-11-26", 12), ("24h", "2024-03-06", 12)],
)
def test_frames_of_gappy_bars_equal_bar_by_bar_reference(gappy_minutes, calendar, start, rolls):
    bars = gappy_minutes(start, 6, rolls=rolls)
    made = {n: resample_bars(bars, market(calendar), n) for n in FRAMES}
    for minutes in FRAMES:
        assert as_rows(made[minutes]) == reference(bars, market(calendar), minutes)
        assert (np.diff(made[minutes].known_at) > 0).all() and (np.diff(made[minutes].start) > 0).all()


@pytest.mark.parametrize("bar_minutes", [5, 30, 60])
def test_base_frame_bars_longer_than_a_minute_equal_bar_by_bar_reference(gappy_minutes, bar_minutes):
    bars = gappy_minutes("2024-11-26", 6, rolls=5)
    bars = bars[bars.index.hour * 60 % bar_minutes + bars.index.minute % bar_minutes == 0]
    for minutes in (bar_minutes, 60, 180, 1440):
        spec = market("cme", bar_minutes=bar_minutes)
        assert as_rows(resample_bars(bars, spec, minutes)) == reference(bars, spec, minutes)


def test_frames_of_with_later_bars_appended_keep_earlier_rows(gappy_minutes):
    bars = gappy_minutes("2024-11-26", 6, rolls=12)
    lengths, numbers = (1, 5, 60, 240, 1440), [name for name in bars if name != "contract"]
    whole = {n: resample_bars(bars, market("cme"), n) for n in lengths}
    stamps = bars.index.as_unit("ns").asi8

    @settings(max_examples=60, deadline=None)
    @given(cut=st.integers(1, len(bars)), absurd=st.booleans())
    def check(cut, absurd):
        part = bars.iloc[:cut]
        if absurd and cut < len(bars):
            future = bars.iloc[cut:].iloc[::-1].set_axis(bars.index[cut:])
            part = pd.concat([part, future.assign(**future[numbers] * 1.7)])
        known_until = stamps[cut - 1] + MINUTE_NS
        for minutes, frame in {n: resample_bars(part, market("cme"), n) for n in lengths}.items():
            full = whole[minutes]
            rows = int((full.known_at <= known_until).sum())
            assert int((frame.known_at <= known_until).sum()) == rows
            if not absurd:
                assert len(frame) == rows  # the bucket in which the feed stops is not emitted
            for name in COLUMNS:
                assert getattr(frame, name)[:rows].tobytes() == getattr(full, name)[:rows].tobytes(), name

    check()


def test_bars_pushed_in_chunks_and_restored_equal_whole_frame(gappy_minutes):
    bars, rng = gappy_minutes("2024-11-26", 6, rolls=12), np.random.default_rng(1)
    cme = market("cme")
    for minutes, most in ((5, 3000), (25, 20), (1440, 600)):
        stream, rows, at = BarStream(cme, minutes), [], 0
        while at < len(bars):
            size = int(rng.integers(0, most))
            rows += as_rows(stream.push(bars.iloc[at : at + size]))
            state, stream = json.dumps(stream.get_state()), BarStream(cme, minutes)
            stream.load_state(json.loads(state))
            at += size
        assert rows == as_rows(resample_bars(bars, cme, minutes))


def test_stream_refuses_late_bars():
    bars, stream = synthetic_bars(2), BarStream(market("cme"), 5)
    stream.push(bars.iloc[:100])
    before = stream.get_state()
    with pytest.raises(BarsError, match=r"row 0.*before the bar before it ends"):
        stream.push(bars.iloc[99:120])
    assert stream.get_state() == before
    stream.advance(bars.index[102].value)
    restored = BarStream(market("cme"), 5)
    restored.load_state(stream.get_state())
    with pytest.raises(BarsError, match="too late"):
        restored.push(bars.iloc[101:120])


@pytest.mark.parametrize("calendar", ["cme", "us_equity", "24h"])
def test_trading_stretches_equal_sessions_of(calendar):
    rng = np.random.default_rng(4)
    first, last = (pd.Timestamp(f"{year}-06-01").value // MINUTE_NS for year in (2016, 2019))
    moments = np.sort(rng.integers(first, last, 20_000)) * MINUTE_NS
    printed, table = assign_sessions(moments, calendar), trading_intervals(np.unique(moments // DAY_NS), calendar)
    opened, begin, close, session, _ = table
    assert (begin[1:] >= close[:-1]).all()
    k = np.searchsorted(begin, moments, side="right") - 1
    inside = (k >= 0) & (moments < close[k])
    assert inside.tolist() == printed.inside.tolist()
    for column, want in ((session, printed.id), (opened, printed.open_ns), (close, printed.close_ns)):
        assert column[k][inside].tolist() == want[inside].tolist()


def test_base_frame_bucket_at_session_end_equals_hand_computed_rows():
    # Wednesday 10 January 2024: the session ends 22:00 UTC (16:00 Chicago); the last 50-minute bucket starts 21:30.
    stamps = pd.to_datetime(["2024-01-10 21:08", "2024-01-10 21:12", "2024-01-10 21:40", "2024-01-10 23:05"], utc=True)
    bars = pd.DataFrame({"open": 1.0, "high": [3.0, 5, 4, 1], "low": 1.0, "close": [2.0, 2, 3, 1], "volume": 1.0})
    frame = resample_bars(bars.set_index(stamps), market("cme"), 50)
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["20:40", "21:30"]
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["21:30", "22:00"]
    assert frame.high.tolist() == [5.0, 4.0] and frame.volume.tolist() == [2.0, 1.0]


def test_base_frame_gap_over_60_minutes_starts_new_segment():
    day = pd.Timestamp("2024-01-10", tz="UTC")
    for silence, segments in ((60, 1), (61, 2)):
        minutes = [*range(0, 30), *range(30 + silence, 120 + silence)]
        bars = pd.DataFrame(1.0, index=day + pd.to_timedelta(minutes, unit="min"), columns=["open", "high", "low"])
        frame = resample_bars(bars.assign(close=1.0, volume=1.0), market("24h"), 5)
        assert len(np.unique(frame.segment)) == segments


def test_base_frame_bars_after_early_close_start_new_bucket_and_segment():
    index = pd.date_range("2024-11-29 18:10", "2024-11-29 18:29", freq="1min", tz="UTC")
    bars = pd.DataFrame(1.0, index=index, columns=["open", "high", "low", "close", "volume"])
    frame = resample_bars(bars, market("cme"), 10)  # index futures close at 18:15 that day
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["18:10", "18:15", "18:20"]
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["18:15", "18:20", "18:30"]
    assert frame.segment.tolist() == [0, 1, 1] and frame.volume.tolist() == [5, 5, 10]


def test_base_frame_hourly_bar_across_cme_early_close_is_known_at_bar_end():
    index = pd.date_range("2024-11-29 17:00", periods=3, freq="60min", tz="UTC")
    bars = pd.DataFrame(1.0, index=index, columns=["open", "high", "low", "close", "volume"])
    frame = resample_bars(bars, market("cme", bar_minutes=60), 60)
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["18:00", "19:00", "20:00"]


def rolled_at(minute: int) -> ResampledBars:
    """Ten minutes of bars, 1 to 10 in price, of which those from `minute` on are of the next contract."""
    index = pd.date_range("2024-01-10 10:00", periods=10, freq="1min", tz="UTC")
    bars = pd.DataFrame({name: np.arange(1.0, 11) for name in ("open", "high", "low", "close")}, index=index)
    bars = bars.assign(volume=1.0, contract=np.where(np.arange(10) < minute, "H24", "M24"))
    return resample_bars(bars, market("24h"), 5)


def test_base_frame_roll_inside_bucket_splits_bucket_and_segment():
    frame = rolled_at(2)  # the new contract's first bar stands at 10:02 and is complete at 10:03
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["10:00", "10:02", "10:05"]
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["10:03", "10:05", "10:10"]
    assert frame.close.tolist() == [2, 5, 10] and frame.open.tolist() == [1, 3, 6]
    assert frame.segment.tolist() == [0, 1, 1]


def test_base_frame_roll_at_last_bar_of_bucket_gives_one_row():
    frame = rolled_at(4)
    assert pd.to_datetime(frame.start).strftime("%H:%M").tolist() == ["10:04", "10:05"]
    assert frame.open.tolist() == [5, 6] and frame.segment.tolist() == [1, 1]
    between = rolled_at(5)
    assert between.open.tolist() == [1, 6] and between.segment.tolist() == [0, 1]


def test_base_frame_hourly_bar_across_session_close_is_known_at_close():
    index = pd.DatetimeIndex(["2024-07-02 18:30", "2024-07-02 19:30", "2024-07-03 15:30", "2024-07-03 16:30"], tz="UTC")
    bars = pd.DataFrame(1.0, index=index, columns=["open", "high", "low", "close", "volume"])
    frame = resample_bars(bars, market("us_equity", bar_minutes=60), 60)  # to 20:00; on the 3rd to 17:00
    assert pd.to_datetime(frame.known_at).strftime("%H:%M").tolist() == ["19:30", "20:00", "16:30", "17:00"]


def test_base_frame_duplicate_unsorted_or_overlapping_bars_raise_bars_error():
    bars = synthetic_bars(2)
    for wrong in (bars.iloc[[0, 1, 1, 2]], bars.iloc[[0, 2, 1]], bars.set_axis(bars.index[:1].append(bars.index[:-1]))):
        with pytest.raises(BarsError, match=r"row [12].*before the bar before it ends"):
            resample_bars(wrong, market("cme"), 5)
    with pytest.raises(BarsError, match="row 1"):
        resample_bars(bars, market("cme", bar_minutes=5), 5)


def test_base_frame_without_bars_is_empty_and_without_volume_has_none():
    empty = synthetic_bars(2).iloc[:0]
    assert len(resample_bars(empty, market("cme"), 5)) == 0
    bars = synthetic_bars(2).drop(columns="volume")
    assert resample_bars(bars, MarketSpec("T", "cme", 0.25, False), 5).volume is None
    with pytest.raises(BarsError, match="volume"):
        resample_bars(bars, market("cme"), 5)


def test_asof_join_random_gaps_equals_brute_force():
    rng = np.random.default_rng(9)
    for size, coarse_size in ((0, 0), (1, 1), (2, 2), (30, 30), (300, 90), (300, 9), (390, 0), *[(390, 8)] * 9):
        base, coarse = (np.sort(rng.choice(400, n, replace=False)) * MINUTE_NS for n in (size, coarse_size))
        brute = [max([j for j in range(len(coarse)) if coarse[j] <= t], default=-1) for t in base]
        assert asof_rows(base, coarse).tolist() == brute
