"""The pipeline under test: its interface of six functions, and the library's own pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pandas as pd

from ml_factory.data.resample import resample_bars, resample_minute_bars_for_labels
from ml_factory.data.sessions import DAY_NS, INFER_SESSIONS, MarketSpec, assign_sessions, resolve_market_spec
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.features.build import FeatureSpec, build_features, timeframe_name
from ml_factory.leakage.streaming_check import stream_feature_table
from ml_factory.leakage.timed_tables import TimedTable, timed_table_of_coarse_bars, timed_table_of_labels
from ml_factory.targets.combinatorial_cv import combinatorial_purged_folds
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.make_labels import make_labels
from ml_factory.targets.primary_rule import primary_rule_side
from ml_factory.targets.splits import SplitSpec, chronological_split, purged_kfold
from ml_factory.targets.walk_forward import walk_forward_expanding, walk_forward_rolling
from ml_factory.targets.weights import WeightSpec, training_weights

ROWS_A_FOLD = 4  # times the embargo: with fewer rows a fold may keep none, which is no leak
LEAST_FOLDS = 3  # of which two may be evaluated at once


@dataclass(frozen=True)
class SplitUnderTest:
    """Rows by their role.

    roles : name -> positions into the labels' rows; "train" is fitted on, every other role is evaluated
    embargo : rows left out after an evaluated block, at least the model's input window
    """

    name: str
    roles: Mapping[str, np.ndarray]
    embargo: int = 0


@dataclass(frozen=True)
class FittedObjectUnderTest:
    """A fitted object.

    state : its numbers, in anything `serialize_state` takes
    reads : roles whose rows it may read
    """

    state: object
    reads: tuple[str, ...] = ("train",)


class PipelineUnderTest(Protocol):
    """Interface of a pipeline that the proof can test.

    `bars` are checked bars, of 1 minute unless `facts` (the `market_facts` of the whole file) has `bar_minutes`. A
    pipeline that also runs bar by bar has `stream_features(bars, facts, rows, seed) -> TimedTable` of the same
    features.

    market_facts : constant facts of the market, from the first `count_head_bars(bars)` bars or from settings
    features : (known_at int64[N] ns, values [N, F], F names)
    coarse_frames : name -> arrays of a coarse frame, `known_at` among them
    labels : name -> labels (index known_at; label_end and other columns)
    splits : every split of the rows
    fit : all objects that are fitted on a split; values [L, F] are the feature rows of the labels
    """

    def market_facts(self, bars: pd.DataFrame) -> dict: ...
    def count_head_bars(self, bars: pd.DataFrame) -> int: ...
    def features(self, bars: pd.DataFrame, facts: dict) -> tuple[np.ndarray, np.ndarray, list[str]]: ...
    def coarse_frames(self, bars: pd.DataFrame, facts: dict) -> dict[str, Mapping[str, np.ndarray]]: ...
    def labels(self, bars: pd.DataFrame, facts: dict) -> dict[str, pd.DataFrame]: ...
    def splits(self, labels: pd.DataFrame) -> list[SplitUnderTest]: ...
    def fit(
        self, values: np.ndarray, labels: pd.DataFrame, roles: Mapping[str, np.ndarray]
    ) -> dict[str, FittedObjectUnderTest]: ...


def run_pipeline_under_test(pipeline: PipelineUnderTest, bars: pd.DataFrame, facts: dict) -> dict[str, TimedTable]:
    """Run the pipeline on these bars and return every part as a table."""
    known_at, values, names = pipeline.features(bars, facts)
    tables = {"features": TimedTable(known_at, known_at, names=tuple(names), matrix=np.asarray(values))}
    for name, frame in pipeline.coarse_frames(bars, facts).items():
        tables[f"frame {name}"] = timed_table_of_coarse_bars(frame)
    for name, labels in pipeline.labels(bars, facts).items():
        tables[f"labels {name}"] = timed_table_of_labels(labels)
    return tables


@dataclass(frozen=True)
class StandardPipelineUnderTest:
    """The library's own pipeline with these settings: the functions that `prepare` and `train` call.

    given : facts of the market that the user set (calendar, tick, ...); the rest is looked up or inferred
    folds : folds of each scheme tested in addition to the chronological split, fewer where rows are few; 0: none
    preprocess : the fitted steps up to the scaler, as in the settings
    """

    symbol: str
    features_spec: FeatureSpec = field(default_factory=FeatureSpec)
    label_specs: tuple[LabelSpec, ...] = (LabelSpec(),)
    split_spec: SplitSpec = field(default_factory=SplitSpec)
    given: Mapping[str, object] = field(default_factory=dict)
    folds: int = 5
    preprocess: tuple = ("robust",)

    def market_facts(self, bars: pd.DataFrame) -> dict:
        return resolve_market_spec(self.symbol, bars, **self.given).to_dict()

    def count_head_bars(self, bars: pd.DataFrame) -> int:
        """Return the number of bars in the first 20 sessions (or 20 days with a bar, if that is more), plus one.

        The additional bar shows that they are over: before it, one more bar may still belong to the last of them.
        """
        start = bars.index.as_unit("ns").asi8
        reach = 0
        for day in (
            assign_sessions(start, resolve_market_spec(self.symbol, bars, **self.given).calendar).id,
            start // DAY_NS,
        ):
            first = np.unique(day)[:INFER_SESSIONS]
            reach = max(reach, int(np.searchsorted(day, first[-1], side="right")))
        return reach + 1

    def features(self, bars: pd.DataFrame, facts: dict) -> tuple[np.ndarray, np.ndarray, list[str]]:
        matrix = build_features(bars, MarketSpec.from_dict(facts), self.features_spec)
        return matrix.known_at, matrix.values, list(matrix.names)

    def stream_features(self, bars: pd.DataFrame, facts: dict, rows: int, seed: int) -> TimedTable:
        """Return the same rows from a stream without a future (`leakage.streaming_check`)."""
        return stream_feature_table(bars, MarketSpec.from_dict(facts), self.features_spec, rows, seed)

    def coarse_frames(self, bars: pd.DataFrame, facts: dict) -> dict[str, Mapping[str, np.ndarray]]:
        market, spec = MarketSpec.from_dict(facts), self.features_spec
        frames = {minutes: resample_bars(bars, market, minutes) for minutes in (spec.base_minutes, *spec.frames)}
        made, base = {timeframe_name(length): vars(one) for length, one in frames.items()}, frames[spec.base_minutes]
        for labels in [one for one in self.label_specs if one.kind == "meta"][:1]:  # all horizons bet alike
            side = primary_rule_side(base, labels, market).to_numpy()
            made["primary side"] = {"known_at": base.known_at, "side": side}  # known with its row, not with its label
        return made

    def labels(self, bars: pd.DataFrame, facts: dict) -> dict[str, pd.DataFrame]:
        """Return the labels of each horizon."""
        market, minutes = MarketSpec.from_dict(facts), self.features_spec.base_minutes
        base, minute_bars = resample_bars(bars, market, minutes), resample_minute_bars_for_labels(bars, market, minutes)
        return {f"h{spec.horizon}": make_labels(base, minute_bars, spec, market) for spec in self.label_specs}

    def splits(self, labels: pd.DataFrame) -> list[SplitUnderTest]:
        """Return the chronological split, and the folds of every scheme where rows suffice."""
        embargo = self.split_spec.embargo_bars
        parts = [SplitUnderTest("holdout", chronological_split(labels, self.split_spec), embargo)]
        folds = min(self.folds, len(labels) // (ROWS_A_FOLD * (1 + embargo)))
        if folds < LEAST_FOLDS:
            return parts
        schemes = {
            "purged": (embargo, purged_kfold(labels, folds, embargo)),
            "expanding": (0, walk_forward_expanding(labels, folds)),
            "rolling": (0, walk_forward_rolling(labels, folds)),
            "combinatorial": (embargo, combinatorial_purged_folds(labels, folds, 2, embargo)),
        }
        for name, (kept_away, pairs) in schemes.items():
            for number, (train, test) in enumerate(pairs):
                parts.append(SplitUnderTest(f"{name} fold {number}", {"train": train, "test": test}, kept_away))
        return parts

    def fit(
        self, values: np.ndarray, labels: pd.DataFrame, roles: Mapping[str, np.ndarray]
    ) -> dict[str, FittedObjectUnderTest]:
        """Fit the steps up to the scaler, and training weights with and without decay."""
        rows = np.asarray(roles["train"])
        train_labels, names = labels.iloc[rows], tuple(str(k) for k in range(values.shape[1]))
        sample = TransformFitSample(values, names, rows, train_labels)
        return {
            "preprocessing": FittedObjectUnderTest(fit_preprocessing_steps(self.preprocess, sample).to_dict()),
            "training weights": FittedObjectUnderTest(training_weights(train_labels)),
            "decayed weights": FittedObjectUnderTest(training_weights(train_labels, WeightSpec(decay=0.5))),
        }
