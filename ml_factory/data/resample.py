"""Resample bars to coarser ones, each with the moment it became known.

A left-labelled 5-minute bar stamped 23:00 is known only at 23:05, so every bar carries `known_at`, and downstream joins
use `known_at` and never the label.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ml_factory.data import resample_kernels
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError

PRICES = ("open", "high", "low", "close")


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
        cut = slice(first, stop)
        return ResampledBars(**{n: x[cut] if isinstance(x, np.ndarray) else x for n, x in self.to_dict().items()})

    def to_dict(self) -> dict:
        """Return the columns and `minutes` by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def empty_bars(minutes: int = 1) -> ResampledBars:
    """Return no bars."""
    times, prices, marks = np.empty(0, np.int64), np.empty(0), np.empty(0, np.int32)
    return ResampledBars(minutes, times, times, *[prices] * 4, None, marks, marks)


def resample_bars(
    bars: pd.DataFrame, market: MarketSpec, minutes: int, *, bar_minutes: int | None = None
) -> ResampledBars:
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
        hours) are left out. The optional column `contract` names each bar's contract; `chain` is as in `Frame`
    market : the market
    minutes : length of the new bars
    bar_minutes : length of the bars; None: the market's
    """
    return resample_bars_to_lengths(bars, market, (minutes,), bar_minutes=bar_minutes)[minutes]


def resample_bars_to_lengths(
    bars: pd.DataFrame, market: MarketSpec, minutes: Iterable[int], *, bar_minutes: int | None = None, threads: int = 1
) -> dict[int, ResampledBars]:
    """Resample to several lengths at once as `resample_bars`: sessions, holes and rolls are looked up once for all.

    Where `minutes` is the bars' own length and every bar is inside a session, prices are views of the bars' columns
    (read-only where pandas makes them so).

    threads : frames made in parallel; the bits do not depend on it
    """
    lengths, bar_minutes = tuple(minutes), bar_minutes or market.bar_minutes
    for length in lengths:
        check_resample_length(length, bar_minutes)
    start, columns, names = chunk = to_bar_chunk(bars, market)
    contract = contract_positions(names, [])
    table = resample_kernels.trading_intervals(resample_kernels.utc_days_of_bars(start), market.calendar)
    bar_ns, silence_ns = bar_minutes * MINUTE_NS, (market.hole_minutes + bar_minutes) * MINUTE_NS
    runs, wrong = resample_kernels.split_into_trading_runs(
        start, contract, table, bar_ns, silence_ns, resample_kernels.initial_bar_kernel_state()
    )
    raise_on_overlapping_bars(chunk, wrong, bar_minutes)

    feed_end = int(start[-1]) + bar_ns if len(start) else 0

    def make(some: tuple[int, ...]) -> list[ResampledBars]:
        own = (
            _frame_without_copy(start, columns, runs, bar_minutes, market.has_volume)
            if some == (bar_minutes,)
            else None
        )
        if own is not None:
            return [own]
        buckets = np.zeros(len(some), resample_kernels.BUCKET)
        return resample_runs(start, columns, runs, some, bar_ns, buckets, feed_end, market.has_volume)

    longer = sorted(set(lengths) - {bar_minutes})
    jobs = [tuple(longer[k::threads]) for k in range(min(threads, len(longer)))]
    jobs += [(bar_minutes,)] * (bar_minutes in lengths)
    if threads == 1 or len(jobs) == 1:
        done = [make(job) for job in jobs]
    else:
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(make, jobs))
    made = {frame.minutes: frame for part in done for frame in part}
    return {length: made[length] for length in lengths}


def resample_base_and_frames(
    bars: pd.DataFrame, market: MarketSpec, base: int, frames: Iterable[int], *, threads: int = 1
) -> tuple[ResampledBars, dict[int, ResampledBars]]:
    """Return the bars of `base` minutes, on which rows are built, and the coarse frames of these lengths."""
    made = resample_bars_to_lengths(bars, market, (base, *frames), threads=threads)
    return made.pop(base), made


def resample_minute_bars_for_labels(bars: pd.DataFrame, market: MarketSpec, base: int) -> ResampledBars | None:
    """Return the raw bars inside the base bars, which labels are resolved with; None where both are equal."""
    return None if base == market.bar_minutes else resample_bars(bars, market, market.bar_minutes)


def check_resample_length(minutes: int, bar_minutes: int) -> None:
    """Raise SettingsError unless frames of `minutes` can be made of bars of `bar_minutes`."""
    if minutes < bar_minutes or minutes % bar_minutes:
        wanted = f"a multiple of the bars' own {bar_minutes}"
        step = "give FeatureSpec(base_minutes=..., frames=...) of such multiples, or bars that divide the frames"
        raise SettingsError(
            "A frame cannot be made of these bars", where="minutes", got=minutes, wanted=wanted, next_step=step
        )


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
        step = "prepare again from a file with volume, or give has_volume=False"
        raise BarsError("The market has volume but the bars have none", where=market.symbol, next_step=step)
    columns = [bars[name].to_numpy(float) for name in PRICES]
    columns.append(bars["volume"].to_numpy(float) if market.has_volume else np.empty(0))
    columns.append(bars["chain"].to_numpy(float) if "chain" in bars else np.empty(0))
    return BarChunk(
        readonly_view(bars.index.as_unit("ns").asi8), tuple(map(readonly_view, columns)), bars.get("contract")
    )


def readonly_view(values: np.ndarray) -> np.ndarray:
    """Return a contiguous read-only view: pandas 2 gives writable arrays, 3 does not; numba compiles for each."""
    view = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view


def contract_positions(names: pd.Series | None, seen: list[str]) -> np.ndarray:
    """Return int64[N] positions in `seen`, extended by new names; empty without contracts."""
    if names is None:
        return np.empty(0, np.int64)
    codes, found = pd.factorize(names, use_na_sentinel=False)
    found = [str(name) for name in found]
    seen += [name for name in dict.fromkeys(found) if name not in seen]
    return np.array([seen.index(name) for name in found], np.int64)[codes]


def raise_on_overlapping_bars(chunk: BarChunk, row: int, bar_minutes: int) -> None:
    """Raise BarsError where `row` (unless -1) starts before the end of the previous bar."""
    if row >= 0:
        wanted = f"bars of {bar_minutes} min in time order, none twice"
        step = "pass the bars through check_bars, or give their own bar_minutes"
        got = f"a bar at {pd.Timestamp(chunk.start[row], tz='UTC')}, before the bar before it ends"
        raise BarsError("Bars overlap", where=f"row {row}", got=got, wanted=wanted, next_step=step)


def resample_runs(
    start: np.ndarray,
    columns: tuple,
    runs: np.ndarray,
    lengths: tuple[int, ...],
    bar_ns: int,
    buckets: np.ndarray,
    clock: int,
    has_volume: bool,
) -> list[ResampledBars]:
    """Return for each length the buckets that these runs complete.

    The last bucket is included if `clock` (ns) reaches its `known_at`.

    buckets : BUCKET[F], the unfinished one of each length before these bars, updated
    """
    widths_ns = np.array(lengths, np.int64) * MINUTE_NS
    begins = np.cumsum([0] + [resample_kernels.max_resampled_bars(start, runs, width) for width in widths_ns.tolist()])
    times, prices = np.empty((2, begins[-1]), np.int64), np.empty((6, begins[-1]))
    marks = np.empty((2, begins[-1]), np.int32)
    rolled = len(columns[5]) > 0 or (buckets["live"] * (buckets["chain"] - 1.0)).any()
    if rolled:
        prices[5] = 1.0
    ends = resample_kernels.resample_frames_kernel(
        start, columns, runs, widths_ns, bar_ns, buckets, begins[:-1], times, prices, marks
    )
    found = []
    for f, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=False)):
        if buckets["live"][f] and buckets["known_at"][f] <= clock:
            end = resample_kernels.write_bucket_kernel(buckets[f : f + 1], times, prices, marks, end)
        volume = prices[4, begin:end] if has_volume else None
        chain = prices[5, begin:end] if rolled else None
        own = *times[:, begin:end], *prices[:4, begin:end], volume, *marks[:, begin:end], chain
        found.append(ResampledBars(lengths[f], *own))
    return found


def _frame_without_copy(
    start: np.ndarray, columns: tuple, runs: np.ndarray, minutes: int, has_volume: bool
) -> ResampledBars | None:
    """Return the bars as a frame without copying; None where a bar is left out or off its session's grid."""
    if (runs["last"] - runs["first"]).sum() < len(start):
        return None
    known_at, marks = np.empty(len(start), np.int64), np.empty((2, len(start)), np.int32)
    if not resample_kernels.unresampled_bars_kernel(start, runs, minutes * MINUTE_NS, known_at, *marks):
        return None
    *prices, volume, chain = columns
    return ResampledBars(
        minutes, start, known_at, *prices, volume if has_volume else None, *marks, chain if len(chain) else None
    )


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


def asof_rows(known_at_base: np.ndarray, known_at_coarse: np.ndarray) -> np.ndarray:
    """Return for each base row the latest coarse bar with known_at <= the row's own, int64[N], -1 where there is none.

    Both int64 ns, increasing. At 12:00 the 11:00-12:00 hour is visible, a partial bar never.
    """
    rows = np.empty(len(known_at_base), np.int64)
    resample_kernels.asof_rows_kernel(readonly_view(known_at_base), readonly_view(known_at_coarse), rows)
    return rows
