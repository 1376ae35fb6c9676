"""Features of a live feed: bars pushed one by one or in chunks give the rows of `build_features`, bit for bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.activity_bars import make_bar_stream
from ml_factory.data.resample import Chunk, Frame, asof_rows, roll_adjusted, stretches_between_rolls, to_chunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.features import custom
from ml_factory.features.build import FIRST_BARS, FeatureMatrix, FeatureSpec, column_names
from ml_factory.features.engine import FrameFeatures


@dataclass(frozen=True)
class FeatureRows:
    """Rows as they became known, in time order.

    values : [n, F] float32.  known_at : int64[n], UTC ns.  session, segment : int32[n].  close : float64[n].
    exact : whether they are the bits of the whole history. After a cold start, and in the user's own features, they
        are within 1e-6 of a column's deviation.
    """

    values: np.ndarray
    known_at: np.ndarray
    session: np.ndarray
    segment: np.ndarray
    close: np.ndarray
    exact: bool

    def __len__(self) -> int:
        return len(self.values)


class FeatureStream:
    """`push` bars as they come, `advance` the clock when a minute ends without one; rows come at their `known_at`.

    cold : the first bar pushed is not the first of the history: no row before `spec.warmup_bars`, and those after are
    within 1e-6 instead of exact (`FeatureRows.exact` says so).
    """

    def __init__(self, market: MarketSpec, spec: FeatureSpec | None = None, *, cold: bool = False):
        self.spec, self.cold = spec or FeatureSpec(), cold
        self.market = market = self.spec.with_bar_size(market)
        self._warm = self.spec.warmup_bars if cold else 0
        self.names = column_names(market, self.spec)
        families = self.spec.families_of(market)
        lengths = (self.spec.base, *self.spec.frames)
        self._frames = {length: make_bar_stream(market, length) for length in lengths}
        self._engines = {
            length: FrameFeatures(market, families, coarse=length != self.spec.base and not self.spec.full_frames)
            for length in lengths
        }
        first = FIRST_BARS[self.spec.on_frames]
        self._coarse = {minutes: _Newest(len(self._engines[minutes].names), first) for minutes in self.spec.frames}
        self._custom = {name: _Tail(custom.of(name).memory) for name in self.spec.custom}
        self._rows, self._second = 0, False
        self._first_session: int | None = None
        self._chain, self._stretch = 1.0, 0  # of the newest base bar, where windows span sessions

    @classmethod
    def after(cls, bars: pd.DataFrame, matrix: FeatureMatrix, market: MarketSpec, spec: FeatureSpec) -> "FeatureStream":
        """The stream as it would stand had these bars been pushed, of which `build_features` made the matrix."""
        stream, chunk = cls(market, spec), to_chunk(bars, market)
        for frame in stream._frames.values():
            frame.push(chunk)
        for minutes, engine, known_at in matrix.engines:
            stream._engines[minutes or spec.base].load_state(engine.get_state())
            if minutes in stream._coarse:
                newest = {"known_at": known_at, "row": engine.newest, "count": engine.rows}
                stream._coarse[minutes].load_state(newest)
        for name, tail in stream._custom.items():
            tail.bars = custom.tail(roll_adjusted(matrix.base), custom.of(name).memory)
        stream._rows, stream._first_session, stream._second = len(matrix.base), int(matrix.base.session[0]), True
        stream._stretches(matrix.base)
        return stream

    def push(self, bars: pd.DataFrame | Chunk) -> FeatureRows:
        """Rows that these checked bars complete; all bars later than those before."""
        chunk = bars if isinstance(bars, Chunk) else to_chunk(bars, self.market)
        return self._next({minutes: frame.push(chunk) for minutes, frame in self._frames.items()})

    def advance(self, now_ns: int) -> FeatureRows:
        """Rows that are complete by the clock (UTC ns), once all bars up to then are in."""
        return self._next({minutes: frame.advance(now_ns) for minutes, frame in self._frames.items()})

    def get_state(self) -> dict:
        """Plain numbers and arrays; `load_state` on a stream of the same market and spec goes on from them exactly."""
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
        """Go on where `get_state` was called; raises SettingsError for the state of another market or spec."""
        if state["settings"] != self._settings():
            raise SettingsError(
                "The state is of another stream", where="state", got=state["settings"], wanted=self._settings(),
                next_step="build the FeatureStream with the market and spec of the one that was saved",
            )  # fmt: skip
        for part, kept in (
            ("frames", self._frames), ("engines", self._engines), ("coarse", self._coarse), ("custom", self._custom)
        ):  # fmt: skip
            for key, one in kept.items():
                one.load_state(state[part][str(key)])
        self._rows, self._first_session, self._second = state["rows"], state["first_session"], state["second"]
        self._chain, self._stretch = state["chain"], state["stretch"]

    def _settings(self) -> dict:
        return {"market": self.market.to_dict(), "spec": self.spec.to_dict(), "cold": self.cold}

    def _next(self, new: dict[int | str, Frame]) -> FeatureRows:
        held = new[self.spec.base]
        new = {minutes: roll_adjusted(frame) for minutes, frame in new.items()}
        base = new[self.spec.base]
        values = np.empty((len(base), len(self.names)), np.float32)
        place = len(self._engines[self.spec.base].names)
        self._engines[self.spec.base].push(base, values[:, :place])
        ready = self._ready(base)
        for minutes, newest in self._coarse.items():
            stop = place + newest.width
            coarse = self._engines[minutes].push(new[minutes], np.empty((len(new[minutes]), newest.width), np.float32))
            ready &= newest.join(base.known_at, new[minutes].known_at, coarse, values[:, place:stop])
            place = stop
        for name, tail in self._custom.items():
            values[:, place] = tail.values(custom.of(name), base)
            place += 1
        segment = self._stretches(held) if self.spec.spans else base.segment
        values, known_at, session, segment, close = (
            column[ready] for column in (values, base.known_at, base.session, segment, held.close)
        )
        return FeatureRows(values, known_at, session, segment, close, exact=not (self.cold or self._custom))

    def _stretches(self, held: Frame) -> np.ndarray:
        """`stretches_between_rolls` of the next bars, at the prices that traded."""
        found = stretches_between_rolls(held, (self._chain, self._stretch))
        if len(held):
            self._chain = 1.0 if held.chain is None else float(held.chain[-1])
            self._stretch = int(found[-1])
        return found

    def _ready(self, base: Frame) -> np.ndarray:
        """bool[n]: rows whose base frame is warm and whose session began after the stream."""
        if self._first_session is None and len(base):
            self._first_session = int(base.session[0])
        begun = np.logical_or.accumulate(np.append(self._second, base.session != self._first_session))[1:]
        first = max(FIRST_BARS["base"], self._warm)
        number = self._rows + np.arange(len(base))
        self._rows += len(base)
        if len(base):
            self._second = bool(begun[-1])
        return begun & (number >= first)


class _Newest:
    """The newest row of a coarse frame, and how many there were."""

    def __init__(self, width: int, first: int):
        self.width, self.first = width, first
        self.known_at, self.row, self.count = np.iinfo(np.int64).min, np.full(width, np.nan, np.float32), 0

    def join(self, moments: np.ndarray, known_at: np.ndarray, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the freshest row of each moment to `out`; bool[n] says whether the frame was warm by then."""
        all_known, all_rows = np.append(self.known_at, known_at), np.concatenate([self.row[None], rows])
        fresh = asof_rows(moments, all_known)
        out[:] = all_rows[fresh]
        warm = self.count - 1 + fresh >= self.first
        self.known_at, self.row, self.count = int(all_known[-1]), all_rows[-1].copy(), self.count + len(rows)
        return warm

    def get_state(self) -> dict:
        return {"known_at": self.known_at, "row": self.row.copy(), "count": self.count}

    def load_state(self, state: dict) -> None:
        self.known_at, self.row, self.count = int(state["known_at"]), state["row"].copy(), int(state["count"])


class _Tail:
    """The last bars that a feature of the user's remembers."""

    _COLUMNS = ("start", "known_at", "open", "high", "low", "close", "volume", "session", "segment")

    def __init__(self, memory: int):
        self.memory = memory
        self.bars: Frame | None = None

    def values(self, made: custom.CustomFeature, new: Frame) -> np.ndarray:
        """float64[n]: the feature at each new bar, from the bars remembered and the new ones."""
        if not len(new):
            return np.empty(0)
        joined = new if self.bars is None else custom.joined(self.bars, new)
        self.bars = custom.tail(joined, self.memory)
        return custom.compute(made, joined)[len(joined) - len(new) :]

    def get_state(self) -> dict:
        if self.bars is None:
            return {}
        columns = {name: getattr(self.bars, name) for name in self._COLUMNS}
        return {"minutes": self.bars.minutes, **{name: col.copy() for name, col in columns.items() if col is not None}}

    def load_state(self, state: dict) -> None:
        columns: dict[str, Any] = {name: state.get(name) for name in self._COLUMNS}
        self.bars = Frame(state["minutes"], **columns) if state else None
