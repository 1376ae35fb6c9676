"""Features of a live feed: bars pushed singly or in chunks give the rows of `build_features`, bit for bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.bar_stream import TimeBarStream
from ml_factory.data.resample import (
    BarChunk,
    ResampledBars,
    apply_roll_adjustment,
    asof_rows,
    segments_between_rolls,
    to_bar_chunk,
)
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.features import custom
from ml_factory.features.build import FIRST_BARS, FeatureSpec, feature_column_names
from ml_factory.features.engine import FeatureEngine


@dataclass(frozen=True)
class StreamedFeatureRows:
    """Rows as they became known, in time order.

    values : [n, F] float32
    known_at : int64[n], UTC ns
    session, segment : int32[n]
    close : float64[n]
    exact : True for the bits of the whole history. After a cold start, and in the user's own features, values are
        within 1e-6 of a column's deviation
    side : of meta-labels the side of the primary rule (`targets.primary_rule`), index known_at; else None
    """

    values: np.ndarray
    known_at: np.ndarray
    session: np.ndarray
    segment: np.ndarray
    close: np.ndarray
    exact: bool
    side: pd.Series | None = None

    def __len__(self) -> int:
        return len(self.values)


class FeatureStream:
    """Stream of feature rows; rows are returned at their `known_at`.

    Call `push` for bars, and `advance` when a minute ends without one.

    cold : the first bar pushed is not the first of the history: no row before `spec.warmup_bars`, and later rows are
        within 1e-6 instead of exact (`FeatureRows.exact`)
    """

    def __init__(self, market: MarketSpec, spec: FeatureSpec | None = None, *, cold: bool = False):
        self.spec, self.cold = spec or FeatureSpec(), cold
        self.market = market
        self._warm = self.spec.warmup_bars if cold else 0
        self.names = feature_column_names(market, self.spec)
        families = self.spec.families_for_market(market)
        lengths = (self.spec.base_minutes, *self.spec.frames)
        self._frames = {length: TimeBarStream(market, length) for length in lengths}
        self._engines = {
            length: FeatureEngine(
                market, families, coarse=length != self.spec.base_minutes and not self.spec.full_frames
            )
            for length in lengths
        }
        first = FIRST_BARS[self.spec.coarse_frame_columns]
        self._coarse = {minutes: _LatestRow(len(self._engines[minutes].names), first) for minutes in self.spec.frames}
        self._custom = {name: _RecentBars(custom.get_custom_feature(name).memory) for name in self.spec.custom}
        self._rows, self._second = 0, False
        self._first_session: int | None = None
        self._chain, self._stretch = 1.0, 0  # of the newest base bar, where windows span sessions

    def push(self, bars: pd.DataFrame | BarChunk) -> StreamedFeatureRows:
        """Rows that these checked bars complete; all bars later than those before."""
        chunk = bars if isinstance(bars, BarChunk) else to_bar_chunk(bars, self.market)
        return self._next({minutes: frame.push(chunk) for minutes, frame in self._frames.items()})

    def advance(self, now_ns: int) -> StreamedFeatureRows:
        """Rows that are complete by the clock (UTC ns), once all bars up to then are in."""
        return self._next({minutes: frame.advance(now_ns) for minutes, frame in self._frames.items()})

    def lacking_bars(self, wanted: int) -> int:
        """Return how many of `wanted` base bars are still to come; at least 1 before the second session begins."""
        return max(wanted - self._rows, 0 if self._second else 1)

    def get_state(self) -> dict:
        """Return plain numbers and arrays; `load_state` on an equal stream continues from them exactly."""
        return {
            "settings": self._settings(),
            "frames": {str(minutes): frame.get_state() for minutes, frame in self._frames.items()},
            "engines": {str(minutes): engine.get_state() for minutes, engine in self._engines.items()},
            "coarse": {str(minutes): newest.get_state() for minutes, newest in self._coarse.items()},
            "custom": {name: tail.get_state() for name, tail in self._custom.items()},
            "rows": self._rows,
            "first_session": self._first_session,
            "second": self._second,
            "chain": self._chain,
            "stretch": self._stretch,
        }

    def load_state(self, state: dict) -> None:
        """Restore a state of `get_state`; raise SettingsError for another market or spec."""
        if state["settings"] != self._settings():
            raise SettingsError(
                "The state is of another stream", where="state", got=state["settings"], wanted=self._settings(),
                next_step="build the FeatureStream with the market and spec of the one that was saved",
            )  # fmt: skip
        for part, parts in (
            ("frames", self._frames), ("engines", self._engines), ("coarse", self._coarse), ("custom", self._custom)
        ):  # fmt: skip
            for key, one in parts.items():
                one.load_state(state[part][str(key)])
        self._rows, self._first_session, self._second = state["rows"], state["first_session"], state["second"]
        self._chain, self._stretch = state["chain"], state["stretch"]

    def _settings(self) -> dict:
        return {"market": self.market.to_dict(), "spec": self.spec.to_dict(), "cold": self.cold}

    def _next(self, new: dict[int, ResampledBars]) -> StreamedFeatureRows:
        unadjusted = new[self.spec.base_minutes]
        new = {minutes: apply_roll_adjustment(frame) for minutes, frame in new.items()}
        base = new[self.spec.base_minutes]
        values = np.empty((len(base), len(self.names)), np.float32)
        place = len(self._engines[self.spec.base_minutes].names)
        self._engines[self.spec.base_minutes].push(base, values[:, :place])
        ready = self._ready(base)
        for minutes, newest in self._coarse.items():
            stop = place + newest.width
            coarse = self._engines[minutes].push(new[minutes], np.empty((len(new[minutes]), newest.width), np.float32))
            ready &= newest.join(base.known_at, new[minutes].known_at, coarse, values[:, place:stop])
            place = stop
        for name, tail in self._custom.items():
            values[:, place] = tail.values(custom.get_custom_feature(name), base)
            place += 1
        segment = self._stretches(unadjusted) if self.spec.spans else base.segment
        values, known_at, session, segment, close = (
            column[ready] for column in (values, base.known_at, base.session, segment, unadjusted.close)
        )
        return StreamedFeatureRows(values, known_at, session, segment, close, exact=not (self.cold or self._custom))

    def _stretches(self, unadjusted: ResampledBars) -> np.ndarray:
        """Return `segments_between_rolls` of the next bars, at traded prices."""
        found = segments_between_rolls(unadjusted, (self._chain, self._stretch))
        if len(unadjusted):
            self._chain = 1.0 if unadjusted.chain is None else float(unadjusted.chain[-1])
            self._stretch = int(found[-1])
        return found

    def _ready(self, base: ResampledBars) -> np.ndarray:
        """Return bool[n]: rows whose base frame is warmed up and whose session began after the stream."""
        if self._first_session is None and len(base):
            self._first_session = int(base.session[0])
        begun = np.logical_or.accumulate(np.append(self._second, base.session != self._first_session))[1:]
        first = max(FIRST_BARS["base"], self._warm)
        number = self._rows + np.arange(len(base))
        self._rows += len(base)
        if len(base):
            self._second = bool(begun[-1])
        return begun & (number >= first)


class _LatestRow:
    """The latest row of a coarse frame, and the number of its rows."""

    def __init__(self, width: int, first: int):
        self.width, self.first = width, first
        self.known_at, self.row, self.count = np.iinfo(np.int64).min, np.full(width, np.nan, np.float32), 0

    def join(self, moments: np.ndarray, known_at: np.ndarray, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the latest row of each moment to `out`; return bool[n]: the frame was warmed up by then."""
        all_known, all_rows = np.append(self.known_at, known_at), np.concatenate([self.row[None], rows])
        latest = asof_rows(moments, all_known)
        out[:] = all_rows[latest]
        warm = self.count - 1 + latest >= self.first
        self.known_at, self.row, self.count = int(all_known[-1]), all_rows[-1].copy(), self.count + len(rows)
        return warm

    def get_state(self) -> dict:
        return {"known_at": self.known_at, "row": self.row.copy(), "count": self.count}

    def load_state(self, state: dict) -> None:
        self.known_at, self.row, self.count = int(state["known_at"]), state["row"].copy(), int(state["count"])


class _RecentBars:
    """The last bars that a user's feature needs."""

    _COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")

    def __init__(self, memory: int):
        self.memory = memory
        self.bars: ResampledBars | None = None

    def values(self, made: custom.CustomFeature, new: ResampledBars) -> np.ndarray:
        """Return float64[n]: the feature at each new bar, from the recent bars and the new ones."""
        if not len(new):
            return np.empty(0)
        joined = new if self.bars is None else custom.concat_bars(self.bars, new)
        self.bars = custom.tail(joined, self.memory)
        return custom.compute_custom_feature(made, joined)[len(joined) - len(new) :]

    def get_state(self) -> dict:
        if self.bars is None:
            return {}
        columns = {name: getattr(self.bars, name) for name in self._COLUMNS}
        return {"minutes": self.bars.minutes, **{name: col.copy() for name, col in columns.items() if col is not None}}

    def load_state(self, state: dict) -> None:
        columns: dict[str, Any] = {name: state.get(name) for name in self._COLUMNS}
        self.bars = ResampledBars(state["minutes"], **columns) if state else None
