"""Build the feature matrix: every family on the base frame and on coarse frames, joined on `known_at`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.argument_checks import check_field_types
from ml_factory.data.resample import (
    ResampledBars,
    apply_roll_adjustment,
    asof_rows,
    resample_base_and_frames,
    segments_between_rolls,
)
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import BarsError, SettingsError, did_you_mean
from ml_factory.features import (
    calendar,
    custom,
    entropy,
    fractional,
    microstructure,
    momentum,
    regime,
    volatility,
    volume,
    wavelet,
)
from ml_factory.features.engine import FeatureEngine, FeatureFamily, compute_family_columns
from ml_factory.features.multi_timeframe import timeframe_column_name, timeframe_name, timeframe_staleness
from ml_factory.hardware import cores
from ml_factory.progress import progress_phase

FAMILIES: dict[str, FeatureFamily] = {
    "momentum": momentum.FAMILY,
    "volatility": volatility.FAMILY,
    "volume": volume.FAMILY,
    "microstructure": microstructure.FAMILY,
    "regime": regime.FAMILY,
    "entropy": entropy.FAMILY,
    "wavelet": wavelet.FAMILY,
    "fractional": fractional.FAMILY,
    "calendar": calendar.FAMILY,
}
NEEDS_VOLUME = ("volume",)

# Bars of a frame before its first row is used: every window is full. On the base frame the start of a recursion
# contributes under 0.1 % of a deviation. On a coarse frame the forward filters get their first input at bar 97 and
# forget the prior by bar 190: in a file's first rows trend_probability may differ by 0.8 of a deviation,
# wild_probability by 0.3, though never because of later bars (tests/features/test_warmup.py). A live stream waits for
# `warmup_bars`, after which all are within 1e-6.
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
    full_frames : every column of every family on the coarse frames too, instead of the shorter list
    """

    base_minutes: int = 5
    frames: tuple[int, ...] = (15, 30, 60)
    families: tuple[str, ...] = tuple(FAMILIES)
    custom: tuple[str, ...] = ()
    full_frames: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        object.__setattr__(self, "frames", tuple(self.frames))
        object.__setattr__(self, "families", tuple(self.families))
        object.__setattr__(self, "custom", tuple(custom.signed_custom_feature_name(name) for name in self.custom))
        if not 1 <= self.base_minutes <= 60:
            wanted = "a whole number from 1 to 60"
            raise SettingsError("No such base frame", where="base_minutes", got=repr(self.base_minutes), wanted=wanted)
        steps = (self.base_minutes, *self.frames)
        if any(not isinstance(later, int) or later <= before for before, later in pairwise(steps)):
            wanted = f"rising whole numbers above the base frame's {steps[0]}"
            raise SettingsError("Coarse frames are out of order", where="frames", got=self.frames, wanted=wanted)
        for name in self.families:
            if name not in FAMILIES:
                hint = did_you_mean(name, FAMILIES)
                raise SettingsError("Unknown feature family", where="families", got=repr(name), next_step=hint)
        for field, names in (("families", self.families), ("custom", self.custom)):
            if len(set(names)) < len(names) or not (names or field == "custom"):
                wanted = "at least one family, each once" if field == "families" else "each feature once"
                raise SettingsError("Features repeat or lack", where=field, got=names, wanted=wanted)

    @property
    def warmup_bars(self) -> int:
        """Base bars of history after which a row is within 1e-6 of the row that the whole history gives."""
        longest = max(self.frames, default=0)
        coarse = (MEMORY_BARS[self.coarse_frame_columns] + 1) * -(-longest // self.base_minutes) if longest else 0
        session = 2 * 1440 // self.base_minutes
        own = max((custom.get_custom_feature(name).memory for name in self.custom), default=0)
        return max(MEMORY_BARS["base"], coarse, session, own)

    @property
    def coarse_frame_columns(self) -> str:
        """List of columns, and so warm-up, of the coarse frames: "base" or "coarse"."""
        return "base" if self.full_frames else "coarse"

    def to_dict(self) -> dict:
        """Return plain values for a manifest or fingerprint."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def families_for_market(self, market: MarketSpec) -> dict[str, FeatureFamily]:
        """Return the families with columns for this market, in order."""
        return {name: FAMILIES[name] for name in self.families if market.has_volume or name not in NEEDS_VOLUME}


@dataclass(frozen=True)
class FeatureMatrix:
    """Rows after warm-up, in time order.

    values : [N, F], float32 by default, finite
    names : F column names
    known_at : int64[N], UTC nanoseconds
    session, segment : int32[N]
    close : float64[N]
    frame_staleness : "60m" -> minutes of age of the joined bars (mean, median, p99, max)
    base : the whole base frame; row i of the matrix is bar `first + i` of it
    """

    values: np.ndarray
    names: list[str]
    known_at: np.ndarray
    session: np.ndarray
    segment: np.ndarray
    close: np.ndarray
    frame_staleness: dict[str, dict[str, float]]
    base: ResampledBars
    first: int

    def __len__(self) -> int:
        return len(self.values)

    def to_frame(self) -> pd.DataFrame:
        """Return the values as a DataFrame on `known_at` (UTC)."""
        index = pd.DatetimeIndex(self.known_at.astype("datetime64[ns]"), tz="UTC", name="known_at")
        return pd.DataFrame(self.values, index=index, columns=self.names, copy=False)


def build_features(
    bars: pd.DataFrame,
    market: MarketSpec,
    spec: FeatureSpec | None = None,
    *,
    dtype: str = "float32",
    threads: int | None = None,
) -> FeatureMatrix:
    """Build the matrix of `spec` from checked bars (index: UTC starts; open, high, low, close, volume).

    A row holds what was known at its `known_at`, so rows up to a cut are the same bits whatever bars come after.
    Columns depend on the market's stored settings and on `spec` only: without volume no volume column, on a 24-hour
    calendar no overnight gap.

    Parameters
    ----------
    bars, market, spec : the input
    dtype : of the values
    threads : families and frames computed in parallel, at most two by default; the bits do not depend on it

    Raises
    ------
    BarsError : too few bars are left after warm-up
    """
    spec = spec or FeatureSpec()
    threads = threads or min(2, cores())
    made = _build_feature_frames(bars, market, spec, threads)
    base, first, joins, names = made.base, made.first, made.joins, made.names
    values = np.empty((len(base) - first, len(names)), dtype=dtype)
    with progress_phase("features", len(values)) as done:
        with ThreadPoolExecutor(threads) as pool:
            tasks = list(_tasks(made, market, spec, values))
            for task in as_completed([pool.submit(*one) for one in tasks]):
                done(task.result() * len(values) // len(names))
        for name, column in zip(spec.custom, values.T[len(names) - len(spec.custom) :], strict=True):
            custom.fill_custom_feature(name, base, first, column)  # user code runs in the caller's thread
    return FeatureMatrix(
        values=values,
        names=names,
        known_at=base.known_at[first:],
        session=base.session[first:],
        segment=(segments_between_rolls(made.unadjusted) if spec.spans else base.segment)[first:],
        close=made.unadjusted.close[first:],
        frame_staleness={
            timeframe_name(minutes): timeframe_staleness(
                base.known_at[first:], made.frames[minutes].known_at, rows[first:]
            )
            for minutes, rows in joins.items()
        },
        base=made.unadjusted,
        first=first,
    )


@dataclass(frozen=True)
class _FeatureFrames:
    """Frames ready for their columns.

    unadjusted : the base frame at traded prices
    base, frames : at roll-adjusted prices, for features
    joins : frame's minutes -> int64[N], the latest coarse bar of each base bar
    first : the first base bar after warm-up
    names : the columns to compute
    """

    unadjusted: ResampledBars
    base: ResampledBars
    frames: dict[int, ResampledBars]
    joins: dict[int, np.ndarray]
    first: int
    names: list[str]


def _build_feature_frames(bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, threads: int) -> _FeatureFrames:
    """Return the frames of `spec`; raise BarsError where too few bars are left after warm-up."""
    with progress_phase("frames", len(bars)):  # the base at traded prices; features use roll-adjusted ones
        unadjusted, frames = resample_base_and_frames(bars, market, spec.base_minutes, spec.frames, threads=threads)
    base, frames = (
        apply_roll_adjustment(unadjusted),
        {minutes: apply_roll_adjustment(frame) for minutes, frame in frames.items()},
    )
    joins = {minutes: asof_rows(base.known_at, frame.known_at) for minutes, frame in frames.items()}
    first = _first_row(base, joins, FIRST_BARS[spec.coarse_frame_columns])
    if first >= len(base):
        raise BarsError(
            "Too few bars for features",
            where=market.symbol,
            got=f"{len(base)} bars of {spec.base_minutes} minutes",
            wanted=f"{FIRST_BARS['base']} of them and {FIRST_BARS[spec.coarse_frame_columns]} of each frame of "
            f"{spec.frames}, reaching into a second session",
            next_step="give a longer history, or a FeatureSpec with shorter frames",
        )
    return _FeatureFrames(unadjusted, base, frames, joins, first, feature_column_names(market, spec))


def feature_column_names(market: MarketSpec, spec: FeatureSpec | None = None) -> list[str]:
    """Return the columns of `spec` for this market, in order, without reading any file."""
    spec = spec or FeatureSpec()
    families = spec.families_for_market(market).values()
    own, coarse = (
        [name for f in families for name in f.names(market, short)] for short in (False, not spec.full_frames)
    )
    on_frames = [timeframe_column_name(name, minutes) for minutes in spec.frames for name in coarse]
    return own + on_frames + [custom.get_custom_feature(name).name for name in spec.custom]


def build_feature_column(base: ResampledBars, market: MarketSpec, name: str) -> np.ndarray:
    """Compute one column of the built-in families on the base bars, float64[N], NaN until its window is full.

    base : at traded prices. Raises SettingsError for an unknown column
    """
    family = find_column_family(market, name)
    return compute_family_columns(family, apply_roll_adjustment(base), market, coarse=False)[name]


def find_column_family(market: MarketSpec, name: str) -> FeatureFamily:
    """Return the built-in family of a column of the base bars. Raises SettingsError for an unknown column."""
    known = {column: family for family in FAMILIES.values() for column in family.names(market, False)}
    if name not in known:
        step = did_you_mean(name, known) or "give a column of the base bars, such as macd_12_26"
        raise SettingsError("No such column", where=f"columns of {market.symbol}", got=repr(name), next_step=step)
    return known[name]


def _first_row(base: ResampledBars, joins: dict[int, np.ndarray], coarse_bars: int) -> int:
    """Return the first base bar whose session began inside the file and whose frames are all warmed up."""
    second_session = np.flatnonzero(np.diff(base.session))
    begun = int(second_session[0]) + 1 if len(second_session) else len(base)
    warm = (int(np.searchsorted(rows, coarse_bars)) for rows in joins.values())
    return max([FIRST_BARS["base"], begun, *warm])


def _tasks(made: _FeatureFrames, market: MarketSpec, spec: FeatureSpec, values: np.ndarray) -> Iterator[tuple]:
    """Calls that each fill their own columns of `values` and return how many: base families in two groups, frames."""
    place = 0
    for group in _split_feature_families(market, spec):
        engine = FeatureEngine(market, group, coarse=False)
        stop = place + len(engine.names)
        yield _own, engine, made.base, made.first, values[:, place:stop]
        place = stop
    for minutes, frame in made.frames.items():
        engine = FeatureEngine(market, spec.families_for_market(market), coarse=not spec.full_frames)
        stop = place + len(engine.names)
        yield _join, engine, frame, made.joins[minutes][made.first :], values[:, place:stop]
        place = stop


def _split_feature_families(market: MarketSpec, spec: FeatureSpec) -> list[dict[str, FeatureFamily]]:
    """The base frame's families in two groups of about as many columns, in order."""
    families = spec.families_for_market(market)
    counts = np.cumsum([len(family.names(market, False)) for family in families.values()])
    half = int(np.argmin(np.abs(counts - counts[-1] / 2))) + 1
    items = list(families.items())
    return [dict(group) for group in (items[:half], items[half:]) if group]


def _own(engine: FeatureEngine, base: ResampledBars, first: int, out: np.ndarray) -> int:
    """The base frame's columns, of the rows after the warm-up."""
    engine.push(base, out, first)
    return out.shape[1]


def _join(engine: FeatureEngine, frame: ResampledBars, rows: np.ndarray, out: np.ndarray) -> int:
    """The coarse frame's columns as each base row saw them."""
    values = np.empty((len(frame), len(engine.names)), out.dtype)
    engine.push(frame, values, 0)
    _take_feature_rows(values, rows, out)
    return out.shape[1]


@njit(cache=True, nogil=True, error_model="numpy")
def _take_feature_rows(values: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Set out[i] = values[rows[i]], a whole row at a time."""
    for i in range(len(rows)):
        for f in range(values.shape[1]):
            out[i, f] = values[rows[i], f]
