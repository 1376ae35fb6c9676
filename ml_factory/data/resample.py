"""Resample bars to coarser ones, each with the moment it became known: a file is one push of the stream of a feed.

A left-labelled 5-minute bar stamped 23:00 is known only at 23:05, so every bar carries `known_at`, and downstream joins
use `known_at` and never the label. Sums are taken bar by bar, and what is unfinished is a few plain numbers, so that
splitting the bars anywhere changes no bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.data.sessions import (
    DAY_NS,
    HOLE_MINUTES,
    MINUTE_NS,
    PRICES,
    MarketSpec,
    assign_sessions,
    distinct_in_order,
)
from ml_factory.errors import BarsError, SettingsError

BEFORE_ALL = np.iinfo(np.int64).min
# End of the last bar; start of the last bar inside a session, that session's close, its contract and its segment.
FIRST_POSITION = {"clock": BEFORE_ALL, "previous": BEFORE_ALL, "close": BEFORE_ALL, "contract": -1, "segment": -1}
_NO_BARS = (np.empty(0, np.int64), (np.empty(0),) * 6)


@dataclass(frozen=True)
class ResampledBars:
    """Bars of one length as columns; every array has N entries in time order.

    minutes : length of a bar
    start, known_at : int64 ns UTC, both increasing; `known_at` is when the bar is complete
    open, high, low, close : float64
    volume : float64, or None where the market has none
    session : int32, the exchange day as days since 1970-01-01 (never a count from the file's start)
    segment : int32, changes at each session edge, hole and roll; labels and windows stay inside one, unless they are
        asked to span sessions: then `segments_between_rolls` bounds them
    chain : float64, or None: prices times it do not jump where the contract changes (`apply_roll_adjustment`)
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
    chain: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.start)

    def part(self, first: int, stop: int) -> "ResampledBars":
        """Return bars [first, stop)."""
        return self.map(lambda column: column[first:stop])

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "ResampledBars":
        """Return the bars with each column changed."""
        columns = {name: change(x) for name, x in self.to_dict().items() if isinstance(x, np.ndarray)}
        return replace(self, **columns)

    def to_dict(self) -> dict:
        """Return the columns and `minutes` by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def empty_bars() -> ResampledBars:
    """Return no bars."""
    times, prices, marks = np.empty(0, np.int64), np.empty(0), np.empty(0, np.int32)
    return ResampledBars(1, times, times, *[prices] * 4, None, marks, marks)


def resample_bars(bars: "pd.DataFrame | BarChunk", market: MarketSpec, minutes: int) -> ResampledBars:
    """Resample to bars of `minutes`, anchored at each session's open; 1440 is the exchange day, whatever its length.

    A bucket is known at its nominal end, or at the session's close for the last short one; minutes without trades
    neither delay nor move it. A bucket without any bar does not exist. The bucket in which the feed stops is emitted
    only if the feed's last bar reaches its `known_at`, so more bars never change an existing row. A bucket never mixes
    two contracts. At a roll inside a bucket the old contract's part is known when the new contract's first bar is
    complete; the new part starts at that bar. Where both parts are complete at the same moment, the old part is left
    out: one row a moment, and the most recent.

    Parameters
    ----------
    bars : checked bars, index = UTC starts, increasing; bars outside the calendar's sessions (the halt, weekends, after
        hours) are left out. The optional column `contract` names each bar's contract; `chain` is as in
        `ResampledBars`
    market : the market
    minutes : length of the new bars
    """
    return BarStream(market, minutes).push(bars)


def resample_minute_bars_for_labels(bars: pd.DataFrame, market: MarketSpec, base: int) -> ResampledBars | None:
    """Return the raw bars inside the base bars, which labels are resolved with; None where both are equal."""
    return None if base == market.bar_minutes else resample_bars(bars, market, market.bar_minutes)


class BarChunk(NamedTuple):
    """Bars as arrays.

    start : int64[N] ns, UTC
    columns : open, high, low, close, volume, chain, each float64[N] (the last two empty where absent)
    contract : names[N], or None
    """

    start: np.ndarray
    columns: tuple[np.ndarray, ...]
    contract: pd.Series | None

    def part(self, first: int, stop: int) -> "BarChunk":
        """Return rows [first, stop)."""
        columns = tuple(column[first:stop] for column in self.columns)
        contract = None if self.contract is None else self.contract.iloc[first:stop]
        return BarChunk(self.start[first:stop], columns, contract)


def to_bar_chunk(bars: pd.DataFrame, market: MarketSpec) -> BarChunk:
    """Return the bars as arrays, not copied where they are float64; raise BarsError where volume is absent.

    The chain is there with the contracts, whether or not one has changed yet: a later roll adds no column.
    """
    if market.has_volume and "volume" not in bars:
        step = "give bars with volume, as those that were prepared have it"
        raise BarsError("The market has volume but the bars have none", where=market.symbol, next_step=step)
    columns = [bars[name].to_numpy(float) for name in PRICES]
    columns.append(bars["volume"].to_numpy(float) if market.has_volume else np.empty(0))
    columns.append(bars["chain"].to_numpy(float) if "chain" in bars else np.empty(0))
    return BarChunk(bars.index.as_unit("ns").asi8, tuple(columns), bars.get("contract"))


def _read_only(values: np.ndarray) -> np.ndarray:
    """Return a contiguous read-only view: pandas 2 gives writable arrays, 3 does not; numba compiles for each."""
    view = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view


def apply_roll_adjustment(frame: ResampledBars) -> ResampledBars:
    """Return the frame at prices without steps at rolls, for features: no return mixes two contracts."""
    if frame.chain is None:
        return frame
    return replace(frame, **{name: getattr(frame, name) * frame.chain for name in PRICES}, chain=None)


def segments_between_rolls(frame: ResampledBars, before: tuple[float, int] = (1.0, 0)) -> np.ndarray:
    """Return int32[N], which changes only where the price steps to another contract's.

    It bounds labels and windows that span sessions and holes. Without contracts all bars are one stretch.

    before : chain and stretch of the bar before the first one, for bars that arrive in chunks
    """
    chain = np.ones(len(frame)) if frame.chain is None else frame.chain
    return np.cumsum(np.diff(chain, prepend=before[0]) != 0, dtype=np.int32) + np.int32(before[1])


def known_at_index(moments: np.ndarray) -> pd.DatetimeIndex:
    """Return these moments (int64 ns, UTC) as the index of a table of rows."""
    return pd.DatetimeIndex(np.ascontiguousarray(moments).view("M8[ns]"), tz="UTC", name="known_at")


def asof_rows(known_at_base: np.ndarray, known_at_coarse: np.ndarray) -> np.ndarray:
    """Return for each base row the latest coarse bar with known_at <= the row's own, int64[N], -1 where there is none.

    Both int64 ns, increasing. At 12:00 the 11:00-12:00 hour is visible, a partial bar never.
    """
    return np.searchsorted(known_at_coarse, known_at_base, side="right") - 1


class BarStream:
    """Bars of one length out of a feed, each emitted once, in order, as soon as it is known.

    Segments are counted from the first bar ever pushed; the count is part of the state, which is saved exactly.

    market, minutes : as in `resample_bars`
    """

    def __init__(self, market: MarketSpec, minutes: int):
        if minutes < market.bar_minutes or minutes % market.bar_minutes:
            wanted = f"a multiple of the bars' own {market.bar_minutes}"
            step = "give FeatureSpec(base_minutes=..., frames=...) of such multiples, or bars that divide the frames"
            raise SettingsError(
                "A frame cannot be made of these bars", where="minutes", got=minutes, wanted=wanted, next_step=step
            )
        self.market, self.minutes, self._bar_ns = market, minutes, market.bar_minutes * MINUTE_NS
        self._position: dict[str, int] = dict(FIRST_POSITION)
        # The unfinished bucket: start, until, known_at, session, segment, whether it is there; prices, volume, chain.
        self._marks, self._prices = np.zeros(6, np.int64), np.zeros(6)
        self._now = BEFORE_ALL
        self._contracts: list[str] = []

    def push(self, bars: pd.DataFrame | BarChunk) -> ResampledBars:
        """Return the bars that these minutes complete; the minutes are later than all pushed before.

        To feed several streams, `to_bar_chunk(bars, market)` reads the table once for all. A bar that was complete at
        the time passed to `advance` is refused: its bucket may have been emitted.
        """
        start, columns, names = bars if isinstance(bars, BarChunk) else to_bar_chunk(bars, self.market)
        if not len(start):
            none = np.empty(0, np.int64)
            return self._emit(*_NO_BARS, none, none, np.empty(0, bool), np.empty((5, 0), np.int64))
        if start[0] + self._bar_ns <= self._now:
            wanted = f"bars that end after {pd.Timestamp(self._now, tz='UTC')}, the time last passed to advance"
            step = "push the bars of a minute before advancing the clock to its end"
            got = str(pd.Timestamp(start[0], tz="UTC"))
            raise BarsError("A bar comes too late", where="row 0", got=got, wanted=wanted, next_step=step)
        contract, week = _contract_positions(names, self._contracts), int(start[0] // (7 * DAY_NS))
        if start[-1] < (week + 1) * 7 * DAY_NS:
            intervals = _intervals_of_week(week, self.market.calendar)
        else:
            intervals = trading_intervals(distinct_in_order(start // DAY_NS), self.market.calendar)
        silence_ns = HOLE_MINUTES * MINUTE_NS + self._bar_ns
        found = segments_of_bars(start, contract, intervals, self._bar_ns, silence_ns, self._position)
        inside, interval, segment, rolled, self._position = found
        if not inside.all():
            start, columns = start[inside], tuple(one[inside] if len(one) else one for one in columns)
        return self._emit(start, columns, interval, segment, rolled, intervals)

    def advance(self, now_ns: int) -> ResampledBars:
        """Return the bar, if any, that is complete at `now_ns` (UTC); call it once all bars up to then are pushed."""
        self._now = max(self._now, int(now_ns))
        return self.push(BarChunk(*_NO_BARS, None))

    def get_state(self) -> dict:
        """Return all that later buckets depend on, as plain numbers and names, for `load_state`."""
        return {
            "now": self._now, "contracts": list(self._contracts), "position": dict(self._position),
            "marks": self._marks.tolist(), "prices": self._prices.tolist(),
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state` of a stream with this market and length."""
        self._now, self._contracts, self._position = state["now"], list(state["contracts"]), dict(state["position"])
        self._marks, self._prices = np.array(state["marks"], np.int64), np.array(state["prices"], np.float64)

    def _emit(
        self, start: np.ndarray, columns: tuple, interval: np.ndarray, segment: np.ndarray, rolled: np.ndarray,
        intervals: np.ndarray,
    ) -> ResampledBars:  # fmt: skip
        """Return the buckets that these bars, all inside sessions, and the clock complete."""
        marks, prices = np.empty((4, len(start) + 1), np.int64), np.empty((6, len(start) + 1))
        has_chain = bool(len(columns[5]) or (self._marks[5] and self._prices[5] != 1.0))
        count = _fill_buckets(
            _read_only(start), tuple(map(_read_only, columns)), interval, segment, rolled, intervals,
            self.minutes * MINUTE_NS, self._bar_ns, max(self._now, self._position["clock"]),
            self._marks, self._prices, marks, prices,
        )  # fmt: skip
        marks, prices = marks[:, :count], prices[:, :count]
        return ResampledBars(
            self.minutes, marks[0], marks[1], *prices[:4], prices[4] if self.market.has_volume else None,
            marks[2].astype(np.int32), marks[3].astype(np.int32), prices[5] if has_chain else None,
        )  # fmt: skip


@lru_cache(maxsize=64)
def _intervals_of_week(week: int, calendar: str) -> np.ndarray:
    """Return `trading_intervals` of seven days, the same for all bars of a feed that fall into them."""
    return trading_intervals(np.arange(7 * week, 7 * week + 7), calendar)


def trading_intervals(days: np.ndarray, calendar: str) -> np.ndarray:
    """Return every trading interval that touches the given UTC days, and adjacent ones: int64[5, K], increasing.

    Trading without a break, [begin, close): a session, or the trading after its scheduled early close. The rows: open
    of the session, begin, close, session, and whether nothing trades right after the close, so that a bar which
    reaches over the close is complete there.

    days : int64, days since 1970-01-01. Noon UTC lies inside one exchange day in every calendar, so the noons around a
        day identify its sessions; `assign_sessions` is called a few times whatever the number of bars
    """
    noons = np.unique(np.asarray(days, np.int64)[:, None] + np.array([-1, 0, 1])) * DAY_NS + DAY_NS // 2
    opened = begin = np.unique(assign_sessions(noons, calendar).open_ns)
    found = []
    while len(begin):
        at = assign_sessions(begin, calendar)
        trading = at.inside & (at.open_ns == opened)
        found.append(np.stack([opened[trading], begin[trading], at.close_ns[trading], at.id[trading].astype(np.int64)]))
        opened, begin = found[-1][0], found[-1][2]  # the same session may continue after this close
    table = np.concatenate(found, axis=1) if found else np.empty((4, 0), np.int64)
    table = table[:, np.argsort(table[1])]
    return np.concatenate([table, [np.append(table[1, 1:], BEFORE_ALL)[: table.shape[1]] != table[2]]])


def segments_of_bars(
    start: np.ndarray,
    contract: np.ndarray,
    intervals: np.ndarray,
    bar_ns: int,
    silence_ns: int,
    position: Mapping[str, int] = FIRST_POSITION,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """Split bars into segments inside one trading interval, one contract and no hole.

    Parameters
    ----------
    start : int64[N] ns
    contract : int64[N] codes, or empty
    intervals : of `trading_intervals`
    bar_ns : length of a bar
    silence_ns : a longer step between two starts is a hole
    position : where the bars before ended

    Returns
    -------
    (bool[N] inside a session; of these bars the interval, the segment, and whether the contract changed; the position
    after the last). Raises BarsError for a bar that starts before the previous one ends
    """  # fmt: skip
    wrong = np.flatnonzero(start < np.append(position["clock"], start[:-1] + bar_ns))
    if len(wrong):
        wanted = f"bars of {bar_ns // MINUTE_NS} min in time order, none twice"
        step = "pass the bars through validate_bars, or give their own bar_minutes"
        got = f"a bar at {pd.Timestamp(start[wrong[0]], tz='UTC')}, before the bar before it ends"
        raise BarsError("Bars overlap", where=f"row {wrong[0]}", got=got, wanted=wanted, next_step=step)
    interval = np.searchsorted(intervals[1], start, side="right") - 1
    inside = start < np.append(intervals[2], BEFORE_ALL)[interval]
    after = dict(position) | {"clock": int(start[-1]) + bar_ns}
    t, interval, contract = start[inside], interval[inside], contract[inside] if len(contract) else contract
    if not len(t):
        return inside, interval, interval, inside[:0], after
    close = intervals[2, interval]
    rolled = np.diff(contract, prepend=position["contract"]) != 0 if len(contract) else np.zeros(len(t), bool)
    edge = (close != np.append(position["close"], close[:-1])) | (
        t > np.append(position["previous"], t[:-1]) + silence_ns
    )
    segment = position["segment"] + np.cumsum(edge | rolled)
    after |= {"previous": int(t[-1]), "close": int(close[-1]), "segment": int(segment[-1])}
    return inside, interval, segment, rolled, after | ({"contract": int(contract[-1])} if len(contract) else {})


def _contract_positions(names: pd.Series | None, seen: list[str]) -> np.ndarray:
    """Return int64[N] positions in `seen`, extended by new names; empty without contracts."""
    if names is None:
        return np.empty(0, np.int64)
    codes, found = pd.factorize(names, use_na_sentinel=False)
    found = [str(name) for name in found]
    seen += [name for name in dict.fromkeys(found) if name not in seen]
    return np.array([seen.index(name) for name in found], np.int64)[codes]


@njit(cache=True, nogil=True)
def _fill_buckets(start, bars, interval, segment, rolled, intervals, width_ns, bar_ns, clock, now, held, marks, prices):
    """Fill the columns of marks and prices from 0 on; return the number of finished buckets.

    Parameters
    ----------
    start, interval, segment, rolled : of N bars, see `segments_of_bars`
    bars : open, high, low, close, volume, chain, each float64[N] (the last two may be empty)
    width_ns, bar_ns : length of a bucket and of a bar
    clock : the last bucket is finished if this moment reaches its `known_at`
    now, held : the unfinished bucket, updated: start, until, known_at, session, segment, 1 if there; as `bars`
    marks : int64[4, M] start, known_at, session, segment
    prices : float64[6, M], as bars
    """
    opens, highs, lows, closes, volumes, chain = bars
    done = 0
    for row in range(len(start)):
        t, k = start[row], interval[row]
        if now[5] == 0 or t >= now[1] or rolled[row]:
            inside = now[5] == 1 and t < now[1]  # only a roll ends a bucket before its time
            begin = intervals[0, k] + (t - intervals[0, k]) // width_ns * width_ns
            until = min(begin + width_ns, intervals[2, k])
            if inside:
                now[2] = t + bar_ns  # the new contract's first bar, once complete, shows that it is over
            if now[5] == 1 and not (inside and until <= now[2]):
                done = _write_bucket(now, held, marks, prices, done)
            now[0], now[1], now[2] = t if inside else max(begin, intervals[1, k]), until, until
            now[3], now[4], now[5] = intervals[3, k], segment[row], 1
            held[0], held[1], held[2], held[4] = opens[row], highs[row], lows[row], 0.0
            held[5] = chain[row] if len(chain) > 0 else 1.0  # one contract a bucket, one factor
        held[1], held[2], held[3] = max(held[1], highs[row]), min(held[2], lows[row]), closes[row]
        if len(volumes) > 0:
            held[4] += volumes[row]
        if intervals[4, k] == 0:  # a bar that reaches over the close contains trades after it
            now[2] = max(now[2], t + bar_ns)
    if now[5] == 1 and now[2] <= clock:
        done = _write_bucket(now, held, marks, prices, done)
    return done


@njit(cache=True, nogil=True)
def _write_bucket(now, held, marks, prices, at):
    """Write the unfinished bucket as column `at`, finished; return at + 1."""
    marks[0, at], marks[1, at], marks[2, at], marks[3, at] = now[0], now[2], now[3], now[4]
    for k in range(6):
        prices[k, at] = held[k]
    now[5] = 0
    return at + 1
