"""Features of 5-minute bars: those of the minutes they were made of, and the same from a feed, to the bit."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from tests.contract.doors import FeatureSpec, FeatureStream, MarketSpec, build_features

SPEC = FeatureSpec()  # frames of 5, 15, 30 and 60 minutes, every family


def longer(bars: pd.DataFrame, minutes: int = 5) -> pd.DataFrame:
    """Bars of so many minutes, made by pandas; a bar whose minutes are all absent does not exist."""
    how = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    return bars.resample(f"{minutes}min").agg(how).dropna(subset=["close"])


def market(calendar: str, bar_minutes: int) -> MarketSpec:
    return MarketSpec("MES", calendar, 0.25, True, bar_minutes=bar_minutes)


@pytest.mark.parametrize("calendar", ["cme", "us_equity"])
def test_build_features_of_5_minute_bars_equal_features_of_1_minute_bars(calendar):
    """Clocks change on 10 March, minutes are absent here and there, and whole 5-minute bars with them."""
    days = 14 if calendar == "cme" else 30
    minutes = synthetic_bars(days=days, seed=2, start="2024-02-26", calendar=calendar, missing=0.1)
    minutes = minutes.drop(minutes.index[4_000:4_017])
    five = longer(minutes)
    held = minutes.groupby(minutes.index.floor("5min")).size()
    assert len(five) == len(held) and (held < 5).sum() > 500 and (np.diff(five.index) > np.timedelta64(10, "m")).any()
    own, wanted = build_features(five, market(calendar, 5), SPEC), build_features(minutes, market(calendar, 1), SPEC)
    assert own.names == wanted.names and own.frame_staleness == wanted.frame_staleness
    assert len(own) > 1_000 and {"15m", "30m", "60m"} == set(own.frame_staleness)
    for name in ("known_at", "segment", "close"):
        assert getattr(own, name).tobytes() == getattr(wanted, name).tobytes(), name
    unequal = (own.values.view(np.uint32) != wanted.values.view(np.uint32)).any(axis=0)
    assert [name for name, differs in zip(own.names, unequal, strict=True) if differs] == []
    # A row stands at its bar's end: before it the bar is not there, and with it the row is.
    bar = int(np.searchsorted(five.index.as_unit("ns").asi8, own.known_at[500])) - 1
    assert five.index[bar] + pd.Timedelta(minutes=5) == pd.Timestamp(own.known_at[500], tz="UTC")
    before, after = (build_features(five.iloc[:stop], market(calendar, 5), SPEC) for stop in (bar, bar + 1))
    assert before.known_at[-1] < own.known_at[500] == after.known_at[-1]
    assert after.values[-1].tobytes() == own.values[500].tobytes()


def test_feature_stream_of_other_bar_length_rejects_state_and_frames():
    stream = FeatureStream(market("cme", 5), SPEC)
    with pytest.raises(ValueError, match="of another"):
        FeatureStream(market("cme", 1), SPEC).load_state(stream.get_state())
    with pytest.raises(ValueError, match="A frame cannot be made of these bars"):
        FeatureStream(market("cme", 10), SPEC)
