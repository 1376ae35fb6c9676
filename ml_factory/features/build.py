"""Bars in, one matrix out: every family on the base frame and on coarse frames, joined on `known_at`."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from ml_factory.data.resample import Frame, asof_rows, base_frame
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError, SettingsError, did_you_mean
from ml_factory.features.calendar import calendar
from ml_factory.features.microstructure import microstructure
from ml_factory.features.momentum import momentum
from ml_factory.features.multi_timeframe import column_at, staleness
from ml_factory.features.regime import regime
from ml_factory.features.volatility import volatility
from ml_factory.features.volume import volume
from ml_factory.features.wavelet import wavelet

Family = Callable[[Frame, MarketSpec, bool], dict[str, np.ndarray]]

FAMILIES: dict[str, Family] = {
    "momentum": momentum,
    "volatility": volatility,
    "volume": volume,
    "microstructure": microstructure,
    "regime": regime,
    "wavelet": wavelet,
    "calendar": calendar,
}
NEEDS_VOLUME = ("volume",)

# Bars of a frame before its first row is used: every window is full, and a recursion's start weighs under 0.1 %.
FIRST_BARS = {"base": 320, "coarse": 110}
# Bars of a frame after which a cold start is within 1e-6 of a column's deviation.
MEMORY_BARS = {"base": 640, "coarse": 320}


@dataclass(frozen=True)
class FeatureSpec:
    """Which columns to make.

    base_minutes : length of the base bars; a row stands at each one's `known_at`.
    frames : lengths of the coarse frames in minutes, rising, each longer than the base; 1440 is the exchange day.
    families : names out of FAMILIES, in the order of the columns.
    """

    base_minutes: int = 5
    frames: tuple[int, ...] = (15, 30, 60)
    families: tuple[str, ...] = tuple(FAMILIES)

    def __post_init__(self):
        object.__setattr__(self, "frames", tuple(self.frames))
        object.__setattr__(self, "families", tuple(self.families))
        if not isinstance(self.base_minutes, int) or not 1 <= self.base_minutes <= 60:
            wanted = "a whole number from 1 to 60"
            raise SettingsError("No such base frame", where="base_minutes", got=repr(self.base_minutes), wanted=wanted)
        steps = (self.base_minutes, *self.frames)
        if any(not isinstance(later, int) or later <= before for before, later in pairwise(steps)):
            wanted = f"rising whole numbers above the base frame's {self.base_minutes}"
            raise SettingsError("Coarse frames are out of order", where="frames", got=self.frames, wanted=wanted)
        for name in self.families:
            if name not in FAMILIES:
                hint = did_you_mean(name, FAMILIES)
                raise SettingsError("Unknown feature family", where="families", got=repr(name), next_step=hint)
        if not self.families or len(set(self.families)) < len(self.families):
            wanted = "at least one family, each once"
            raise SettingsError("Feature families repeat or lack", where="families", got=self.families, wanted=wanted)

    @property
    def warmup_bars(self) -> int:
        """Base bars of history after which a row is within 1e-6 of the row that the whole history gives."""
        longest = max(self.frames, default=0)
        coarse = (MEMORY_BARS["coarse"] + 1) * -(-longest // self.base_minutes) if longest else 0
        session = 2 * 1440 // self.base_minutes
        return max(MEMORY_BARS["base"], coarse, session)

    def to_dict(self) -> dict:
        """Plain values for a manifest or fingerprint."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class FeatureMatrix:
    """Rows after warm-up, in time order.

    values : [N, F], float32 unless asked otherwise, finite.  names : F column names.
    known_at : int64[N], UTC nanoseconds.  session, segment : int32[N].  close : float64[N].
    frame_staleness : "60m" -> minutes of age of the joined bars (mean, median, p99, max).
    base : the whole base frame; row i of the matrix is bar `first + i` of it.
    """

    values: np.ndarray
    names: list[str]
    known_at: np.ndarray
    session: np.ndarray
    segment: np.ndarray
    close: np.ndarray
    frame_staleness: dict[str, dict[str, float]]
    base: Frame
    first: int

    def __len__(self) -> int:
        return len(self.values)

    def to_frame(self) -> pd.DataFrame:
        """The values as a DataFrame on `known_at` (UTC)."""
        index = pd.DatetimeIndex(self.known_at.astype("datetime64[ns]"), tz="UTC", name="known_at")
        return pd.DataFrame(self.values, index=index, columns=self.names, copy=False)


def build_features(
    bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec | None = None, *, dtype: str = "float32"
) -> FeatureMatrix:
    """The matrix of `spec` for checked one-minute bars (index: UTC starts; open, high, low, close, volume).

    A row holds what was known at its `known_at`, so rows up to a cut are the same bits whatever bars come after.
    Columns depend on the market's stored settings and on `spec` only: without volume no volume column, on a 24-hour
    calendar no overnight gap. Raises BarsError where too few bars are left after warm-up.
    """
    spec = spec or FeatureSpec()
    base = base_frame(bars, market, spec.base_minutes)
    coarse = {minutes: base_frame(bars, market, minutes) for minutes in spec.frames}
    joins = {minutes: asof_rows(base.known_at, frame.known_at) for minutes, frame in coarse.items()}
    first = _first_row(base, joins)
    if first >= len(base):
        raise BarsError(
            "Too few bars for features",
            where=market.symbol,
            got=f"{len(base)} bars of {spec.base_minutes} minutes",
            wanted=f"{FIRST_BARS['base']} of them and {FIRST_BARS['coarse']} of each of the frames {spec.frames}, "
            "reaching into a second session",
            next_step="give a longer history, or a FeatureSpec with shorter frames",
        )
    names = column_names(market, spec)
    values = np.empty((len(base) - first, len(names)), dtype=dtype)
    columns = _all_columns(base, coarse, joins, first, market, spec)
    for place, (declared, (name, column)) in enumerate(zip(names, columns, strict=True)):
        assert name == declared, f"column {name} stands where {declared} was declared"
        values[:, place] = column
    ages = {
        f"{minutes}m": staleness(base.known_at[first:], coarse[minutes].known_at, rows[first:])
        for minutes, rows in joins.items()
    }
    return FeatureMatrix(
        values=values,
        names=names,
        known_at=base.known_at[first:],
        session=base.session[first:],
        segment=base.segment[first:],
        close=base.close[first:],
        frame_staleness=ages,
        base=base,
        first=first,
    )


def column_names(market: MarketSpec, spec: FeatureSpec | None = None) -> list[str]:
    """The columns of `spec` for this market, in order, without looking at any file."""
    spec = spec or FeatureSpec()
    day = 19_724  # any trading day: Tuesday, 2 January 2024, 15:00 UTC
    start = (day * 1440 + 15 * 60 + np.arange(4)) * MINUTE_NS
    ones = np.ones(4)
    volume = ones if market.has_volume else None
    session = np.full(4, day, np.int32)
    bars = Frame(1, start, start + MINUTE_NS, ones, ones, ones, ones, volume, session, session)
    names = [name for name, _ in _frame_columns(bars, market, spec, coarse=False)]
    on_frames = [name for name, _ in _frame_columns(bars, market, spec, coarse=True)] if spec.frames else []
    return names + [column_at(name, minutes) for minutes in spec.frames for name in on_frames]


def _first_row(base: Frame, joins: dict[int, np.ndarray]) -> int:
    """First base bar whose every frame is warm and whose session began inside the file."""
    second_session = np.flatnonzero(np.diff(base.session))
    first = max(FIRST_BARS["base"], int(second_session[0]) + 1 if len(second_session) else len(base))
    return max([first, *(int(np.searchsorted(rows, FIRST_BARS["coarse"])) for rows in joins.values())])


def _frame_columns(
    bars: Frame, market: MarketSpec, spec: FeatureSpec, *, coarse: bool
) -> Iterator[tuple[str, np.ndarray]]:
    for family in spec.families:
        if market.has_volume or family not in NEEDS_VOLUME:
            yield from FAMILIES[family](bars, market, coarse).items()


def _all_columns(
    base: Frame,
    coarse: dict[int, Frame],
    joins: dict[int, np.ndarray],
    first: int,
    market: MarketSpec,
    spec: FeatureSpec,
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, values from row `first` on), base columns first, then each coarse frame's as its rows saw them."""
    for name, column in _frame_columns(base, market, spec, coarse=False):
        yield name, column[first:]
    for minutes, frame in coarse.items():
        rows = joins[minutes][first:]
        for name, column in _frame_columns(frame, market, spec, coarse=True):
            yield column_at(name, minutes), column[rows]
