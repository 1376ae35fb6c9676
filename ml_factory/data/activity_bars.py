"""Activity bars: volume, dollar and tick-imbalance bars (information-driven bars, López de Prado 2018, chapter 2.3).

They are made of one-minute bars. A bar ends with the minute that reaches its threshold, is known when that minute is
complete, and holds a little more than the threshold; the excess is not carried over. Every session, hole and roll
starts a new bar, and the unfinished bar there is never emitted: no bar spans a night.

The size of a bar is a fact of the market (`MarketSpec.bar_size`): given, or estimated from the first 20 sessions alone.
Bars then begin with the session after these, so that rows up to a moment are the same bits whatever comes after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.argument_checks import ACTIVITY_BARS
from ml_factory.data.bar_stream import BarStream, TimeBarStream
from ml_factory.data.resample import ResampledBars, resample_bars, resample_bars_to_lengths
from ml_factory.data.sessions import INFER_SESSIONS, MarketSpec, assign_sessions, count_rows_of_first_sessions
from ml_factory.errors import BarsError, SettingsError

KINDS = ACTIVITY_BARS
PER_SESSION = 50  # bars a session where the threshold is estimated (the book's 1/50 of the daily volume)

# The unfinished bar, the flow since it began, and the expectations for the next one; `count`: minutes in the bar.
ACTIVITY = np.dtype(
    [(name, "i8") for name in ("start", "count")]
    + [(name, "f8") for name in ("open", "high", "low", "volume", "chain")]
    + [(name, "f8") for name in ("total", "moving", "minutes", "mean", "threshold", "sign", "previous")]
    + [("segment", "i4")]
)


@dataclass(frozen=True)
class ImbalanceBarSpec:
    """Settings of tick-imbalance bars.

    expected_minutes : E[T] before the first bar
    span : bars over which both expectations are averaged, exponentially: E[T] by the bar, E[b v] by the minute
    bound : the threshold stays within this factor of the first one. The book leaves it free; then it diverges, down to
        bars of one minute where the flow is balanced, or up to no bar at all
    """

    expected_minutes: float = 30.0
    span: int = 20
    bound: float = 2.0

    def __post_init__(self):
        for field in ("expected_minutes", "span", "bound"):
            got = getattr(self, field)
            if not (np.isfinite(got) and got >= 1):
                raise SettingsError("No such imbalance bars", where=field, got=got, wanted=">= 1 and finite")


def activity_bars(
    bars: pd.DataFrame, market: MarketSpec, kind: str, size: float | None = None, spec: ImbalanceBarSpec | None = None
) -> ResampledBars:
    """Aggregate checked one-minute bars to bars of one activity kind.

    Parameters
    ----------
    bars : checked one-minute bars
    market : the market; its `bar_size` takes precedence over `size`
    kind : "volume": a bar ends once `size` has been traded.
        "dollar": once the sum of close * volume reaches `size`, in prices of the series: without the contract's
        multiplier, and adjusted where the series is.
        "tick_imbalance": once the signed volume exceeds its expectation, |sum b v| >= E[T] |E[b v]|, which is `size`
        for the first bar. One-minute bars hold no ticks, so the tick rule is applied to closes and weighted by the
        minute's volume (by 1 where the market has none): b is the sign of close - previous close, of close - open in
        the first minute after a session's open, a hole or a roll, and the last b where that is 0. E[T] and E[b v] are
        averages over the bars before.
    size : as in `resolve_activity_bar_size`
    spec : settings of tick-imbalance bars

    Returns
    -------
    Frame, with `minutes` 0
    """
    return ActivityBarStream(resolve_activity_bar_size(market, kind, size, bars, spec), kind, spec).push(bars)


class ActivityBarStream(BarStream):
    """Bars of one activity kind from a feed, each emitted with the minute that ends it: the bits of `activity_bars`.

    market : with its `bar_size`, as `resolve_activity_bar_size` returns it
    """

    def __init__(self, market: MarketSpec, kind: str, spec: ImbalanceBarSpec | None = None):
        _check_kind(market, kind)
        if market.bar_size is None:
            raise SettingsError(
                "The size of a bar is unknown", where="bar_size", got="None", wanted="a number above 0",
                next_step="give FeatureSpec(bar_size=…), or the market of prepared data, which has one",
            )  # fmt: skip
        self.kind, self.spec, size = kind, spec or ImbalanceBarSpec(), market.bar_size
        moves = kind == "tick_imbalance"
        minutes = self.spec.expected_minutes if moves else 1.0
        self._weights = tuple(2.0 / (self.spec.span * length + 1.0) if moves else 0.0 for length in (1.0, minutes))
        self._bounds = (size / self.spec.bound, size * self.spec.bound) if moves else (size, size)
        bucket = np.zeros(1, ACTIVITY)
        first = {"minutes": minutes, "mean": size / minutes, "threshold": size, "sign": 1.0, "segment": -1}
        for name, value in first.items():
            bucket[name] = value
        super().__init__(market, bucket)

    def _settings(self) -> dict:
        own = {"kind": self.kind, "bar_size": self.market.bar_size, "bars_since": self.market.bars_since}
        return {**own, **vars(self.spec), **super()._settings()}

    def _emit(self, start: np.ndarray, columns: tuple, runs: np.ndarray) -> ResampledBars:
        most = int((runs["last"] - runs["first"]).sum())  # untouched memory pages cost nothing
        times, prices, marks = np.empty((2, most), np.int64), np.empty((6, most)), np.empty((2, most), np.int32)
        rolled = len(columns[5]) > 0 or (self._bucket["count"][0] > 0 and self._bucket["chain"][0] != 1.0)
        amount = np.empty(len(start))
        _fill_activity_amounts(columns[0], columns[3], columns[4], runs, KINDS.index(self.kind), self._bucket, amount)
        done = _fill_activity_bars(
            start, columns, amount, runs, self._weights, self._bounds, self.market.bars_since, self._bar_ns,
            self._bucket, (times, prices, marks),
        )  # fmt: skip
        times, prices, marks = (part[:, :done].copy() for part in (times, prices, marks))
        volume, chain = prices[4] if self.market.has_volume else None, prices[5] if rolled else None
        return ResampledBars(0, *times, *prices[:4], volume, *marks, chain)


# ---- bar size --------------------------------------------------------------------------------------------------------


def resolve_activity_bar_size(
    market: MarketSpec, kind: str, size: float | None = None, bars: pd.DataFrame | None = None,
    spec: ImbalanceBarSpec | None = None,
) -> MarketSpec:  # fmt: skip
    """Return the market with the size of its bars of `kind`: its own, else `size`, else estimated from `bars`.

    The estimate gives 50 bars a session by volume or money over the first 20 sessions, or the distance that a balanced
    flow covers in `spec.expected_minutes`. Bars then begin with the next session (`MarketSpec.bars_since`).

    Raises
    ------
    SettingsError : a size that is no positive number
    BarsError : no volume, or too little of it for an estimate
    """
    _check_kind(market, kind)
    if size is not None and not (np.isfinite(size) and size > 0):
        raise SettingsError("The size of a bar must be positive", where="bar_size", got=size, wanted="> 0 and finite")
    if market.bar_size is not None or (size is None and bars is None):
        return market
    since, how = 0, "given"
    if size is None:
        how, (size, since) = "inferred", _estimate_size(market, kind, bars, spec or ImbalanceBarSpec())
    source = tuple(sorted({**dict(market.source), "bar_size": how}.items()))
    return replace(market, bar_size=float(size), bars_since=since, source=source)


def _check_kind(market: MarketSpec, kind: str) -> None:
    if kind not in KINDS:
        raise SettingsError("No such bars", where="bars", got=repr(kind), wanted=", ".join(KINDS))
    if market.bar_minutes > 1:
        got, step = f"bars of {market.bar_minutes} minutes", "use bars of time, or give a file of 1-minute bars"
        raise BarsError("Bars by activity are made of 1-minute bars", where="bars", got=got, next_step=step)
    if kind != "tick_imbalance" and not market.has_volume:
        got, step = f"{kind} bars of {market.symbol}", "use bars of time or tick_imbalance, or give a file with volume"
        raise BarsError("These bars need volume", where="bars", got=got, next_step=step)


def _estimate_size(market: MarketSpec, kind: str, bars: pd.DataFrame, spec: ImbalanceBarSpec) -> tuple[float, int]:
    """Return (size, the session after the first 20), estimated from the first 20 sessions."""
    start = bars.index.as_unit("ns").asi8
    rows = count_rows_of_first_sessions(start, market.calendar) if len(start) else 0
    if rows == len(start):
        wanted, step = f"more than {INFER_SESSIONS} sessions", "give the size of a bar: bar_size=, prepare --bar-size"
        raise BarsError("Too little to estimate a bar from", where=market.symbol, wanted=wanted, next_step=step)
    flow = _initial_flow(bars.iloc[:rows], market, kind)
    if kind == "tick_imbalance":
        size = float(np.sqrt(np.mean(flow**2) * spec.expected_minutes)) if len(flow) else 0.0
    else:
        size = float(flow.sum()) / (INFER_SESSIONS * PER_SESSION)
    if not size > 0:
        step = "give the size of a bar: bar_size=, prepare --bar-size"
        raise BarsError("Nothing was traded to estimate a bar from", where=market.symbol, next_step=step)
    return size, int(assign_sessions(start[rows : rows + 1], market.calendar).id[0])


def _initial_flow(bars: pd.DataFrame, market: MarketSpec, kind: str) -> np.ndarray:
    """Return the flow of each minute inside a session, float64[n]."""
    feed = ActivityBarStream(replace(market, bar_size=1.0, bars_since=0), kind)
    start, columns, runs = feed.split_into_runs(bars)
    amount = np.full(len(start), np.nan)
    _fill_activity_amounts(columns[0], columns[3], columns[4], runs, KINDS.index(kind), feed._bucket, amount)
    return amount[~np.isnan(amount)]


# ---- bars by time or by activity -------------------------------------------------------------------------------------


def build_base_bars(bars: pd.DataFrame, market: MarketSpec, base: int | str) -> ResampledBars:
    """Return the bars that rows are built on: `base` minutes long, or of that activity kind."""
    return resample_bars(bars, market, base) if isinstance(base, int) else activity_bars(bars, market, base)


def build_base_and_minute_bars(
    bars: pd.DataFrame, market: MarketSpec, base: int | str
) -> tuple[ResampledBars, ResampledBars | None]:
    """Return the base bars, and the raw bars as in `build_minute_bars_for_labels`."""
    return build_base_bars(bars, market, base), build_minute_bars_for_labels(bars, market, base)


def build_minute_bars_for_labels(bars: pd.DataFrame, market: MarketSpec, base: int | str) -> ResampledBars | None:
    """Return the raw bars inside the base bars, which labels are resolved with; None where both are equal."""
    return None if base == market.bar_minutes else resample_bars(bars, market, market.bar_minutes)


def build_base_bars_and_frames(
    bars: pd.DataFrame, market: MarketSpec, base: int | str, minutes: Iterable[int], *, threads: int = 1
) -> tuple[ResampledBars, dict[int, ResampledBars]]:
    """Return the base bars, and frames of these lengths (`resample_bars_to_lengths`)."""
    if isinstance(base, int):
        made = resample_bars_to_lengths(bars, market, (base, *minutes), threads=threads)
        return made.pop(base), made
    return activity_bars(bars, market, base), resample_bars_to_lengths(bars, market, minutes, threads=threads)


def make_base_bar_stream(market: MarketSpec, base: int | str) -> BarStream:
    """Return the stream that makes the bars of `build_base_bars` from a feed."""
    return TimeBarStream(market, base) if isinstance(base, int) else ActivityBarStream(market, base)


# ---- the compiled pass -----------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _fill_activity_amounts(opens, close, volume, runs, kind, state, amount):
    """Fill amount[row] of every row inside the runs: volume, close * volume, or b * volume by the tick rule."""
    now = state[0]
    for r in range(len(runs)):
        first = runs[r].segment != now.segment
        for row in range(runs[r].first, runs[r].last):
            traded = volume[row] if len(volume) > 0 else 1.0
            if kind == 0:
                amount[row] = traded
            elif kind == 1:
                amount[row] = traded * close[row]
            else:
                step = close[row] - (opens[row] if first else now.previous)
                if step != 0.0:
                    now.sign = 1.0 if step > 0.0 else -1.0
                amount[row] = now.sign * traded
            now.previous, first = close[row], False


@njit(cache=True, nogil=True)
def _fill_activity_bars(start, bars, amount, runs, weights, bounds, since, bar_ns, state, made):
    """Fill the columns of times, prices and marks from 0 on, as `_resample_kernel`; return the number of finished bars.

    The threshold is minutes * |mean|, within `bounds`. Both averages are updated with every finished bar, by the
    `weights` of a bar and of a minute (0: constant); minutes of a bar that is never finished are ignored.
    """
    (by_bar, by_minute), (least, most), (times, prices, marks) = weights, bounds, made
    opens, highs, lows, closes, volumes, chain = bars
    now, done = state[0], 0
    for r in range(len(runs)):
        run = runs[r]
        if run.segment != now.segment:
            now.segment, now.count, now.total, now.moving = run.segment, 0, 0.0, now.mean
        if run.session < since:
            continue
        for row in range(run.first, run.last):
            if now.count == 0:
                now.start, now.open, now.high, now.low = start[row], opens[row], highs[row], lows[row]
                now.volume, now.chain = 0.0, chain[row] if len(chain) > 0 else 1.0
            now.count += 1
            now.high, now.low = max(now.high, highs[row]), min(now.low, lows[row])
            if len(volumes) > 0:
                now.volume += volumes[row]
            now.total += amount[row]
            now.moving += by_minute * (amount[row] - now.moving)
            if abs(now.total) < now.threshold:
                continue
            times[0, done], times[1, done] = now.start, start[row] + bar_ns
            prices[0, done], prices[1, done], prices[2, done] = now.open, now.high, now.low
            prices[3, done], prices[4, done], prices[5, done] = closes[row], now.volume, now.chain
            marks[0, done], marks[1, done] = run.session, run.segment
            done += 1
            now.minutes += by_bar * (now.count - now.minutes)
            now.mean = now.moving
            now.threshold = min(max(now.minutes * abs(now.mean), least), most)
            now.count, now.total = 0, 0.0
    return done
