"""Checks of single bars of a feed: gaps, jumps of unit, another tick, stuck prices, and the clock."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from ml_factory.data.quality import OFF_SHARE, ON_SHARE, TICK_ERROR
from ml_factory.data.resample import BarChunk
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec, assign_sessions, scheduled_session_days
from ml_factory.inference.guard.alarms import Event
from ml_factory.inference.guard.settings import Finding, GuardSettings


class BarChecks:
    """Checks of a feed's bars that need no distribution; their answer does not depend on how the bars are pushed.

    limits : "gap_minutes", "unit_jump", "stuck_bars" of the bundle's reference, where it has one
    off_tick : share of the bars of training with prices off the tick
    """

    def __init__(self, market: MarketSpec, settings: GuardSettings, limits: Mapping, off_tick: float):
        self._market, self._settings = market, settings
        self._gap = settings.gap_minutes or limits.get("gap_minutes") or market.hole_minutes
        self._jump = settings.unit_jump or limits.get("unit_jump") or float(np.log(2))
        self._stuck_bars = settings.stuck_bars or limits.get("stuck_bars") or 60
        self._on_tick = market.tick is not None and off_tick <= ON_SHARE
        self._end, self._close, self._flat = 0, np.nan, 0
        self._off = np.zeros(settings.window_bars, bool)

    def push(self, chunk: BarChunk, first: int) -> list[Event]:
        """Return the events of the next bars; `first` is the number of the first of them."""
        found = [*self._gaps(chunk, first), *self._jumps(chunk, first)]
        found += [*self._off_tick(chunk, first), *self._stuck(chunk, first)]
        self._end = int(chunk.start[-1]) + self._market.bar_minutes * MINUTE_NS
        self._close = float(chunk.columns[3][-1])
        return found

    def _gaps(self, chunk: BarChunk, first: int) -> Iterator[Event]:
        ends = np.append(self._end, chunk.start[:-1] + self._market.bar_minutes * MINUTE_NS)
        rows = np.flatnonzero((chunk.start - ends > self._gap * MINUTE_NS) & (ends > 0))
        for row in rows.tolist():
            absent = open_minutes(int(ends[row]), int(chunk.start[row]), self._market.calendar)
            if absent > self._gap:
                message = f"{absent} open minutes without a bar before {_clock(int(chunk.start[row]))}, "
                yield Event(first + row, "gap", message + f"at most {self._gap} wanted")

    def _jumps(self, chunk: BarChunk, first: int) -> Iterator[Event]:
        before = np.append(self._close, chunk.columns[3][:-1])
        ratio = chunk.columns[0] / before
        limit = float(np.exp(self._jump))
        for row in np.flatnonzero((ratio > limit) | (ratio < 1 / limit)).tolist():
            message = f"the price at {_clock(int(chunk.start[row]))} is {ratio[row]:.4g} times that of the bar before, "
            yield Event(first + row, "unit", message + f"between {1 / limit:.3g} and {limit:.3g} wanted")

    def _off_tick(self, chunk: BarChunk, first: int) -> Iterator[Event]:
        if not self._on_tick or self._market.tick is None:
            return
        off = off_tick_bars(chunk, self._market.tick)
        window = len(self._off)
        joined = np.concatenate([self._off, off])
        total = np.append(0, np.cumsum(joined))
        share = (total[window + 1 :] - total[1 : len(off) + 1]) / window
        self._off = joined[len(joined) - window :].copy()
        for row in np.flatnonzero(share > OFF_SHARE / 4).tolist():
            message = f"{share[row]:.0%} of the last {window} bars have prices off the tick of {self._market.tick:g}, "
            yield Event(first + row, "tick", message + f"as in training at most {ON_SHARE:.0%} wanted")

    def _stuck(self, chunk: BarChunk, first: int) -> Iterator[Event]:
        _, high, low, close = chunk.columns[:4]
        flat = (high == low) & (close == np.append(self._close, close[:-1]))
        place = np.arange(len(flat))
        since = np.maximum.accumulate(np.where(flat, -1, place))  # the last bar with a move
        run = np.where(since < 0, self._flat + place + 1, place - since)
        self._flat = int(run[-1])
        for row in np.flatnonzero(run >= self._stuck_bars).tolist():
            message = f"{run[row]} bars in a row at the price {close[row]:g}, fewer than {self._stuck_bars} wanted"
            yield Event(first + row, "stuck", message)

    def get_state(self) -> dict:
        return {"end": self._end, "close": self._close, "flat": self._flat, "off": self._off.astype(np.int8)}

    def load_state(self, state: Mapping) -> None:
        self._end, self._close, self._flat = int(state["end"]), float(state["close"]), int(state["flat"])
        window = len(self._off)  # of these settings; the state may be of others
        self._off = np.append(np.zeros(window, bool), np.array(state["off"], dtype=bool))[-window:]


def off_tick_bars(chunk: BarChunk, tick: float) -> np.ndarray:
    """Return which bars hold a price that is no multiple of the tick, bool (N,)."""
    off = np.zeros(len(chunk.start), bool)
    with np.errstate(over="ignore", invalid="ignore"):  # prices of a damaged state, beyond any number of ticks
        for column in chunk.columns[:4]:
            steps = column / tick
            off |= ~(np.abs(steps - np.round(steps)) <= TICK_ERROR)
    return off


def check_clock(last_end: int, now: pd.Timestamp, market: MarketSpec, settings: GuardSettings) -> list[Finding]:
    """Return the finding on a newest bar that is too old, or later than the clock.

    last_end : end of the newest bar, UTC ns
    """
    now = now.tz_convert("UTC").as_unit("ns")
    allowed = settings.stale_minutes + market.bar_minutes
    ahead = (last_end - now.value) / MINUTE_NS
    if ahead > market.bar_minutes:
        message = f"the newest bar ends at {_clock(last_end)}, {ahead:.0f} min after the clock ({_clock(now.value)}), "
        return [Finding("stale", settings.stale, message + "bars of the past wanted: is the feed in another zone?")]
    silent = open_minutes(last_end, now.value, market.calendar) if -ahead > allowed else 0
    if silent <= allowed:
        return []
    message = f"the newest bar ended at {_clock(last_end)}, {silent} open minutes before {_clock(now.value)}, "
    return [Finding("stale", settings.stale, message + f"at most {allowed} wanted")]


def open_minutes(begin: int, end: int, calendar: str) -> int:
    """Return the minutes between two moments (UTC ns) in which the market is open by its calendar, begun ones too."""
    if end <= begin:
        return 0
    first, last = assign_sessions(np.array([begin, end - 1]), calendar).id
    days, lengths = scheduled_session_days(calendar, int(first), int(last))
    opens = assign_sessions(days * DAY_NS + 15 * 60 * MINUTE_NS, calendar).open_ns  # within each day's session
    spans = np.minimum(opens + lengths * MINUTE_NS, end) - np.maximum(opens, begin)
    return int((-(-np.maximum(spans, 0) // MINUTE_NS)).sum())


def _clock(moment_ns: int) -> str:
    return f"{pd.Timestamp(moment_ns, tz='UTC'):%Y-%m-%d %H:%M} UTC"
