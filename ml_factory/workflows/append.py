"""Incremental `prepare`: when the raw bars only grew, rows of the earlier bars are kept and the new rows are
appended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.code_fingerprint import source_hash
from ml_factory.data.append_check import canonicalize_for_append, check_appended_bars
from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.prefix_hash import PrefixHasher
from ml_factory.data.resample import ResampledBars, asof_rows, resample_base_and_frames
from ml_factory.data.sessions import MarketSpec, resolve_market_spec
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.incremental_quantiles import IncrementalQuantileState, update_incremental_quantiles
from ml_factory.datasets.preprocessing import FittedStep, fit_preprocessing_steps
from ml_factory.datasets.scaling import QUARTILES, RobustScaler
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features.build import FeatureMatrix, FeatureSpec
from ml_factory.features.multi_timeframe import timeframe_name, timeframe_staleness
from ml_factory.features.stream import FeatureStream, StreamedFeatureRows
from ml_factory.progress import progress_phase
from ml_factory.settings import DATA_PACKAGES, DataSpec
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.workspace import Workspace, require_raw_bars

STREAM_BARS = 50_000


@dataclass(frozen=True)
class CheckedRawBars:
    """Checked raw bars of a symbol.

    prefixes : the bars and their prefix hashes.
    report : what the checks found, as `BarReport.to_dict`.
    before : the data set of the first of these bars, made in the same way; None where there is none.
    """

    prefixes: PrefixHasher
    market: MarketSpec
    report: dict
    before: DatasetStore | None = None

    @property
    def bars(self) -> pd.DataFrame:
        return self.prefixes.bars


def resolve_market_facts(symbol: str, bars: pd.DataFrame, settings: DataSpec) -> MarketSpec:
    """Return the market facts that these settings prepare: given, looked up by symbol, or inferred from 20 sessions."""
    return resolve_market_spec(
        symbol, bars, calendar=settings.calendar, tick=settings.tick, bar_minutes=settings.bars.minutes or 1
    )


def find_appendable_store(store: DatasetStore, settings: DataSpec) -> DatasetStore | None:
    """Return the data set that new bars may be appended to: `store` if it is committed, else the symbol's current one.

    None unless the data set is intact and was made with the same settings and code.
    """
    try:
        before = store if store.committed else DatasetStore.current(store.folder.parent)
    except NotPreparedError:
        return None
    same = before.facts["settings"] == to_json_value(settings.to_dict()) and before.facts["sources"] == source_hash(
        DATA_PACKAGES
    )
    return before if same and not before.verify() else None


def load_appended_bars(
    before: DatasetStore, workspace: Workspace, symbol: str, settings: DataSpec
) -> CheckedRawBars | None:
    """Load the raw bars and check only those behind the bars that `before` was made of.

    None where the columns are spelled otherwise, the bars are no continuation, or a new bar must be refused: then all
    bars are checked. `strict` settings refuse findings in the whole file, so all bars are checked then too.
    """
    if replace(settings.bars, minutes=None) != RawBarSpec():
        return None
    path, old = require_raw_bars(workspace, symbol), before.facts["raw"]["rows"]
    with progress_phase("reading") as done:
        table = read_bars_table(path)
        done(len(table))
    bars = canonicalize_for_append(table)
    if bars is None or len(bars) < old:
        return None
    prefixes = PrefixHasher(bars)
    market = resolve_market_facts(symbol, bars, settings)
    if (
        prefixes.hash_prefix(old) != before.facts["raw"]["bars"]
        or to_json_value(market.to_dict()) != before.facts["market"]
    ):
        return None
    report = before.facts["bars"]
    if len(bars) > old:
        with progress_phase("checking", len(bars) - old):
            standard = resolve_market_spec(
                symbol, bars, bar_minutes=market.bar_minutes
            )  # as in a check of the whole file
            report = check_appended_bars(prefixes, old, report, standard)
    return None if report is None else CheckedRawBars(prefixes, market, report, before)


def can_append_rows(before: DatasetStore, checked: CheckedRawBars) -> bool:
    """Return True where feature rows can be appended to those of `before`, whose bars are the first of these.

    False with custom features: the feature stream may round them otherwise than a computation on the whole file.
    """
    raw, market = before.facts["raw"], to_json_value(checked.market.to_dict())
    if raw["rows"] > len(checked.bars) or before.facts["market"] != market or before.load_state() is None:
        return False
    return checked.before is before or raw["bars"] == checked.prefixes.hash_prefix(raw["rows"])


def append_stream_state(
    bars: pd.DataFrame, matrix: FeatureMatrix, market: MarketSpec, spec: FeatureSpec
) -> dict | None:
    """Return the state of the feature stream behind these bars; None with custom features, which a stream may round
    otherwise.
    """
    return None if spec.custom else FeatureStream.from_matrix(bars, matrix, market, spec).get_state()


def append_feature_rows(
    before: DatasetStore, bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec
) -> tuple[StreamedFeatureRows, dict]:
    """Return the feature rows that follow those of `before`, and the state of the stream behind them."""
    stream, old = FeatureStream(market, spec), before.facts["raw"]["rows"]
    stream.load_state(before.load_state())
    with progress_phase("features", len(bars) - old) as done:
        firsts = range(old, max(len(bars), old + 1), STREAM_BARS)  # at least one piece, which may be empty
        pieces = []
        for first in firsts:
            pieces.append(stream.push(bars.iloc[first : first + STREAM_BARS]))
            done(STREAM_BARS)
    names = ("values", "known_at", "session", "segment", "close")
    columns = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in names)
    return StreamedFeatureRows(*columns, exact=all(piece.exact for piece in pieces)), stream.get_state()


def fit_or_update_preprocessing(
    sample: TransformFitSample, steps: Sequence[str | Mapping], before: IncrementalQuantileState | None = None
) -> tuple[FittedStep, IncrementalQuantileState | None]:
    """Fit the preprocessing steps, or update the quantiles of a robust scaler with the new training rows alone.

    before : quantile state of training rows among the first rows of `sample`. Other steps are fitted on all rows again.

    Returns
    -------
    (fitted steps, quantile state for the next update); the state is None where steps other than a robust scaler are
    used.
    """
    if tuple(steps) != (RobustScaler.kind,):
        return fit_preprocessing_steps(steps, sample), None
    quartiles, ranks = update_incremental_quantiles(sample.x_NF, sample.rows, QUARTILES, before)
    return RobustScaler.from_quartiles(quartiles, lambda f: sample.x_NF[sample.rows, f]), ranks


def base_frame_and_staleness(
    bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, first: int
) -> tuple[ResampledBars, dict]:
    """Return the base frame, and `FeatureMatrix.frame_staleness` of its rows from `first` on."""
    base, frames = resample_base_and_frames(bars, market, spec.base_minutes, spec.frames)
    ages = {}
    for minutes, frame in frames.items():
        joined = asof_rows(base.known_at, frame.known_at)[first:]
        ages[timeframe_name(minutes)] = timeframe_staleness(base.known_at[first:], frame.known_at, joined)
    return base, ages
