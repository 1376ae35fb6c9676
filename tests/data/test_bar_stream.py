"""A feed in chunks of any size, stopped and restored anywhere, against the same bars as one file."""

import json
import re
from itertools import product

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.resample import BarStream, ResampledBars, resample_bars, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError

COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")


def market(calendar: str = "cme", **settings) -> MarketSpec:
    return MarketSpec("TEST", calendar, 0.25, True, **settings)


def assert_same_bits(parts: list[ResampledBars], whole: ResampledBars) -> None:
    for name in COLUMNS:
        if getattr(whole, name) is None:
            assert all(getattr(part, name) is None for part in parts)
            continue
        got = np.concatenate([getattr(part, name) for part in parts])
        assert got.dtype == getattr(whole, name).dtype
        assert got.tobytes() == getattr(whole, name).tobytes(), name


def restored(stream: BarStream) -> BarStream:
    """Another stream in the same state, by way of a text file."""
    other = BarStream(stream.market, stream.minutes, bar_minutes=stream.bar_minutes)
    other.load_state(json.loads(json.dumps(stream.get_state())))
    return other


# Daylight saving; early closes on 28 and 29 November.
@pytest.mark.parametrize(("calendar", "start", "rolls"), [
    *product(("cme", "us_equity"), ("2024-03-06", "2024-11-26"), (12,)), ("24h", "2024-03-06", 12),
    ("cme", "2024-11-26", 0),
])  # fmt: skip
def test_frame_stream_random_chunks_equal_whole_frame_bitwise(gappy_minutes, calendar, start, rolls):
    bars, rng = gappy_minutes(start, 6, rolls=rolls), np.random.default_rng(1)
    for minutes, (most, count) in product((5, 25, 1440), ((3, 600), (40, len(bars)), (3000, len(bars)))):
        stream, parts, at, part = BarStream(market(calendar), minutes), [], 0, bars.iloc[:count]
        while at < len(part):
            size = int(rng.integers(0, most))
            chunk = part.iloc[at : at + size]
            parts.append(stream.push(to_bar_chunk(chunk, market(calendar)) if at % 2 else chunk))
            stream = restored(stream) if rng.random() < 0.2 else stream
            at += size
        assert_same_bits(parts, resample_bars(part, market(calendar), minutes))


def test_frame_stream_advance_past_untraded_minutes_completes_bucket():
    bars = synthetic_bars(2, "null", 0, "24h")
    noon = bars.index.searchsorted(bars.index[0].normalize() + pd.Timedelta("12h"))
    quiet = bars.drop(bars.index[noon - 3 : noon])  # nothing trades from 11:57 on
    at = noon - 3
    stream, twelve = BarStream(market("24h"), 60), bars.index[noon].value
    parts = [stream.push(quiet.iloc[:at])]
    assert parts[0].known_at[-1] == twelve - 60 * MINUTE_NS
    assert len(stream.advance(twelve - 1)) == 0
    parts.append(stream.advance(twelve))
    assert parts[1].known_at.tolist() == [twelve] and len(stream.advance(twelve)) == 0
    stream = restored(stream)
    parts.append(stream.push(quiet.iloc[at:]))
    assert_same_bits(parts, resample_bars(quiet, market("24h"), 60))


def test_frame_stream_advance_every_minute_equals_whole_frame_bitwise(gappy_minutes):
    bars = gappy_minutes("2024-11-29", 1, rolls=5)
    stream, parts, stamps = BarStream(market(), 15), [], bars.index.as_unit("ns").asi8
    for minute in range(int(stamps[0]), int(stamps[-1]) + MINUTE_NS, MINUTE_NS):
        here = np.searchsorted(stamps, minute)
        if stamps[here] == minute:
            parts.append(stream.push(bars.iloc[here : here + 1]))
        parts.append(stream.advance(minute + MINUTE_NS))
    whole = resample_bars(bars, market(), 15)
    got = np.concatenate([part.start for part in parts])
    # told by the clock that a bucket's time is over, the stream needs no bar to prove it; a roll still cuts
    assert got.tobytes() == whole.start.tobytes()
    assert_same_bits(parts, whole)


def test_frame_stream_late_or_duplicate_bar_raises_and_keeps_state(gappy_minutes):
    bars = synthetic_bars(2)
    stream = BarStream(market(), 5)
    parts = [stream.push(bars.iloc[:100])]
    before = stream.get_state()
    with pytest.raises(BarsError, match=r"row 0.*before the bar before it ends"):
        stream.push(bars.iloc[99:120])
    assert stream.get_state() == before
    parts.append(stream.advance(bars.index[102].value))
    stream = restored(stream)
    for late in (bars.iloc[101:120], to_bar_chunk(bars.iloc[101:120], market())):
        with pytest.raises(BarsError, match=f"too late.*{re.escape(str(bars.index[101]))}"):
            stream.push(late)
    parts.append(stream.push(bars.iloc[102:]))
    without = bars.drop(bars.index[100:102])
    assert_same_bits(parts, resample_bars(without, market(), 5))


def test_frame_stream_load_state_with_other_settings_raises_settings_error():
    state = BarStream(market(), 5).get_state()
    for other in (
        BarStream(market(), 15),
        BarStream(market("24h"), 5),
        BarStream(market(), 5, bar_minutes=5),
        BarStream(market(hole_minutes=30), 5),
    ):
        with pytest.raises(SettingsError, match="another stream"):
            other.load_state(state)
    with pytest.raises(SettingsError, match="multiple"):
        BarStream(market(), 5, bar_minutes=2)
