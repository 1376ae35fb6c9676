"""Predictions of finished models: raw bars or feature rows to probabilities, with the stored settings of training.

A `TrainedModel` is a model with all it needs to predict from feature rows: preprocessing, feature names, calibration.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarReport
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import RawBarSpec, validate_bars
from ml_factory.datasets.preprocessing import preprocessing_from_dict
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import CheckpointError, FactoryError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.calibration import Calibration, condition_on_classes
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import ModelBase, installed_library_versions, softmax
from ml_factory.models.registry import build_model_from_state
from ml_factory.models.session_clock import SessionClockOffset
from ml_factory.targets.labels import LabelSpec, stored_label_classes
from ml_factory.targets.make_labels import primary_rule_side

FORMAT = "ml_factory.model/4"
windows = LazyModule("ml_factory.datasets.windows")  # torch comes with the networks only
runtime = LazyModule("onnxruntime")  # comes with the extra serve


@dataclass(frozen=True)
class TrainedModel:
    """A model with all it needs to predict from unscaled features.

    model_state : `get_state()` of the model.
    scaler : the fitted steps of preprocessing, as plain values.
    feature_names : the columns it was trained on, in order.
    spec : settings of features and labels.
    calibration : `Calibration.to_dict()`.
    lookback : base rows of a network's window, 0 for tabular models.
    versions : library versions of training.
    facts : facts of the run (symbol, horizon, model…): two runs whose models have the same bits are two artifacts.
    """

    model_state: dict
    scaler: dict
    feature_names: tuple[str, ...]
    spec: dict = field(default_factory=dict)
    calibration: dict = field(default_factory=lambda: {"temperature": 1.0, "bias": [0.0, 0.0, 0.0]})
    lookback: int = 0
    versions: dict = field(default_factory=installed_library_versions)
    facts: dict = field(default_factory=dict)

    @cached_property
    def estimator(self) -> ModelBase:
        """The fitted model, built once. Raises CheckpointError for a damaged state."""
        return build_model_from_state(self.model_state)

    @cached_property
    def preprocessing(self) -> Any:
        """The fitted steps before the model."""
        return preprocessing_from_dict(self.scaler)

    def predict_rows(self, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the estimator's probabilities, float64 (len(rows), 3), of some of the preprocessed rows.

        rows : positions, at least one; each has its whole window before it.
        """
        if not self.lookback:
            return self.estimator.predict_proba(scaled_NF[rows])
        return self.estimator.predict_proba(windows.Windows(scaled_NF, rows, self.lookback))

    @property
    def classes(self) -> tuple[int, ...]:
        """Possible labels of the training data."""
        return stored_label_classes(self.spec)

    def to_state(self) -> dict:
        """Return the model as plain values, for a bundle or the artifact registry."""
        state = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"format": FORMAT, **state, "feature_names": list(self.feature_names)}

    @classmethod
    def from_state(cls, state: Mapping, where: object = None) -> "TrainedModel":
        """Build the model of a `to_state`; where : path it was read from, for the message.

        Raises
        ------
        CheckpointError for a state of something else, or of another version.
        """
        found = state.get("format", "no model") if isinstance(state, Mapping) else "no model"
        if found != FORMAT:
            raise CheckpointError(
                "Not a trained model of this version", where=where, wanted=FORMAT, got=found,
                next_step="train it again: python -m ml_factory train --fresh",
            )  # fmt: skip
        given = {item.name: state[item.name] for item in fields(cls)}
        return cls(**given | {"feature_names": tuple(state["feature_names"])})

    def check_features(self, columns: Iterable[str]) -> None:
        """Raise SettingsError for features other than those of training, or in another order, naming the first
        difference.
        """
        columns, names = list(columns), list(self.feature_names)
        if columns == names:
            return
        pairs = enumerate(zip_longest(map(repr, columns), map(repr, names), fillvalue="nothing"), 1)
        place, (got, wanted) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        missing, extra = [one for one in names if one not in columns], [one for one in columns if one not in names]
        raise SettingsError(
            f"These are not the model's {len(names)} features"
            + (f"; not known to it: {', '.join(extra[:5])}" if extra else ""), where=f"column {place}", got=got,
            wanted=wanted,
            next_step=f"prepare the features with the model's settings; missing: {', '.join(missing[:5])}" if missing
            else "select the model's columns in its order: features[list(model.feature_names)]",
        )  # fmt: skip

    def changed_versions(self) -> list[str]:
        """Return one line per library whose version differs from that of training."""
        now = installed_library_versions()
        return [
            f"{name} {was} when trained, {now.get(name, 'absent')} now"
            for name, was in self.versions.items()
            if now.get(name) != was
        ]


INPUT, OUTPUT = "rows", "scores"
ROWS_AT_ONCE = 65_536  # handed to a model: it bounds memory and changes no number
_BATCH = 1024  # rows whose windows are gathered at a time


@dataclass(frozen=True)
class GraphModel(TrainedModel):
    """A trained model whose class scores its graph gives.

    graph : bytes of `inference.onnx.model_to_onnx`.
    """

    graph: bytes = b""

    @classmethod
    def of(cls, model: TrainedModel, graph: bytes) -> "GraphModel":
        """Return the model with its graph."""
        return cls(**{item.name: getattr(model, item.name) for item in fields(TrainedModel)}, graph=graph)

    @cached_property
    def estimator(self) -> Any:
        """The session of onnxruntime. Raises SettingsError where this onnxruntime cannot read the graph."""
        runtime.disable_telemetry_events()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        try:
            return runtime.InferenceSession(self.graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise SettingsError(
                "This onnxruntime cannot read the graph", where=self.model_state["model"],
                got=" ".join(str(error).split())[:200], wanted="the version of the extra serve",
                next_step="pip install --upgrade onnxruntime",
            ) from error  # fmt: skip

    def predict_rows(self, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        positions = rows[:, None] + np.arange(1 - self.lookback, 1) if self.lookback else rows
        parts = [positions[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]
        found = [self.estimator.run([OUTPUT], {INPUT: scaled_NF[part]})[0] for part in parts]
        scores = np.concatenate(found).astype(np.float64)
        stored = self.model_state.get("offset")
        if stored is not None:
            offset = SessionClockOffset.from_dict(stored)
            scores += offset.log_class_shares(scaled_NF[rows, offset.column])
        return softmax(scores)


@dataclass(frozen=True)
class FittedModels:
    """A trained model, or the base models of a stack with the stack's own state.

    models : name -> model; of a stack in the order of its predictions.
    stack : `stack`, `calibration` and `spec` of a registered stack; None for a single model.
    """

    models: Mapping[str, TrainedModel]
    stack: Mapping | None = None

    @property
    def spec(self) -> Mapping:
        """Settings of the data that all models were trained on."""
        return next(iter(self.models.values())).spec if self.stack is None else self.stack["spec"]

    @property
    def lookback(self) -> int:
        """Rows of the longest window that a prediction reads; 0 where no model reads windows."""
        return max(model.lookback for model in self.models.values())

    @cached_property
    def used(self) -> Mapping[str, TrainedModel]:
        """The models as they predict here: a stack reads its base models without their own calibration."""
        if self.stack is None:
            return self.models
        plain = Calibration().to_dict()
        return {name: replace(model, calibration=plain) for name, model in self.models.items()}

    def predict_features(
        self, features: pd.DataFrame, *, segment: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> pd.DataFrame:
        """Return the probabilities of rows that all models can predict; arguments as of `predict_features`."""
        for model in self.used.values():
            model.check_features(features.columns)
        rows = np.arange(len(features), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
        rows, p_N3 = self.predict_rows(features.to_numpy(dtype=np.float32), rows, segment)
        return pd.DataFrame(p_N3, index=features.index[rows], columns=PROBABILITIES)

    def predict_rows(
        self, values_NF: np.ndarray, rows: np.ndarray, segment: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return those of these rows that all models can predict, and their probabilities, float64 (n, 3).

        values_NF : unscaled, the models' features in their order
        """
        found = [_predict_rows(model, values_NF, rows, segment) for model in self.used.values()]
        if self.stack is None:
            return found[0]
        common = reduce(np.intersect1d, [own for own, _ in found])
        parts = [p_N3[np.searchsorted(own, common)] for own, p_N3 in found]
        return common, _stack_probabilities(self.stack, dict(zip(self.used, parts, strict=True)))


def predict_features(
    model: TrainedModel,
    features: pd.DataFrame,
    *,
    segment: np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return calibrated probabilities for feature rows.

    Parameters
    ----------
    features : unscaled, the model's columns in its order, index known_at (UTC, increasing).
    segment : int (N,), changes at each session edge and gap. Needed when the model has a look-back: a window never
        crosses one.
    rows : positions to predict; None: all. Those whose window is cut short are left out of the result.

    Returns
    -------
    DataFrame, index known_at of the rows predicted; p_short, p_neutral, p_long (float64, summing to 1). Of meta-labels
    p_neutral is that of passing, p_long that of acting, p_short 0.

    Raises
    ------
    SettingsError for other features than the model's.
    """
    return FittedModels({"": model}).predict_features(features, segment=segment, rows=rows)


def _predict_rows(
    model: TrainedModel, values_NF: np.ndarray, rows: np.ndarray, segment: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return those of these rows that the model can predict, and their probabilities, float64 (n, 3)."""
    if model.lookback:
        rows = rows[mask_rows_with_full_window(np.asarray(segment), rows, model.lookback)]
    scaled = model.preprocessing.transform(values_NF)
    calibration, p_N3 = Calibration.from_dict(model.calibration), np.empty((len(rows), 3))
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        own_N3 = condition_on_classes(model.predict_rows(scaled, rows[part]), model.classes)
        p_N3[part] = condition_on_classes(calibration.apply(own_N3), model.classes)
    return rows, p_N3


def stacked_predictions(state: Mapping, predictions: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the stack's calibrated probabilities on the rows that every base model predicts.

    state : of a registered stack.
    predictions : base model -> its probabilities without calibration.
    """
    index = common_prediction_index(predictions)
    parts = {name: table.loc[index, PROBABILITIES].to_numpy() for name, table in predictions.items()}
    return pd.DataFrame(_stack_probabilities(state, parts), index=index, columns=PROBABILITIES)


def _stack_probabilities(state: Mapping, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    p_N3 = Calibration.from_dict(state["calibration"]).apply(Stack.from_dict(state["stack"]).predict_proba(parts))
    return condition_on_classes(p_N3, stored_label_classes(state["spec"]))


def common_prediction_index(tables: Mapping[str, pd.DataFrame]) -> pd.DatetimeIndex:
    """Return the rows that all tables have, in time order."""
    first, *others = [table.index for table in tables.values()]
    return reduce(pd.Index.intersection, others, first)


@dataclass(frozen=True)
class PredictionSpec:
    """Settings of the data that a finished model was trained on.

    bars : format of the raw bars of training.
    """

    market: MarketSpec
    bars: RawBarSpec
    features: FeatureSpec
    labels: LabelSpec

    @classmethod
    def from_stored(cls, stored: Mapping, where: object = None) -> "PredictionSpec":
        """Parse the `spec` of a trained model or stack. Raises CheckpointError for a damaged one."""
        with refuse_damaged_content(
            CheckpointError, "The settings of this model are damaged", where=where, next_step="train it again"
        ):
            data = stored["data"]
            return cls(
                MarketSpec.from_dict(stored["market"]), RawBarSpec(**data["bars"]), FeatureSpec(**data["features"]),
                LabelSpec(**data["labels"]),
            )  # fmt: skip

    def check_bars(
        self, table: pd.DataFrame, *, stamped: RawBarSpec | None = None, where: object = "bars", quality: bool = False
    ) -> tuple[pd.DataFrame, BarReport]:
        """Return the checked bars of a table and the report of the check, as of `validate_bars`.

        stamped : format of the table; None: that of the training's bars.
        quality : look for gaps, spikes and the rest of what is reported as well.
        Raises SettingsError for bars of another length, BarsError for bars that are refused.
        """
        stamped = stamped or self.bars
        if stamped.minutes not in (None, self.market.bar_minutes):
            raise SettingsError(
                "The model reads bars of another length", where=where, got=f"bars of {stamped.minutes} min",
                wanted=f"{self.market.bar_minutes} min", next_step="give a file of such bars",
            )  # fmt: skip
        return validate_bars(table, stamped, where=where, market=self.market, quality=quality)

    def predict_bars(self, bars: pd.DataFrame, fitted: FittedModels) -> tuple[pd.DataFrame, pd.Series]:
        """Return (probabilities, close) of checked bars; of meta-labels only the rows where the primary side bets,
        with its `side`.
        """
        matrix = build_features(bars, self.market, self.features)
        features = matrix.to_frame()
        table = fitted.predict_features(features, segment=matrix.segment)
        if self.labels.kind == "meta":
            table = table.assign(side=primary_rule_side(matrix.base, self.labels, self.market))
            table = table[table["side"] != 0]
        return table, pd.Series(matrix.close, index=features.index, name="close")


OUT_OF_SAMPLE = ("test", "new")


def times_of_splits(known: pd.DatetimeIndex, splits: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return ISO times of the first validation row, the first test row and the last labelled row, for an artifact's
    facts.

    known : index of the labels.
    splits : split -> positions into it.
    """
    first = {name: known[splits[name][0]].isoformat() for name in ("validation", "test")}
    return first | {"last_label": known[-1].isoformat()}


def split_by_times(known_at: np.ndarray, times: Mapping[str, str]) -> np.ndarray:
    """Return the split of each moment (UTC ns): object (N,) of train, validation, test, new (after the last labelled
    row).

    Purged rows between two splits, and rows without a label, belong to the split before: no row that an overlapping
    training label covers is called out of sample.
    """
    names = np.full(len(known_at), "train", dtype=object)
    for name in ("validation", "test"):
        names[known_at >= pd.Timestamp(times[name]).as_unit("ns").value] = name
    names[known_at > pd.Timestamp(times["last_label"]).as_unit("ns").value] = "new"
    return names


def add_prediction_splits(table: pd.DataFrame, facts: Mapping, all_rows: bool) -> pd.DataFrame:
    """Add the columns `split` and `run_id`, and keep out-of-sample rows (test and new) only, unless `all_rows`.

    facts : of a finished model: symbol, run_id, split_times.
    Raises FactoryError where no row is out of sample.
    """
    split = split_by_times(table.index.as_unit("ns").asi8, facts["split_times"])
    table = table.assign(split=split, run_id=facts["run_id"])
    if all_rows and len(table):
        return table
    kept = table[np.isin(table["split"].to_numpy(dtype=object), OUT_OF_SAMPLE)]
    if not len(kept):
        raise FactoryError(
            "No row of these bars is out of sample", where=facts["symbol"],
            got=f"rows until {table.index[-1]}" if len(table) else "no rows",
            wanted=f"rows from {facts['split_times']['test']} on, where the test rows begin",
            next_step="newer bars, or --all (all_rows=True) for rows the model was fitted or chosen on",
        )  # fmt: skip
    return kept
