"""Features of bars from a file or a feed: every family on the base frame and on coarse frames, joined on `known_at`.

A file is one push of the stream: bars pushed singly or in chunks give the rows of `build_features`, bit for bit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings, check_values
from ml_factory.data.resample import (
    BarChunk,
    BarStream,
    ResampledBars,
    apply_roll_adjustment,
    asof_rows,
    known_at_index,
    resample_bars,
    segments_between_rolls,
    to_bar_chunk,
)
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError, did_you_mean
from ml_factory.features import custom
from ml_factory.features.calendar import calendar
from ml_factory.features.engine import FeatureEngine, FeatureFamily, column_names
from ml_factory.features.entropy import entropy
from ml_factory.features.fractional import fractional
from ml_factory.features.microstructure import microstructure
from ml_factory.features.momentum import momentum
from ml_factory.features.regime import regime
from ml_factory.features.volatility import volatility
from ml_factory.features.volume import volume
from ml_factory.features.wavelet import wavelet
from ml_factory.progress import progress_phase

FAMILIES: dict[str, FeatureFamily] = {
    family.__name__: family
    for family in (
        momentum, volatility, volume, microstructure, regime, entropy, wavelet, fractional, calendar
    )
}  # fmt: skip
PIECE = 65_536  # bars of a file pushed at once: what is made of them in between stays small
_LONG_FRAMES = {240: "4h", 1440: "1d"}

# Bars of a frame before its first row is used: every window is full. On the base frame the start of a recursion
# contributes under 0.1 % of a deviation. On a coarse frame the forward filters get their first input at bar 97 and
# forget the prior by bar 190: in a file's first rows trend_probability may differ by 0.8 of a deviation,
# wild_probability by 0.3, though never because of later bars (tests/contract/features/test_warmup.py). A live stream
# waits for `warmup_bars`, after which all are within 1e-6.
FIRST_BARS = {"base": 320, "coarse": 110}
# Bars of a frame after which a cold start is within 1e-6 of a column's deviation.
MEMORY_BARS = {"base": 640, "coarse": 320}


@dataclass(frozen=True)
class FeatureSpec:
    """Selection of columns.

    base_minutes : length of the base bars; a row is known at each one's `known_at`
    spans : input windows of rows continue over session ends and holes, never over a roll's step in the price; else a
        row's `segment` changes at all of these and a window stays inside one. No column depends on it
    frames : lengths of the coarse frames in minutes, increasing, each longer than the base bars; 1440 is a whole
        day
    families : names out of FAMILIES, in the order of the columns
    custom : names of the user's own features (`features.custom.feature`), stored as "name#source hash"
    """

    base_minutes: int = 5
    frames: tuple[int, ...] = (15, 30, 60)
    families: tuple[str, ...] = tuple(FAMILIES)
    custom: tuple[str, ...] = ()
    spans: bool = False

    def __post_init__(self) -> None:
        check_settings(self, base_minutes="[1, 60]")
        object.__setattr__(self, "frames", tuple(self.frames))
        object.__setattr__(self, "families", tuple(self.families))
        object.__setattr__(self, "custom", tuple(custom.signed_custom_feature_name(name) for name in self.custom))
        steps = (self.base_minutes, *self.frames)
        if any(not isinstance(later, int) or later <= before for before, later in pairwise(steps)):
            wanted = f"rising whole numbers above the base frame's {steps[0]}"
            raise SettingsError("Coarse frames are out of order", where="frames", got=self.frames, wanted=wanted)
        for name in self.families:
            check_values({"families": name}, families=tuple(FAMILIES))
        for field, names in (("families", self.families), ("custom", self.custom)):
            if len(set(names)) < len(names) or not (names or field == "custom"):
                wanted = "at least one family, each once" if field == "families" else "each feature once"
                raise SettingsError("Features repeat or lack", where=field, got=names, wanted=wanted)

    @property
    def warmup_bars(self) -> int:
        """Base bars of history after which a row is within 1e-6 of the row that the whole history gives."""
        longest = max(self.frames, default=0)
        coarse = (MEMORY_BARS["coarse"] + 1) * -(-longest // self.base_minutes) if longest else 0
        session = 2 * 1440 // self.base_minutes
        own = max((custom.get_custom_feature(name).memory for name in self.custom), default=0)
        return max(MEMORY_BARS["base"], coarse, session, own)

    def to_dict(self) -> dict:
        """Return plain values for a manifest or fingerprint."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class FeatureRows:
    """Rows as they became known, in time order.

    values : [N, F], float32 by default
    names : F column names
    known_at : int64[N], UTC nanoseconds
    segment : int32[N]
    close : float64[N], as traded
    base : base bars that these bars completed, as traded; row i is bar `first + i` of it
    joined : frame's minutes -> int64[N], when the newest bar of the frame that the row holds became known
    side : of meta-labels the side of the primary rule (`targets.make_labels`), index known_at; else None
    """

    values: np.ndarray
    names: list[str]
    known_at: np.ndarray
    segment: np.ndarray
    close: np.ndarray
    base: ResampledBars
    first: int
    joined: dict[int, np.ndarray]
    side: pd.Series | None = None

    def __len__(self) -> int:
        return len(self.known_at)

    @property
    def frame_staleness(self) -> dict[str, dict[str, float]]:
        """Age of the joined bars in minutes, "60m" -> mean and max.

        In a session it is below the frame's length; the first rows of a session see the last session's bar.
        """
        ages = {frame_name(one): (self.known_at - known_at) / MINUTE_NS for one, known_at in self.joined.items()}
        return {name: {"mean": float(age.mean()), "max": float(age.max())} for name, age in ages.items()}

    def to_frame(self) -> pd.DataFrame:
        """Return the values as a DataFrame on `known_at` (UTC)."""
        return pd.DataFrame(self.values, index=known_at_index(self.known_at), columns=self.names, copy=False)


def build_features(
    bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec | None = None, *, dtype: str = "float32",
    states: dict[int, dict] | None = None, keep: Callable[[np.ndarray, int], object] | None = None,
) -> FeatureRows:  # fmt: skip
    """Build the rows of `spec` from checked bars (index: UTC starts; open, high, low, close, volume).

    A row holds what was known at its `known_at`, so rows up to a cut are the same bits whatever bars come after.
    Columns depend on the market's stored settings and on `spec` only: without volume no volume column, on a 24-hour
    calendar no overnight gap.

    states : its keys are positions of bars; its values become the state of the stream before each
    keep : takes the values of each piece in order, and how many rows are left with them; `values` of the result are
        then not kept. What it was given changes after its next call has returned

    Raises BarsError where too few bars are left after warm-up, SettingsError for an own feature that is not finite.
    """
    spec, states = spec or FeatureSpec(), {} if states is None else states
    with progress_phase("features", len(bars)) as done:
        chunk, stream = to_bar_chunk(bars, market), FeatureStream(market, spec, dtype=dtype)
        base = resample_bars(bars, market, spec.base_minutes)
        piece = len(bars) + 1 if spec.custom else PIECE  # the user's own features see the whole file
        # A piece completes at most the bar that was begun before it, and one for each of its own.
        size = len(base) if keep is None else min(len(base), piece + 1)
        values, pushed = np.empty((1 if keep is None else 2, size, len(stream.names)), dtype), []
        count = kept = 0
        for begin, end in pairwise([0, *sorted({*range(piece, len(bars), piece), *states, len(bars)})]):
            if begin in states:
                states[begin] = stream.get_state()
            out = values[0, count:] if keep is None else values[kept % 2]
            made = stream.push(chunk.part(begin, end), out)
            for place, name in enumerate(spec.custom, len(stream.names) - len(spec.custom)):
                custom.check_finite(name, made.values[:, place], count + made.first)
            if keep and len(made):
                keep(made.values, len(base) - count - made.first)
                kept += 1
            count += len(made.base)
            pushed.append((made.segment, made.joined))
            done(end - begin)
        first = len(base) - sum(len(segment) for segment, _ in pushed)  # once ready, always ready
        rows = FeatureRows(
            values[0, first:] if keep is None else values[0, :0], stream.names, base.known_at[first:],
            np.concatenate([segment for segment, _ in pushed]), base.close[first:], base, first,
            {minutes: np.concatenate([joined[minutes] for _, joined in pushed]) for minutes in spec.frames},
        )  # fmt: skip
    if not len(rows):
        wanted = dict.fromkeys(spec.frames, FIRST_BARS["coarse"])
        wanted[spec.base_minutes] = FIRST_BARS["base"]
        there = {minutes: len(resample_bars(bars, market, minutes)) for minutes in sorted(wanted)}
        short = [f"{count:,} bars of {frame_name(minutes)}, {wanted[minutes]} wanted"
                 for minutes, count in there.items() if count < wanted[minutes]]  # fmt: skip
        raise BarsError(
            "Too few bars for features",
            where=market.symbol,
            got="; ".join(short) or f"{len(bars):,} bars",
            wanted="enough of each frame, reaching into a second session",
            next_step="give a longer history, or a FeatureSpec with shorter frames",
        )
    return rows


def feature_column_names(market: MarketSpec, spec: FeatureSpec | None = None) -> list[str]:
    """Return the columns of `spec` for this market, in order, without reading any file."""
    return FeatureStream(market, spec).names


def find_column_family(market: MarketSpec, name: str) -> FeatureFamily:
    """Return the built-in family of a column of the base bars. Raises SettingsError for an unknown column."""
    known = {
        column: family for family in FAMILIES.values() for column in column_names(family, market, False)
    }  # fmt: skip
    if name not in known:
        step = did_you_mean(name, known) or "give a column of the base bars, such as macd_12_26"
        raise SettingsError("No such column", where=f"columns of {market.symbol}", got=repr(name), next_step=step)
    return known[name]


def frame_name(minutes: int) -> str:
    """Return the name of a frame: 60m, 4h, 1d. A column of it is `rsi_14@60m`."""
    return _LONG_FRAMES.get(minutes, f"{minutes}m")


class FeatureStream:
    """Stream of feature rows; rows are returned at their `known_at`.

    Call `push` for bars, and `advance` when a minute ends without one.

    cold : the first bar pushed is not the first of the history: no row before `spec.warmup_bars`, and later rows are
        within 1e-6 of a column's deviation instead of exact, as the user's own features are in any case
    """

    def __init__(
        self, market: MarketSpec, spec: FeatureSpec | None = None, *, cold: bool = False, dtype: str = "float32"
    ):
        self.market, self.cold, self.spec = market, cold, spec or FeatureSpec()
        self._settings = json.dumps({"market": market.to_dict(), "spec": self.spec.to_dict(), "cold": cold})
        families = {name: FAMILIES[name] for name in self.spec.families}
        self._base = _Frame(market, self.spec.base_minutes, families, False, dtype)
        self._coarse = {minutes: _Frame(market, minutes, families, True, dtype) for minutes in self.spec.frames}
        on_frames = [
            f"{name}@{frame_name(minutes)}" for minutes, one in self._coarse.items() for name in one.engine.names
        ]
        own = [custom.get_custom_feature(name).name for name in self.spec.custom]
        self.names, self.dtype = self._base.engine.names + on_frames + own, dtype
        self._recent: dict[str, ResampledBars | None] = dict.fromkeys(self.spec.custom)
        self._first_session: int | None = None
        self._second = False
        self._chain, self._stretch = 1.0, 0  # of the newest base bar, where windows span sessions

    def push(self, bars: pd.DataFrame | BarChunk, out: np.ndarray | None = None) -> FeatureRows:
        """Return the rows that these checked bars complete; all bars later than those before.

        out : [at least the new base bars, F], which their values are written to, whether they are ready or not
        """
        chunk = bars if isinstance(bars, BarChunk) else to_bar_chunk(bars, self.market)
        new = {minutes: one.bars.push(chunk) for minutes, one in self._coarse.items()}
        return self._rows(self._base.bars.push(chunk), new, out)

    def advance(self, now_ns: int) -> FeatureRows:
        """Return the rows that are complete by the clock (UTC ns), once all bars up to then are in."""
        new = {minutes: one.bars.advance(now_ns) for minutes, one in self._coarse.items()}
        return self._rows(self._base.bars.advance(now_ns), new)

    def lacking_bars(self, wanted: int) -> int:
        """Return how many of `wanted` base bars are still to come; at least 1 before the second session begins."""
        return max(wanted - self._base.count, 0 if self._second else 1)

    def get_state(self) -> dict:
        """Return plain numbers and arrays; `load_state` on an equal stream continues from them exactly."""
        return {
            "settings": self._settings,
            "base": self._base.get_state(),
            "coarse": {str(minutes): one.get_state() for minutes, one in self._coarse.items()},
            "custom": {name: {} if bars is None else bars.to_dict() for name, bars in self._recent.items()},
            "first_session": self._first_session,
            "second": self._second,
            "chain": self._chain,
            "stretch": self._stretch,
        }

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`; raise SettingsError for another market or spec."""
        if state["settings"] != self._settings:
            raise SettingsError(
                "The state is of another stream", where="state", got=state["settings"], wanted=self._settings,
                next_step="build the FeatureStream with the market and spec of the one that was saved",
            )  # fmt: skip
        self._base.load_state(state["base"])
        for minutes, one in self._coarse.items():
            one.load_state(state["coarse"][str(minutes)])
        self._recent = {name: ResampledBars(**bars) if bars else None for name, bars in state["custom"].items()}
        self._first_session, self._second = state["first_session"], state["second"]
        self._chain, self._stretch = state["chain"], state["stretch"]

    def _rows(
        self, base: ResampledBars, coarse: Mapping[int, ResampledBars], out: np.ndarray | None = None
    ) -> FeatureRows:
        """Return the rows of these new bars, at traded prices; features see prices without the steps of rolls."""
        adjusted = apply_roll_adjustment(base)
        values = np.empty((len(base), len(self.names)), self.dtype) if out is None else out[: len(base)]
        place = len(self._base.engine.names)
        ready = self._ready(base)
        self._base.push(adjusted, values[:, :place])
        joined = {}
        for minutes, one in self._coarse.items():
            stop = place + len(one.engine.names)
            new = apply_roll_adjustment(coarse[minutes])
            joined[minutes], number = one.join(base.known_at, new, values[:, place:stop])
            ready &= number >= FIRST_BARS["coarse"]
            place = stop
        for column, name in enumerate(self.spec.custom, place):
            values[:, column] = self._own(name, adjusted)
        segment = self._stretches(base) if self.spec.spans else base.segment
        first = len(base) - int(np.count_nonzero(ready))  # once ready, always ready
        return FeatureRows(
            values[first:], self.names, base.known_at[first:], segment[first:],
            base.close[first:], base, first, {minutes: known_at[first:] for minutes, known_at in joined.items()},
        )  # fmt: skip

    def _own(self, name: str, new: ResampledBars) -> np.ndarray:
        """Return float64[n]: the user's feature at each new bar, from the recent bars and the new ones."""
        made, before = custom.get_custom_feature(name), self._recent[name]
        if not len(new):
            return np.empty(0)
        columns = {n: x for n, x in new.to_dict().items() if isinstance(x, np.ndarray)}
        joined: dict[str, Any] = {
            n: np.concatenate([getattr(before or new.part(0, 0), n), x]) for n, x in columns.items()
        }
        bars = replace(new, **joined)
        self._recent[name] = bars.part(-made.memory, len(bars))
        return custom.compute_custom_feature(made, bars)[len(bars) - len(new) :]

    def _stretches(self, base: ResampledBars) -> np.ndarray:
        """Return `segments_between_rolls` of the next bars, at traded prices."""
        found = segments_between_rolls(base, (self._chain, self._stretch))
        if len(base):
            self._chain = 1.0 if base.chain is None else float(base.chain[-1])
            self._stretch = int(found[-1])
        return found

    def _ready(self, base: ResampledBars) -> np.ndarray:
        """Return bool[n]: rows whose base frame is warmed up and whose session began after the stream."""
        if not len(base):
            return np.empty(0, bool)
        if self._first_session is None:
            self._first_session = int(base.session[0])
        begun = np.maximum.accumulate((base.session != self._first_session) | self._second)
        self._second = bool(begun[-1])
        least = max(FIRST_BARS["base"], self.spec.warmup_bars if self.cold else 0)
        return begun & (self._base.count + np.arange(len(base)) >= least)


class _Frame:
    """Bars of one length, their columns, and the newest row of these.

    count : bars so far
    """

    def __init__(self, market: MarketSpec, minutes: int, families: dict[str, FeatureFamily], coarse: bool, dtype: str):
        self.bars, self.engine = BarStream(market, minutes), FeatureEngine(market, families, coarse=coarse)
        self.count, self.known_at = 0, np.iinfo(np.int64).min
        self.row = np.full(len(self.engine.names), np.nan, dtype)

    def push(self, new: ResampledBars, out: np.ndarray) -> None:
        """Write the columns of these bars to `out`."""
        self.engine.push(new, out)
        self.count += len(new)

    def join(self, moments: np.ndarray, new: ResampledBars, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write the latest row of each moment to `out`; return (when it became known, its number in the frame)."""
        known_at, before = np.append(self.known_at, new.known_at), self.count - 1
        rows = np.empty((1 + len(new), len(self.row)), self.row.dtype)
        rows[0] = self.row
        self.push(new, rows[1:])
        latest = asof_rows(moments, known_at)
        out[:] = rows[latest]
        self.known_at, self.row = int(known_at[-1]), rows[-1].copy()
        return known_at[latest], before + latest

    def get_state(self) -> dict:
        return {
            "bars": self.bars.get_state(), "engine": self.engine.get_state(), "count": self.count,
            "known_at": self.known_at, "row": self.row.copy(),
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self.bars.load_state(state["bars"])
        self.engine.load_state(state["engine"])
        self.count, self.known_at, self.row = int(state["count"]), int(state["known_at"]), state["row"].copy()
