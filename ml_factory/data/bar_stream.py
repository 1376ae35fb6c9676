"""Frames from a live feed: bars pushed in chunks of any size give the buckets of `base_frame`, bit for bit.

`BarFeed` is what every kind of bar from a feed begins with: minutes parted into runs, a state that is saved exactly.
"""

import numpy as np
import pandas as pd

from ml_factory.data import bar_kernels
from ml_factory.data.resample import (
    Chunk,
    Frame,
    check_length,
    chunk_of,
    contract_codes,
    next_buckets,
    refuse_overlap,
    still,
)
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError

AHEAD_DAYS = 7  # how far the calendar is looked up at once
_NOTHING = (still(np.empty(0, np.int64)), tuple(still(np.empty(0)) for _ in range(6)), np.empty(0, bar_kernels.RUN))
_VERSION = 2


class BarFeed:
    """Bars as they come, parted into runs of one session, one contract and no hole.

    A subclass keeps the unfinished bar in `_bucket`, a record of plain numbers, and says with `_emit` which bars came
    to their end. Segments are counted from the first bar ever pushed, and the count is part of the state.
    """

    def __init__(self, market: MarketSpec, bucket: np.ndarray, bar_minutes: int | None = None):
        self.market, self.bar_minutes = market, bar_minutes or market.bar_minutes
        self._bar_ns = self.bar_minutes * MINUTE_NS
        self._silence_ns = (market.hole_minutes + self.bar_minutes) * MINUTE_NS
        self._place, self._bucket = bar_kernels.first_place(), bucket
        self._now = bar_kernels.BEFORE_ALL
        self._contracts: list[str] = []
        self._stretches, self._covered = np.empty(0, bar_kernels.STRETCH), (0, 0)

    def push(self, bars: pd.DataFrame | Chunk) -> Frame:
        """The bars that these minutes complete; they are as for `base_frame`, all later than those pushed before.

        Where several streams are fed, `chunk_of(bars, market)` reads the table once for all.
        A bar that was complete by the time given to `advance` is refused: its bucket may be out already.
        """
        return self._emit(*self.parted(bars))

    def parted(self, bars: pd.DataFrame | Chunk) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
        """(start, columns, runs) of these minutes, which are then behind it; for `push`, which makes bars of them."""
        start, columns, names = chunk = bars if isinstance(bars, Chunk) else chunk_of(bars, self.market)
        if not len(start):
            return _NOTHING
        if start[0] + self._bar_ns <= self._now:
            wanted = f"bars that end after {pd.Timestamp(self._now, tz='UTC')}, the clock last given to advance"
            step = "push the bars of a minute before advancing the clock to its end"
            got = str(pd.Timestamp(start[0], tz="UTC"))
            raise BarsError("A bar comes too late", where="row 0", got=got, wanted=wanted, next_step=step)
        contract = contract_codes(names, self._contracts)
        stretches = self._stretches_for(start)
        place = self._place.copy()  # kept as it was if a bar is refused
        runs, wrong = bar_kernels.runs_of(start, contract, stretches, self._bar_ns, self._silence_ns, place)
        refuse_overlap(chunk, wrong, self.bar_minutes)
        self._place = place
        return start, columns, runs

    def advance(self, now_ns: int) -> Frame:
        """The bar, if any, that is complete by the clock: call it with UTC ns once all bars up to then are in."""
        self._now = max(self._now, int(now_ns))
        return self._emit(*_NOTHING)

    def get_state(self) -> dict:
        """Everything that later buckets depend on, as plain numbers and names; `load_state` takes it exactly."""
        return {
            "version": _VERSION,
            **self._settings(),
            "now": self._now,
            "contracts": list(self._contracts),
            "place": {name: self._place[name][0].item() for name in bar_kernels.PLACE.names},
            "bucket": {name: self._bucket[name][0].item() for name in self._bucket.dtype.names},
        }

    def load_state(self, state: dict) -> None:
        """Go on where `get_state` was called; SettingsError for the state of another kind of stream."""
        wanted = {"version": _VERSION, **self._settings()}
        got = {name: state.get(name) for name in wanted}
        if got != wanted:
            step = "build the stream with the market and bars of the one that was saved"
            raise SettingsError("The state is of another stream", where="state", got=got, wanted=wanted, next_step=step)
        self._now, self._contracts = int(state["now"]), list(state["contracts"])
        self._place, self._bucket = (
            np.array([tuple(state[part][name] for name in kind.names)], kind)
            for part, kind in (("place", bar_kernels.PLACE), ("bucket", self._bucket.dtype))
        )

    def _settings(self) -> dict:
        """What must be the same for a saved state to fit."""
        market = self.market
        names = ("calendar", "hole_minutes", "has_volume")
        return {"bar_minutes": self.bar_minutes, **{name: getattr(market, name) for name in names}}

    def _emit(self, start: np.ndarray, columns: tuple, runs: np.ndarray) -> Frame:
        raise NotImplementedError

    def _stretches_for(self, start: np.ndarray) -> np.ndarray:
        """The calendar around these bars, looked up for some days ahead so that the next bars find it there."""
        if not self._covered[0] <= start[0] <= start[-1] < self._covered[1]:
            first, last = int(start[0] // DAY_NS), int(start[-1] // DAY_NS)
            if last - first >= AHEAD_DAYS:  # a long chunk is looked up by itself, and only the days it has
                return bar_kernels.stretches_of(bar_kernels.days_of(start), self.market.calendar)
            self._stretches = bar_kernels.stretches_of(np.arange(first, first + AHEAD_DAYS), self.market.calendar)
            self._covered = first * DAY_NS, (first + AHEAD_DAYS) * DAY_NS
        return self._stretches


class FrameStream(BarFeed):
    """Buckets of one length, each emitted once, in order, as soon as it is known.

    market, minutes, bar_minutes : as for `base_frame`.
    """

    def __init__(self, market: MarketSpec, minutes: int, *, bar_minutes: int | None = None):
        check_length(minutes, bar_minutes or market.bar_minutes)
        super().__init__(market, np.zeros(1, bar_kernels.BUCKET), bar_minutes)
        self.minutes = minutes

    def _settings(self) -> dict:
        return {"minutes": self.minutes, **super()._settings()}

    def _emit(self, start: np.ndarray, columns: tuple, runs: np.ndarray) -> Frame:
        clock = max(self._now, int(self._place["clock"][0]))
        has_volume = self.market.has_volume
        lengths = (self.minutes,)
        return next_buckets(start, columns, runs, lengths, self._bar_ns, self._bucket, clock, has_volume)[0]
