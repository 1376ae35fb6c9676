"""Fit the guard's reference: bins on training rows, thresholds on blocks of training and validation rows.

No test row is read. A threshold is the larger of two: the largest distance of any validation window, and the 95 %
quantile, over blocks of 1,000 training bars, of the block's largest. Both are taken as the windows come, so that
seasons, volatility clusters and other dependence of a real market are in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.quality import find_runs_of_true
from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.errors import BarsError
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.guard.bar_channels import BarChannels, fit_season, session_strata
from ml_factory.inference.guard.bar_checks import off_tick_bars
from ml_factory.inference.guard.block_martingale import BlockMartingale, BlockScores, fit_block_scores, fit_levels
from ml_factory.inference.guard.drift import PART, ColumnDrift
from ml_factory.inference.guard.histograms import ReferenceBins
from ml_factory.inference.guard.outcomes import OutcomeCheck
from ml_factory.inference.guard.reference import ColumnReference, GuardReference

BAR_WINDOW, BAR_STEP = 240, 10  # bars
ROW_WINDOW, ROW_STEP = 48, 4  # feature rows
BLOCK_BARS, BLOCK_ROWS = 1000, 200
WARMUP_BARS = 500  # bars after which the channels' usual levels are known
ROWS_LOOKED_AT = 20_000  # newest training rows whose windows give thresholds of features
PROBABILITY_MARGIN = 1.25  # the bins of probabilities are of the validation rows that give the threshold
OUTCOME_MARGIN, LEAST_CAPITAL = 1.2, float(np.log(100))
FEWEST_BARS, FEWEST_ROWS = 3000, 2 * ROW_WINDOW  # of training and of validation, for a reference


@dataclass(frozen=True)
class FinishedRows:
    """Feature rows and predictions of a finished model.

    features : index known_at, all columns of the model
    predictions : index known_at, PROBABILITIES, at least of the validation rows
    labels : index known_at, of rows whose outcome is clear
    horizon : base bars that a label spans
    """

    features: pd.DataFrame
    predictions: pd.DataFrame
    labels: pd.Series
    horizon: int


def fit_guard_reference(
    bars: pd.DataFrame, market: MarketSpec, rows: FinishedRows, split_times: Mapping[str, str]
) -> GuardReference:
    """Return the reference of a finished model.

    bars : checked raw bars from the first of training on; those of the test rows are not read
    split_times : first moment of validation and test rows
    Raises BarsError where training or validation rows are too few.
    """
    validation, test = (pd.Timestamp(split_times[name]) for name in ("validation", "test"))
    length = pd.Timedelta(minutes=market.bar_minutes)
    chunk = to_bar_chunk(bars[bars.index + length <= test], market)
    train = int((bars.index + length <= validation).sum())
    features = rows.features[rows.features.index < test]
    predictions = rows.predictions[(rows.predictions.index >= validation) & (rows.predictions.index < test)]
    train_rows = int((features.index < validation).sum())
    enough = len(chunk.start) - train >= 2 * BAR_WINDOW and len(predictions) >= FEWEST_ROWS
    if train < FEWEST_BARS or train_rows < FEWEST_ROWS or not enough:
        raise BarsError(
            "Too few rows for a reference of the guard", where=market.symbol,
            got=f"{train} bars of training, {len(predictions)} predicted validation rows",
            wanted=f"{FEWEST_BARS} and {FEWEST_ROWS}",
        )  # fmt: skip
    season = fit_season(chunk.part(0, train), market.calendar)
    columns, codes = _bar_reference(BarChannels(market, season).push(chunk), train)
    follow, scale, levels, capital = _martingale(columns.bins, codes, train - WARMUP_BARS)
    values = features.to_numpy(np.float32)
    of_features, strange = _feature_reference(values, train_rows)
    of_p = _probability_reference(predictions[PROBABILITIES].to_numpy())
    return GuardReference(
        season=season, limits=_limits(chunk.part(0, train), market), bars=columns, follow=follow, scale=scale,
        levels=levels, capital=capital, rows=_joined(of_features, of_p), low=_extreme(np.fmin, values[:train_rows]),
        high=_extreme(np.fmax, values[:train_rows]), strange_features=strange,
        outcomes=_outcome_threshold(predictions, rows.labels, rows.horizon),
    )  # fmt: skip


def _bar_reference(channels: np.ndarray, train: int) -> tuple[ColumnReference, np.ndarray]:
    """Return the reference of the channels, and the bins of all from WARMUP_BARS on."""
    bins = ReferenceBins.fit(channels[WARMUP_BARS:train])
    codes = bins.codes(channels[WARMUP_BARS:])
    return _with_thresholds(bins, codes, train - WARMUP_BARS, (BAR_WINDOW, BAR_STEP), BLOCK_BARS), codes


def _with_thresholds(
    bins: ReferenceBins, codes: np.ndarray, train: int, window: tuple[int, int], block: int
) -> ColumnReference:
    """Return the bins with thresholds of both distances."""
    none = np.zeros(len(bins.edges))
    rows, psi, ks = _windows(ColumnReference(bins, none, none, *window), codes)
    return ColumnReference(bins, *(_threshold(rows, one, train, block) for one in (psi, ks)), *window)


def _windows(reference: ColumnReference, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows, PSI, KS) of all windows."""
    drift, found = ColumnDrift(reference), []
    for start in range(0, len(codes), PART):
        rows, _, psi, ks = drift.push(codes[start : start + PART])
        found.append((rows + start, psi, ks))
    rows, psi, ks = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return rows, psi, ks


def _threshold(rows: np.ndarray, values: np.ndarray, train: int, block: int) -> np.ndarray:
    """Return the threshold of each column: see the file's docstring. `rows` < train are of training."""
    training, held_out = rows < train, rows >= train
    usual = np.quantile(_block_maxima(rows[training], values[training], block), 0.95, axis=0)
    return np.maximum(usual, values[held_out].max(axis=0))


def _block_maxima(rows: np.ndarray, values: np.ndarray, block: int) -> np.ndarray:
    return np.maximum.reduceat(values, np.flatnonzero(np.diff(rows // block, prepend=-1)), axis=0)


def _martingale(bins: ReferenceBins, codes: np.ndarray, train: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return follow, scale and levels of `block_martingale`, and the threshold of the log capital.

    train : number of the first `codes` that are of training
    """
    follow, scale = fit_block_scores(bins, codes[:train])
    rows, scores = BlockScores(bins, follow, scale).push(codes)
    levels = fit_levels(scores[rows < train])
    capital = _threshold(rows, BlockMartingale(levels).push(scores)[:, None], train, BLOCK_BARS)
    return follow, scale, levels, max(float(capital[0]), LEAST_CAPITAL)


def _feature_reference(values: np.ndarray, train: int) -> tuple[ColumnReference, float]:
    """Return the reference of the features, and the threshold of the number of strange ones."""
    bins = ReferenceBins.fit(values[:train])
    first = max(train - ROWS_LOOKED_AT, 0)
    codes = bins.codes(values[first:])
    reference = _with_thresholds(bins, codes, train - first, (ROW_WINDOW, ROW_STEP), BLOCK_ROWS)
    rows, psi, ks = _windows(reference, codes)
    strange = (ColumnDrift(reference).ratios(psi, ks) > 1).sum(axis=1)
    usual = float(_threshold(rows, strange[:, None].astype(float), train - first, BLOCK_ROWS)[0])
    return reference, max(usual, 0.05 * values.shape[1], 1.0)


def _probability_reference(p_N3: np.ndarray) -> ColumnReference:
    bins, none = ReferenceBins.fit(p_N3), np.zeros(3)
    _, psi, ks = _windows(ColumnReference(bins, none, none, ROW_WINDOW, ROW_STEP), bins.codes(p_N3))
    return ColumnReference(
        bins, psi.max(axis=0) * PROBABILITY_MARGIN, ks.max(axis=0) * PROBABILITY_MARGIN, ROW_WINDOW, ROW_STEP
    )


def _joined(first: ColumnReference, second: ColumnReference) -> ColumnReference:
    bins = ReferenceBins(
        np.concatenate([first.bins.edges, second.bins.edges]), np.concatenate([first.bins.shares, second.bins.shares])
    )
    psi, ks = (np.concatenate([getattr(one, name) for one in (first, second)]) for name in ("psi", "ks"))
    return ColumnReference(bins, psi, ks, first.window, first.step)


def _extreme(reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Return the least or the largest finite value of each column; 0 where it has none."""
    found = reduce.reduce(np.where(np.isfinite(values), values, np.nan), axis=0)
    return np.where(np.isnan(found), 0.0, found).astype(np.float64)


def _limits(chunk: BarChunk, market: MarketSpec) -> dict[str, float]:
    """Return the limits of `bar_checks.BarChecks`, from what these bars have about once in 10,000; and their share off
    the tick.
    """
    opened, high, low, close = chunk.columns[:4]
    day, _, _ = session_strata(chunk.start, market.calendar)
    absent = np.diff(chunk.start) // MINUTE_NS - market.bar_minutes
    rare = 1 - 1e-4
    gap = float(np.quantile(absent[np.diff(day) == 0], rare)) if (np.diff(day) == 0).any() else 0.0
    jump = float(np.abs(np.log(opened[1:] / close[:-1])).max())
    _, runs = find_runs_of_true(np.append(False, (high == low)[1:] & (np.diff(close) == 0)))
    stuck = float(np.sort(runs)[-(1 + len(close) // 10_000) :][0]) if len(runs) else 1.0
    least_gap = 10 * market.bar_minutes
    return {
        "gap_minutes": float(np.clip(2 * gap, least_gap, max(market.hole_minutes, least_gap))),
        "unit_jump": float(np.clip(1.5 * jump, np.log(1.1), np.log(3))),
        "stuck_bars": float(np.clip(2 * stuck, 20, 1000)),
        "off_tick": 0.0 if market.tick is None else float(off_tick_bars(chunk, market.tick).mean()),
    }  # fmt: skip


def _outcome_threshold(predictions: pd.DataFrame, labels: pd.Series, horizon: int) -> float:
    """Return the largest log capital against the predictions of validation rows, with a margin."""
    known = predictions.index.intersection(labels.index)
    check, moments = OutcomeCheck(horizon), known.as_unit("ns").asi8
    p_N3, found = predictions.loc[known, PROBABILITIES].to_numpy(), []
    for place, label in enumerate(labels[known].tolist()):
        check.remember(moments[place : place + 1], p_N3[place : place + 1])
        found.append(check.add(int(moments[place]), int(label)))
    return max(OUTCOME_MARGIN * max((one for one in found if one), default=0.0), LEAST_CAPITAL)
