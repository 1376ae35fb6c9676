"""Reference of the guard: what training rows of a bundle looked like, and how far windows of its market were from it.

Bins are quantiles of training rows. Thresholds are measured on training and validation rows as the windows come, so
that seasons, clusters of volatility and other dependence of a real market are in them: the larger of the largest
distance of a validation window, and the 95 % quantile, over blocks of training, of the block's largest. No test row is
read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.quality import find_runs_of_true, off_tick_rows
from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import DAY_NS, HOLE_MINUTES, MINUTE_NS, MarketSpec, assign_sessions
from ml_factory.errors import BarsError
from ml_factory.evaluation.metrics import PROBABILITIES

CHANNELS = {
    "range": "the bars' range for the time of day", "range_change": "the bars' range against the last hours'",
    "volume": "volume for the time of day", "volume_change": "volume against the last hours'",
    "range_for_volume": "the bars' range for their volume", "return": "returns against the usual range",
    "gap": "the step from a close to the next open", "close_place": "the close's place in its bar",
    "open_place": "the open's place in its bar", "momentum": "the product of successive returns",
    "spacing": "the minutes between bars", "outside": "bars outside the trading hours",
}  # fmt: skip
BINS = 20
BAR_WINDOW, BAR_STEP, BLOCK_BARS = 240, 10, 1000
ROW_WINDOW, ROW_STEP, BLOCK_ROWS = 48, 4, 200
OUTCOME_WINDOW = 100
USUAL_BARS, HOUR_BARS = 480, 60  # bars whose mean is the usual level, and that of the last hour
_STRATA = 48  # half hours since the session's open
_ROWS_LOOKED_AT = 20_000  # newest training rows whose windows give thresholds of features
_PROBABILITY_MARGIN = 1.25  # the bins of probabilities are of the validation rows that give the threshold
_OUTCOME_MARGIN, _LEAST_EXCESS = 1.2, 0.05  # nats a row
FEWEST_BARS, FEWEST_ROWS = 3000, 2 * ROW_WINDOW  # of training and of validation, for a reference
_COLUMNS = ("bars", "features", "probabilities")


@dataclass(frozen=True)
class ColumnReference:
    """Quantile bins of C columns, and thresholds of the distances of a window from them.

    edges : float64 [C, BINS - 1], rising; +inf where a column has fewer bins. A value equal to an edge is above it
    shares : float64 [C, BINS + 1], share of training rows in each bin; the last is that of absent values
    limit : float64 [2, C], thresholds of population stability index and Kolmogorov-Smirnov distance
    window, step : rows of a window, and rows from one window to the next
    """

    edges: np.ndarray
    shares: np.ndarray
    limit: np.ndarray
    window: int
    step: int

    @classmethod
    def fit(cls, values: np.ndarray, window: int, step: int) -> "ColumnReference":
        """Return the bins of training rows, float (N, C), without thresholds."""
        columns = values.shape[1]
        edges = np.full((columns, BINS - 1), np.inf)
        for column in range(columns):
            finite = values[:, column][np.isfinite(values[:, column])]
            if len(finite):
                found = np.unique(np.quantile(finite, np.arange(1, BINS) / BINS))
                edges[column, : len(found)] = found
        bins = cls(edges, np.empty((columns, BINS + 1)), np.full((2, columns), np.inf), window, step)
        codes = bins.codes(values)
        shares = np.stack([np.bincount(codes[:, column], minlength=BINS + 1) for column in range(columns)])
        return replace(bins, shares=shares / max(len(values), 1))

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Return the bin of each value, uint8 (N, C)."""
        out = np.zeros(values.shape, np.uint8)
        for place in range(BINS - 1):
            out += values >= self.edges[:, place]
        out[~np.isfinite(values)] = BINS
        return out

    def distances(self, codes: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return PSI and KS, float64 (2, E, C), of the windows of rows before each end."""
        columns = len(self.edges)
        places = codes + np.arange(columns) * (BINS + 1)
        least = 0.5 / self.window  # half an observation in an empty bin
        expected, found = np.maximum(self.shares, least), np.empty((2, len(ends), columns))
        for number, end in enumerate(ends.tolist()):
            counts = np.bincount(places[end - self.window : end].ravel(), minlength=columns * (BINS + 1))
            shares = counts.reshape(columns, BINS + 1) / self.window
            observed = np.maximum(shares, least)
            found[0, number] = ((observed - expected) * np.log(observed / expected)).sum(axis=1)
            found[1, number] = np.abs(np.cumsum(shares - self.shares, axis=1)).max(axis=1)
        return found

    def ratios(self, distances: np.ndarray) -> np.ndarray:
        """Return the larger of both distances as a multiple of its threshold, (E, C); 0 where neither has one."""
        return (distances / np.where(self.limit > 0, self.limit, np.inf)[:, None]).max(axis=0)

    def window_ends(self, count: int, numbered_from: int = 0) -> np.ndarray:
        """Return the ends of the windows in `count` rows, of which the first has this number in its feed."""
        ends = np.arange(self.window, count + 1)
        return ends[(ends + numbered_from) % self.step == 0]


@dataclass(frozen=True)
class GuardReference:
    """The reference of a bundle.

    season : usual log range and volume by half hour of the session (`range`, `volume`); `least_range`, `least_volume`,
        added before the logarithm; `slope` of log range on log volume
    limits : "gap_minutes", "unit_jump", "stuck_bars"; "off_tick", share of training bars with prices off the tick;
        "strange_features", how many features may be beyond their thresholds at once; "excess", by how much the log loss
        of OUTCOME_WINDOW outcomes may exceed the expected one
    bars, features, probabilities : of the channels of bars, and of the rows
    low, high : float64 [F], the range of each feature on training rows
    varying : bool [F], features that were never constant or absent for as long as half a window
    """

    season: Mapping[str, Any]
    limits: Mapping[str, float]
    bars: ColumnReference
    features: ColumnReference
    probabilities: ColumnReference
    low: np.ndarray
    high: np.ndarray
    varying: np.ndarray

    def to_state(self) -> dict[str, Any]:
        """Return plain numbers and arrays, for a bundle."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return state | {name: dict(vars(state[name])) for name in _COLUMNS}

    @classmethod
    def from_state(cls, state: Mapping) -> "GuardReference":
        """Build the reference of a `to_state`."""
        return cls(**{**state, **{name: ColumnReference(**state[name]) for name in _COLUMNS}})


def fit_guard_reference(
    bars: pd.DataFrame, market: MarketSpec, features: pd.DataFrame, predictions: pd.DataFrame, labels: pd.Series,
    split_times: Mapping[str, str],
) -> GuardReference:  # fmt: skip
    """Return the reference of a finished model.

    bars : checked raw bars from the first of training on; those of the test rows are not read
    features : index known_at, all columns of the model
    predictions : index known_at, PROBABILITIES, at least of the validation rows
    labels : index known_at, of rows whose outcome is clear
    split_times : first moment of validation and test rows
    Raises BarsError where training or validation rows are too few.
    """
    validation, test = (pd.Timestamp(split_times[name]) for name in ("validation", "test"))
    length = pd.Timedelta(minutes=market.bar_minutes)
    chunk = to_bar_chunk(bars[bars.index + length <= test], market)
    train = int((bars.index + length <= validation).sum())
    features = features[features.index < test]
    predictions = predictions[(predictions.index >= validation) & (predictions.index < test)]
    train_rows = int((features.index < validation).sum())
    enough = len(chunk.start) - train >= 2 * BAR_WINDOW and len(predictions) >= FEWEST_ROWS
    if train < FEWEST_BARS or train_rows < FEWEST_ROWS or not enough:
        raise BarsError(
            "Too few rows for a reference of the guard", where=market.symbol,
            got=f"{train} bars of training, {len(predictions)} predicted validation rows",
            wanted=f"{FEWEST_BARS} and {FEWEST_ROWS}",
        )  # fmt: skip
    season = _fit_season(chunk.part(0, train), market.calendar)
    channels = bar_channels(chunk, market, season)[USUAL_BARS:]
    of_bars, _ = _with_thresholds(channels, train - USUAL_BARS, BAR_WINDOW, BAR_STEP, BLOCK_BARS)
    values = features.to_numpy(np.float32)
    finite = np.where(np.isfinite(values[:train_rows]), values[:train_rows], np.nan)
    low, high = (np.nan_to_num(one.reduce(finite, axis=0).astype(np.float64)) for one in (np.fmin, np.fmax))
    newest = max(train_rows - _ROWS_LOOKED_AT, 0)
    of_features, ratios = _with_thresholds(values, train_rows, ROW_WINDOW, ROW_STEP, BLOCK_ROWS, first=newest)
    strange = (ratios > 1).sum(axis=1)[:, None].astype(float)
    ends = of_features.window_ends(len(values) - newest)
    usual = float(_threshold(ends, strange, train_rows - newest, BLOCK_ROWS)[0])
    p_N3 = predictions[PROBABILITIES].to_numpy()
    of_p = ColumnReference.fit(p_N3, ROW_WINDOW, ROW_STEP)
    limit = of_p.distances(of_p.codes(p_N3), of_p.window_ends(len(p_N3))).max(axis=1) * _PROBABILITY_MARGIN
    limits = _bar_limits(chunk.part(0, train), market) | {
        "strange_features": max(usual, 0.05 * values.shape[1], 1.0), "excess": _excess_limit(predictions, labels)
    }  # fmt: skip
    varying = ~constant_rows(values[newest:], ROW_WINDOW // 2).any(axis=0)
    return GuardReference(season, limits, of_bars, of_features, replace(of_p, limit=limit), low, high, varying)


def bar_channels(chunk: BarChunk, market: MarketSpec, season: Mapping[str, Any]) -> np.ndarray:
    """Return what drifts of a feed show in, freed of the time of day and of the usual level: float64 (N, channels).

    A row depends on the USUAL_BARS bars before it; NaN where a channel has no value.
    """
    opened, high, low, close, volume = chunk.columns[:5]
    day, stratum, inside = _session_strata(chunk.start, market.calendar)
    minutes, count = chunk.start // MINUTE_NS, len(chunk.start)
    level = np.log(np.log(high / low) + season["least_range"]) - season["range"][stratum]
    amount = ratio = np.full(count, np.nan)
    if len(volume):
        amount = np.log(volume + season["least_volume"]) - season["volume"][stratum]
        ratio = level - season["slope"] * amount
    change, before = np.diff(minutes, prepend=minutes[:1]) / market.bar_minutes, np.append(np.nan, close[:-1])
    same = np.append(False, day[1:] == day[:-1])
    adjacent = np.where(same & (change == 1), 1.0, np.nan)
    usual = np.exp(season["range"][stratum] + _mean_before(level, HOUR_BARS)) * adjacent
    with np.errstate(divide="ignore", invalid="ignore"):
        move, step = np.log(close / before) / usual, np.log(opened / before) / usual
        moved = np.where(high > low, high - low, np.nan)
        columns = [
            level, level - _mean_before(level, USUAL_BARS), amount, amount - _mean_before(amount, USUAL_BARS),
            ratio - _mean_before(ratio, USUAL_BARS), move, step, (close - low) / moved, (opened - low) / moved,
            move * np.append(np.nan, move[:-1]), np.where(same, change, np.nan), ~inside,
        ]  # fmt: skip
    return np.column_stack(columns)


def constant_rows(values: np.ndarray, window: int) -> np.ndarray:
    """Return where the last `window` values of a column are equal, or all absent: bool (N, C); False before."""
    absent = np.isnan(values)
    changes = np.ones(values.shape, bool)
    changes[1:] = (values[1:] != values[:-1]) & ~(absent[1:] & absent[:-1])
    total, out = np.cumsum(changes, axis=0, dtype=np.int32), np.zeros(values.shape, bool)
    out[window - 1 :] = total[window - 1 :] == total[: max(len(values) - window + 1, 0)]
    return out


def _mean_before(values: np.ndarray, length: int) -> np.ndarray:
    """Return the mean of the `length` values before each; NaN where there are fewer."""
    out = np.full(len(values), np.nan)
    if len(values) > length:
        windows = np.lib.stride_tricks.sliding_window_view(values, length)
        out[length:] = windows[:-1].mean(axis=1)  # one by one, so the same bits wherever the values begin
    return out


def _session_strata(start_ns: np.ndarray, calendar: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (session, half hour since its open, inside trading hours) of each bar start."""
    sessions = assign_sessions(start_ns, calendar)
    stratum = np.clip((start_ns - sessions.open_ns) // (DAY_NS // _STRATA), 0, _STRATA - 1)
    return sessions.id, stratum, sessions.inside


def _fit_season(chunk: BarChunk, calendar: str) -> dict[str, Any]:
    high, low = chunk.columns[1:3]
    _, stratum, _ = _session_strata(chunk.start, calendar)
    spread, volume = np.log(high / low), chunk.columns[4]
    least = 0.25 * float(np.median(spread[spread > 0])) if (spread > 0).any() else 1e-6
    least_volume = 0.05 * float(np.median(volume[volume > 0])) if (volume > 0).any() else 1.0
    of_range, of_volume, slope = _medians(np.log(spread + least), stratum), np.zeros(_STRATA), 0.0
    if len(volume):
        log_volume = np.log(volume + least_volume)
        of_volume = _medians(log_volume, stratum)
        x, y = log_volume - of_volume[stratum], np.log(spread + least) - of_range[stratum]
        slope = float((x * y).sum() / max(float((x * x).sum()), 1e-12))
    return {
        "range": of_range, "volume": of_volume, "least_range": least, "least_volume": least_volume, "slope": slope
    }  # fmt: skip


def _medians(values: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Return the median by stratum; the overall one where a stratum has fewer than 30 values."""
    found = pd.Series(values).groupby(stratum).agg(["median", "size"]).reindex(range(_STRATA))
    return found["median"].where(found["size"] >= 30, np.median(values)).to_numpy()


def _with_thresholds(
    values: np.ndarray, train: int, window: int, step: int, block: int, *, first: int = 0
) -> tuple[ColumnReference, np.ndarray]:
    """Return the reference of these columns, and the ratios of all windows from row `first` on to its thresholds.

    train : number of the first `values` that are of training
    """
    bins = ColumnReference.fit(values[:train], window, step)
    codes = bins.codes(values[first:])
    ends = bins.window_ends(len(codes))
    distances = bins.distances(codes, ends)
    limit = np.stack([_threshold(ends, one, train - first, block) for one in distances])
    reference = replace(bins, limit=limit)
    return reference, reference.ratios(distances)


def _threshold(ends: np.ndarray, values: np.ndarray, train: int, block: int) -> np.ndarray:
    """Return the threshold of each column: see the file's docstring. Windows that end up to `train` are of training."""
    training = ends <= train
    starts = np.flatnonzero(np.diff(ends[training] // block, prepend=-1))
    usual = np.quantile(np.maximum.reduceat(values[training], starts, axis=0), 0.95, axis=0)
    return np.maximum(usual, values[~training].max(axis=0))


def _bar_limits(chunk: BarChunk, market: MarketSpec) -> dict[str, float]:
    """Return limits of single bars from what these have about once in 10,000, and their share off the tick."""
    opened, high, low, close = chunk.columns[:4]
    day, _, _ = _session_strata(chunk.start, market.calendar)
    absent = (np.diff(chunk.start) // MINUTE_NS - market.bar_minutes)[np.diff(day) == 0]
    gap = float(np.quantile(absent, 1 - 1e-4)) if len(absent) else 0.0
    jump = float(np.abs(np.log(opened[1:] / close[:-1])).max())
    _, runs = find_runs_of_true(np.append(False, (high == low)[1:] & (np.diff(close) == 0)))
    stuck = float(np.sort(runs)[-(1 + len(close) // 10_000) :][0]) if len(runs) else 1.0
    least_gap = 10 * market.bar_minutes
    return {
        "gap_minutes": float(np.clip(2 * gap, least_gap, max(HOLE_MINUTES, least_gap))),
        "unit_jump": float(np.clip(1.5 * jump, np.log(1.1), np.log(3))),
        "stuck_bars": float(np.clip(2 * stuck, 20, USUAL_BARS)),
        "off_tick": 0.0 if market.tick is None else float(off_tick_rows(chunk.columns[:4], market.tick).mean()),
    }  # fmt: skip


def _excess_limit(predictions: pd.DataFrame, labels: pd.Series) -> float:
    """Return by how much the log loss of a window of validation rows exceeds the expected one, with a margin."""
    known = predictions.index.intersection(labels.index)
    loss, expected = outcome_losses(predictions.loc[known, PROBABILITIES].to_numpy(), labels[known].to_numpy())
    means = np.convolve(loss - expected, np.full(OUTCOME_WINDOW, 1 / OUTCOME_WINDOW), "valid")
    return max(_OUTCOME_MARGIN * float(means.max(initial=0.0)), _LEAST_EXCESS)


def outcome_losses(p_N3: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the log loss of each outcome (-1, 0, 1), and the one that its probabilities let expect."""
    p = np.maximum(p_N3, 1e-6)
    p = p / p.sum(axis=1, keepdims=True)
    return -np.log(p[np.arange(len(p)), labels.astype(int) + 1]), -(p * np.log(p)).sum(axis=1)
