"""Coarse bars, each with the moment it became known.

A left-labelled 5-minute bar stamped 23:00 is known only at 23:05, so every bar carries `known_at` and everything
downstream is joined on that and never on the label.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS, MarketSpec, sessions_of
from ml_factory.errors import BarsError, SettingsError


@dataclass(frozen=True)
class Frame:
    """Bars of one length as columns; every array has N entries in time order.

    start, known_at : int64 nanoseconds, UTC. `known_at` is when the bar is complete.
    open, high, low, close : float64. volume : float64, or None where the market has none.
    session : int32, the exchange day as days since 1970-01-01 (never a count from the file's start).
    segment : int32, changes at each session edge and at each hole; labels and windows stay inside one.
    """

    minutes: int
    start: np.ndarray
    known_at: np.ndarray
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray | None
    session: np.ndarray
    segment: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


def base_frame(bars: pd.DataFrame, market: MarketSpec, minutes: int, *, bar_minutes: int = 1) -> Frame:
    """Bars of `minutes`, anchored at each session's open; 1440 is the exchange day, whatever its length.

    bars : checked bars, index = UTC starts of `bar_minutes` bars, increasing; bars outside the calendar's sessions
        (the halt, weekends, after hours) are left out.
    A bucket is known at its nominal end, or at the session's close for the last short one; minutes without trades
    neither delay it nor move it. A bucket without any bar does not exist. The bucket in which the feed stops is
    emitted only if the feed's last bar reaches its `known_at`, so more bars never change a row already there.
    """
    if minutes < bar_minutes or minutes % bar_minutes:
        wanted = f"a multiple of the bars' own {bar_minutes}"
        raise SettingsError("A frame cannot be made of these bars", where="minutes", got=minutes, wanted=wanted)
    if market.has_volume and "volume" not in bars:
        step = "prepare anew from a file with volume, or give has_volume=False"
        raise BarsError("The market has volume but the bars have none", where=market.symbol, next_step=step)
    start = bars.index.as_unit("ns").asi8
    feed_end = start[-1] + bar_minutes * MINUTE_NS if len(start) else 0
    sessions = sessions_of(start, market.calendar)
    keep = np.flatnonzero(sessions.inside)
    start, opened, closes = start[keep], sessions.open_ns[keep], sessions.close_ns[keep]
    edge = _edges(sessions.id[keep], closes)
    segment = _segments(start, edge, (market.hole_minutes + bar_minutes) * MINUTE_NS)
    bucket = (start - opened) // (minutes * MINUTE_NS)
    first = np.flatnonzero(edge | (np.diff(bucket, prepend=-1) != 0))
    begin = opened[first] + bucket[first] * (minutes * MINUTE_NS)
    known_at = np.minimum(begin + minutes * MINUTE_NS, closes[first])
    whole = len(first) - int(len(first) > 0 and known_at[-1] > feed_end)
    columns = _columns(bars, keep, first, market.has_volume)
    return Frame(
        minutes=minutes,
        start=begin[:whole],
        known_at=known_at[:whole],
        **{name: None if values is None else values[:whole] for name, values in columns.items()},
        session=sessions.id[keep][first][:whole],
        segment=segment[first][:whole],
    )


def _edges(session: np.ndarray, close: np.ndarray) -> np.ndarray:
    """bool[N]: the first bar of each session, or of what trades on after a scheduled early close."""
    edge = np.ones(len(session), bool)
    edge[1:] = (np.diff(session) != 0) | (np.diff(close) != 0)
    return edge


def _segments(start: np.ndarray, edge: np.ndarray, silence_ns: int) -> np.ndarray:
    """int32[N]: counts up at each session edge and after each hole."""
    hole = np.zeros(len(start), bool)
    hole[1:] = np.diff(start) > silence_ns
    return (np.cumsum(edge | hole) - 1).astype(np.int32)


def _columns(bars: pd.DataFrame, keep: np.ndarray, first: np.ndarray, has_volume: bool) -> dict:
    """Open, high, low, close and volume of each bucket; `first` is the position of its first bar within `keep`."""
    source = {name: bars[name].to_numpy(float)[keep] for name in ("open", "high", "low", "close")}
    if not len(keep):
        empty = {name: values.copy() for name, values in source.items()}
        return empty | {"volume": np.empty(0) if has_volume else None}
    last = np.append(first[1:], len(keep)) - 1
    volume = np.add.reduceat(bars["volume"].to_numpy(float)[keep], first) if has_volume else None
    return {
        "open": source["open"][first],
        "high": np.maximum.reduceat(source["high"], first),
        "low": np.minimum.reduceat(source["low"], first),
        "close": source["close"][last],
        "volume": volume,
    }


def asof_rows(known_at_base: np.ndarray, known_at_coarse: np.ndarray) -> np.ndarray:
    """int64[N]: for each base row the freshest coarse bar with known_at <= the row's own, -1 where there is none.

    Both int64 ns, increasing. At 12:00 the 11:00-12:00 hour is visible, a partial bar never.
    """
    return np.searchsorted(known_at_coarse, known_at_base, side="right").astype(np.int64) - 1
