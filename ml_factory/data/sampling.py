"""Bars by activity instead of by the clock: volume, dollar and tick-imbalance bars (López de Prado 2018, chapter 2.3).

Made of one-minute bars, so a bar ends with the minute that reaches its threshold, is known when that minute is
complete, and holds a little more than the threshold. What goes over is not carried on. Every session, hole and roll
starts a new bar, and the one unfinished there is never emitted: no bar spans a night.

Thresholds are given, or estimated from the first 20 sessions alone. Then bars begin with the session after these, so
that rows up to a moment are the same bits whatever comes after it.
"""

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.data import frames
from ml_factory.data.resample import Frame, chunk_of, contract_codes, refuse_overlap
from ml_factory.data.sessions import INFER_SESSIONS, MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError

PER_SESSION = 50  # bars a session where the threshold is estimated (the book's 1/50 of the daily volume)
_log = logging.getLogger("ml_factory")


@dataclass(frozen=True)
class ImbalanceSpec:
    """Settings of tick-imbalance bars.

    expected_minutes : E[T] before the first bar.  expected_imbalance : |E[b v]|, signed volume a minute, before the
    first bar; None: from the first 20 sessions, as far as a balanced flow wanders in `expected_minutes`.
    span : bars over which both expectations are averaged, exponentially: E[T] by the bar, E[b v] by the minute.
    bound : the threshold stays within this factor of the first one. The book leaves it free; then it runs away, down
        to bars of one minute where the flow is balanced, or up to none at all.
    """

    expected_minutes: float = 30.0
    expected_imbalance: float | None = None
    span: int = 20
    bound: float = 2.0

    def __post_init__(self):
        least = {"expected_minutes": 1, "span": 1, "bound": 1}
        for field, value in {**least, "expected_imbalance": 0}.items():
            got = getattr(self, field)
            if got is not None and not (np.isfinite(got) and got >= value and got > 0):
                raise SettingsError("No such imbalance bars", where=field, got=got, wanted=f">= {value} and finite")


def volume_bars(bars: pd.DataFrame, market: MarketSpec, per_bar: float | None = None) -> Frame:
    """A bar as soon as `per_bar` has been traded since the last one.

    bars : checked one-minute bars with volume.  per_bar : None estimates 1/50 of a session's volume.
    Returns a Frame of `minutes` 0. Raises SettingsError, and BarsError where there is no volume or too little to
    estimate from.
    """
    return _summed_bars(bars, market, "volume", per_bar)


def dollar_bars(bars: pd.DataFrame, market: MarketSpec, per_bar: float | None = None) -> Frame:
    """A bar as soon as close * volume since the last one reaches `per_bar`; otherwise as `volume_bars`.

    In prices of the series: without a contract's multiplier, and adjusted where the series is.
    """
    return _summed_bars(bars, market, "dollar", per_bar)


def imbalance_bars(bars: pd.DataFrame, market: MarketSpec, spec: ImbalanceSpec | None = None) -> Frame:
    """A bar as soon as the signed volume since the last one is larger than expected: |sum b v| >= E[T] |E[b v]|.

    There are no ticks in one-minute bars, so the tick rule is applied to closes and weighted by the minute's volume
    (by 1 where the market has none): b is the sign of close - previous close, of close - open in the first minute
    after a session's open, a hole or a roll, and the last b where that is 0. E[T] and E[b v] are averages over the
    bars before.
    """
    spec = spec or ImbalanceSpec()
    minutes = _Minutes.of(bars, market)
    weight = minutes.volume if market.has_volume else np.ones(len(minutes.start))
    signed = np.empty(len(minutes.start))
    sign_minutes(minutes.prices[0], minutes.prices[3], weight, minutes.first, minutes.last, signed)
    expected = spec.expected_imbalance
    if expected is None:
        head, minutes = minutes.first_sessions()
        expected = float(np.sqrt(np.mean(signed[head] ** 2) / spec.expected_minutes))
        if not expected > 0:
            raise BarsError("No volume to estimate from", where="volume", next_step="give expected_imbalance")
        _tell(market, "expected_imbalance", expected)
    threshold = spec.expected_minutes * expected
    low, high = threshold / spec.bound, threshold * spec.bound
    by_bar, by_minute = (2.0 / (spec.span * length + 1.0) for length in (1.0, spec.expected_minutes))
    return minutes.cut(signed, spec.expected_minutes, expected, (by_bar, by_minute), low, high)


def _summed_bars(bars: pd.DataFrame, market: MarketSpec, kind: str, per_bar: float | None) -> Frame:
    if not market.has_volume:
        step = "give bars with volume, or use imbalance_bars"
        raise BarsError("This market has no volume", where=market.symbol, next_step=step)
    if per_bar is not None and not (np.isfinite(per_bar) and per_bar > 0):
        raise SettingsError("A bar holds something", where="per_bar", got=per_bar, wanted="> 0 and finite")
    minutes = _Minutes.of(bars, market)
    amount = minutes.volume if kind == "volume" else minutes.volume * minutes.prices[3]
    if per_bar is None:
        head, minutes = minutes.first_sessions()
        per_bar = float(amount[head].sum()) / (INFER_SESSIONS * PER_SESSION)
        if not per_bar > 0:
            raise BarsError("No volume to estimate from", where="volume", next_step="give per_bar")
        _tell(market, f"per_bar ({kind})", per_bar)
    return minutes.cut(amount, 1.0, per_bar, (0.0, 0.0), per_bar, per_bar)


def _tell(market: MarketSpec, name: str, value: float) -> None:
    text = "%s: %s = %.6g was estimated from the first %d sessions; bars begin after them. Give it to fix it"
    _log.warning(text, market.symbol, name, value, INFER_SESSIONS)


@dataclass(frozen=True)
class _Minutes:
    """N one-minute bars and R runs of them, each inside one session, hole-free and of one contract.

    first, last : int64[R], rows [first, last).  session, segment : int32[R].
    """

    start: np.ndarray
    prices: tuple[np.ndarray, ...]
    volume: np.ndarray
    chain: np.ndarray
    first: np.ndarray
    last: np.ndarray
    session: np.ndarray
    segment: np.ndarray

    @classmethod
    def of(cls, bars: pd.DataFrame, market: MarketSpec) -> "_Minutes":
        start, (*prices, volume, chain), names = chunk = chunk_of(bars, market)
        table = frames.stretches_of(frames.days_of(start), market.calendar)
        silence = (market.hole_minutes + 1) * MINUTE_NS
        codes = contract_codes(names, [])
        runs, wrong = frames.runs_of(start, codes, table, MINUTE_NS, silence, frames.first_place())
        refuse_overlap(chunk, wrong, 1)
        parts = (np.ascontiguousarray(runs[name]) for name in ("first", "last", "session", "segment"))
        return cls(start, tuple(prices), volume, chain, *parts)

    def first_sessions(self) -> tuple[np.ndarray, "_Minutes"]:
        """Rows of the first 20 sessions, and the same bars with the runs after them. BarsError where none is."""
        held = np.unique(self.session)
        if len(held) <= INFER_SESSIONS:
            got, wanted = f"{len(held)} sessions", f"more than {INFER_SESSIONS}"
            raise BarsError("Too little to estimate from", where="bars", got=got, wanted=wanted, next_step="give it")
        later = self.session >= held[INFER_SESSIONS]
        runs = zip(self.first[~later], self.last[~later], strict=True)
        rows = np.concatenate([np.arange(first, last) for first, last in runs])
        parts = (values[later] for values in (self.first, self.last, self.session, self.segment))
        return rows, _Minutes(self.start, self.prices, self.volume, self.chain, *parts)

    def cut(
        self, amount: np.ndarray, minutes: float, mean: float, weights: tuple[float, float], low: float, high: float
    ) -> Frame:
        """The bars that `cut_runs` finds, as a Frame."""
        size = int((self.last - self.first).sum())
        begin, end, run = (np.empty(size, np.int64) for _ in range(3))
        count = cut_runs(amount, self.first, self.last, minutes, mean, *weights, low, high, begin, end, run)
        begin, end, run = begin[:count], end[:count], run[:count]
        opens, high_, low_, close = self.prices
        top, bottom, traded = (np.empty(count) for _ in range(3))
        gather(high_, low_, self.volume, begin, end, top, bottom, traded)
        known_at = self.start[end - 1] + MINUTE_NS
        volume = traded if len(self.volume) else None
        marks = self.session[run], self.segment[run], self.chain[begin] if len(self.chain) else None
        return Frame(0, self.start[begin], known_at, opens[begin], top, bottom, close[end - 1], volume, *marks)


@njit(cache=True, nogil=True)
def sign_minutes(opens, close, weight, first, last, signed):
    """signed[row] = b * weight by the tick rule; rows outside the runs stay as they are."""
    b = 1.0
    for run in range(len(first)):
        for row in range(first[run], last[run]):
            step = close[row] - (opens[row] if row == first[run] else close[row - 1])
            if step != 0.0:
                b = 1.0 if step > 0.0 else -1.0
            signed[row] = b * weight[row]


@njit(cache=True, nogil=True)
def cut_runs(amount, first, last, minutes, mean, by_bar, by_minute, low, high, begin, end, run):
    """Rows [begin, end) and the run of each bar; how many.

    The threshold is minutes * |mean|, between low and high. Both are moved on with every finished bar, by the weights
    by_bar and by_minute (0: they stay); minutes of a bar that is never finished teach nothing.
    """
    threshold = min(max(minutes * abs(mean), low), high)
    count = 0
    for one in range(len(first)):
        total, moving, since = 0.0, mean, first[one]
        for row in range(first[one], last[one]):
            total += amount[row]
            moving += by_minute * (amount[row] - moving)
            if abs(total) >= threshold:
                begin[count], end[count], run[count] = since, row + 1, one
                count += 1
                minutes += by_bar * (row + 1 - since - minutes)
                mean = moving
                threshold = min(max(minutes * abs(mean), low), high)
                total, since = 0.0, row + 1
    return count


@njit(cache=True, nogil=True)
def gather(high, low, volume, begin, end, top, bottom, traded):
    """Highest, lowest and volume (0 where there is none) of rows [begin, end)."""
    for k in range(len(begin)):
        top[k], bottom[k], traded[k] = high[begin[k]], low[begin[k]], 0.0
        for row in range(begin[k], end[k]):
            top[k], bottom[k] = max(top[k], high[row]), min(bottom[k], low[row])
            if len(volume):
                traded[k] += volume[row]
