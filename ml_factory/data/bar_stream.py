"""Resample a live feed: bars pushed in chunks of any size give the buckets of `resample_bars`, bit for bit."""

import numpy as np
import pandas as pd

from ml_factory.data import resample_kernels
from ml_factory.data.resample import (
    BarChunk,
    ResampledBars,
    check_resample_length,
    contract_positions,
    raise_on_overlapping_bars,
    readonly_view,
    resample_runs,
    to_bar_chunk,
)
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError

AHEAD_DAYS = 7  # days of the calendar looked up at once
_NOTHING = (
    readonly_view(np.empty(0, np.int64)),
    tuple(readonly_view(np.empty(0)) for _ in range(6)),
    np.empty(0, resample_kernels.RUN),
)
_VERSION = 2


class TimeBarStream:
    """Buckets of one length, each emitted once, in order, as soon as it is known.

    The feed is split into runs of one session, one contract and no hole. Segments are counted from the first bar ever
    pushed; the count is part of the state, which is saved exactly.

    market, minutes, bar_minutes : as in `resample_bars`
    """

    def __init__(self, market: MarketSpec, minutes: int, *, bar_minutes: int | None = None):
        self.market, self.minutes, self.bar_minutes = market, minutes, bar_minutes or market.bar_minutes
        check_resample_length(minutes, self.bar_minutes)
        self._bar_ns = self.bar_minutes * MINUTE_NS
        self._silence_ns = (market.hole_minutes + self.bar_minutes) * MINUTE_NS
        self._position = resample_kernels.initial_bar_kernel_state()
        self._bucket = np.zeros(1, resample_kernels.BUCKET)
        self._now = resample_kernels.BEFORE_ALL
        self._contracts: list[str] = []
        self._stretches, self._covered = np.empty(0, resample_kernels.STRETCH), (0, 0)

    def push(self, bars: pd.DataFrame | BarChunk) -> ResampledBars:
        """Return the bars that these minutes complete; the minutes are later than all pushed before.

        To feed several streams, `to_bar_chunk(bars, market)` reads the table once for all. A bar that was complete at
        the time passed to `advance` is refused: its bucket may have been emitted.
        """
        start, columns, names = chunk = bars if isinstance(bars, BarChunk) else to_bar_chunk(bars, self.market)
        if not len(start):
            return self._emit(*_NOTHING)
        if start[0] + self._bar_ns <= self._now:
            wanted = f"bars that end after {pd.Timestamp(self._now, tz='UTC')}, the time last passed to advance"
            step = "push the bars of a minute before advancing the clock to its end"
            got = str(pd.Timestamp(start[0], tz="UTC"))
            raise BarsError("A bar comes too late", where="row 0", got=got, wanted=wanted, next_step=step)
        contract = contract_positions(names, self._contracts)
        stretches = self._stretches_for(start)
        position = self._position.copy()  # unchanged if a bar is refused
        runs, wrong = resample_kernels.split_into_trading_runs(
            start, contract, stretches, self._bar_ns, self._silence_ns, position
        )
        raise_on_overlapping_bars(chunk, wrong, self.bar_minutes)
        self._position = position
        return self._emit(start, columns, runs)

    def advance(self, now_ns: int) -> ResampledBars:
        """Return the bar, if any, that is complete at `now_ns` (UTC); call it once all bars up to then are pushed."""
        self._now = max(self._now, int(now_ns))
        return self._emit(*_NOTHING)

    def get_state(self) -> dict:
        """Return all that later buckets depend on, as plain numbers and names, for `load_state`."""
        return {
            "version": _VERSION,
            **self._settings(),
            "now": self._now,
            "contracts": list(self._contracts),
            "place": {name: self._position[name][0].item() for name in resample_kernels.FEED_POSITION.names},
            "bucket": {name: self._bucket[name][0].item() for name in self._bucket.dtype.names},
        }

    def load_state(self, state: dict) -> None:
        """Restore a state of `get_state`; raise SettingsError for the state of another kind of stream."""
        wanted = {"version": _VERSION, **self._settings()}
        got = {name: state.get(name) for name in wanted}
        if got != wanted:
            step = "build the stream with the market and bars of the one that was saved"
            raise SettingsError("The state is of another stream", where="state", got=got, wanted=wanted, next_step=step)
        self._now, self._contracts = int(state["now"]), list(state["contracts"])
        self._position, self._bucket = (
            np.array([tuple(state[part][name] for name in kind.names)], kind)
            for part, kind in (("place", resample_kernels.FEED_POSITION), ("bucket", self._bucket.dtype))
        )

    def _settings(self) -> dict:
        """Return the settings that a saved state must share."""
        market = self.market
        names = ("calendar", "hole_minutes", "has_volume")
        own = {"minutes": self.minutes, "bar_minutes": self.bar_minutes}
        return own | {name: getattr(market, name) for name in names}

    def _emit(self, start: np.ndarray, columns: tuple, runs: np.ndarray) -> ResampledBars:
        clock = max(self._now, int(self._position["clock"][0]))
        has_volume = self.market.has_volume
        lengths = (self.minutes,)
        return resample_runs(start, columns, runs, lengths, self._bar_ns, self._bucket, clock, has_volume)[0]

    def _stretches_for(self, start: np.ndarray) -> np.ndarray:
        """Return the calendar around these bars, looked up some days ahead so that the next bars find it cached."""
        if not self._covered[0] <= start[0] <= start[-1] < self._covered[1]:
            first, last = int(start[0] // DAY_NS), int(start[-1] // DAY_NS)
            if last - first >= AHEAD_DAYS:  # a long chunk is looked up separately, and only its days
                return resample_kernels.trading_intervals(
                    resample_kernels.utc_days_of_bars(start), self.market.calendar
                )
            self._stretches = resample_kernels.trading_intervals(
                np.arange(first, first + AHEAD_DAYS), self.market.calendar
            )
            self._covered = first * DAY_NS, (first + AHEAD_DAYS) * DAY_NS
        return self._stretches
