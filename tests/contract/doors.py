"""What the contract tests need beyond the names that CONTRACTS.md promises; a replacement changes this file alone."""
# ruff: noqa: F401 - what is imported here is what the tests take from here

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory import pipeline
from ml_factory.data.io import import_bars, load_bars
from ml_factory.data.resample import ResampledBars, resample_bars, segments_between_rolls
from ml_factory.data.rolls import RollSpec
from ml_factory.data.sessions import TRADING_HOURS, MarketSpec, assign_sessions
from ml_factory.data.synthetic import SyntheticSpec, synthetic_bars
from ml_factory.features import custom
from ml_factory.features.build import FAMILIES, FeatureSpec, build_features, feature_column_names
from ml_factory.features.custom import feature
from ml_factory.features.stream import FeatureStream
from ml_factory.inference.bundle import Bundle
from ml_factory.models.registry import build_model_from_state, find_model_spec
from ml_factory.storage.serialization import serialize_state
from ml_factory.targets.label_table import SESSION_ENDS
from ml_factory.targets.labels import BARRIERS, LabelSpec, average_uniqueness, triple_barrier_labels
from ml_factory.targets.splits import SplitSpec, chronological_split, purge_training_rows, purged_kfold
from ml_factory.targets.weights import WeightSpec, training_weights
from ml_factory.training.sampler import BatchSampler
from ml_factory.workflows.load_prepared import load_dataset

CALENDARS = tuple(TRADING_HOURS)
SETTINGS = (FeatureSpec, LabelSpec, RollSpec, SplitSpec, SyntheticSpec, WeightSpec)


def calendar_market(calendar: str, volume: bool = True, days: int = 9) -> tuple[pd.DataFrame, MarketSpec]:
    """One-minute bars of a synthetic market over a change of the clocks, with holes, and its facts."""
    bars = synthetic_bars(days=days, seed=4, calendar=calendar, start="2024-03-05", missing=0.01)
    gone = np.zeros(len(bars), bool)
    for share, minutes in ((0.45, 100), (0.7, 25), (0.85, 8)):
        gone[int(len(bars) * share) :][:minutes] = True
    bars = bars[~gone]
    market = MarketSpec("DEMO", calendar, 0.25, volume)
    return bars if volume else bars.drop(columns="volume"), market


def feature_rows(bars: pd.DataFrame, market: MarketSpec, families: tuple[str, ...], frames: tuple[int, ...] = (15,)):
    """known_at int64[N], values [N, F] float32 and the F names of the matrix of these families."""
    matrix = build_features(bars, market, FeatureSpec(frames=frames, families=families))
    return matrix.known_at, matrix.values, matrix.names


def streamed_rows(
    bars: pd.DataFrame, market: MarketSpec, families: tuple[str, ...], cuts: list[int], restored: set[int]
):
    """known_at and values of the same matrix, pushed in chunks that end at `cuts`; saved and restored before some."""
    spec = FeatureSpec(frames=(15,), families=families)
    stream, rows = FeatureStream(market, spec), []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(bars)], strict=True)):
        if number in restored:
            state, stream = stream.get_state(), FeatureStream(market, spec)
            stream.load_state(state)
        rows.append(stream.push(bars.iloc[begin:end]))
    return np.concatenate([one.known_at for one in rows]), np.concatenate([one.values for one in rows])


@contextmanager
def own_features() -> Iterator[None]:
    """Forget the user's own features that are registered inside."""
    before = dict(custom._FEATURES)
    try:
        yield
    finally:
        custom._FEATURES.clear()
        custom._FEATURES.update(before)


def families_with_columns(market: MarketSpec) -> tuple[str, ...]:
    """The registered families that have columns in this market."""
    return tuple(FeatureSpec().families_for_market(market))


def certificate_text(root: Path) -> str:
    """What the certificate of DEMO, horizon 5, says."""
    return repr(pipeline.certificate(root, "DEMO", 5))


def scaled_rows(root: Path, symbol: str, horizon: int) -> np.ndarray:
    """The rows as a model sees them, by the stored scaler."""
    return np.asarray(load_dataset(root, symbol, horizon).x_NF)
