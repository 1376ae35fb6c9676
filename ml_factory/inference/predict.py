"""Probabilities of feature rows, from one trained model or a stack of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from ml_factory.datasets.preprocessing import preprocessing_from_dict
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import FactoryError
from ml_factory.evaluation.calibration import Calibration, condition_on_classes
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.targets.labels import stored_label_classes


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

    def combine(self, predictions: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the prediction of the whole from those of `used`."""
        return next(iter(predictions.values())) if self.stack is None else stacked_predictions(self.stack, predictions)

    def predict_features(
        self, features: pd.DataFrame, *, segment: np.ndarray, rows: np.ndarray | None = None
    ) -> pd.DataFrame:
        """Return the probabilities of every row that all models can predict; arguments as of `predict_features`."""
        given = {"segment": segment, "rows": rows}
        return self.combine({name: predict_features(model, features, **given) for name, model in self.used.items()})


def predict_features(
    model: TrainedModel,
    features: pd.DataFrame,
    *,
    segment: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    batch: int = 65_536,
) -> pd.DataFrame:
    """Return calibrated probabilities for feature rows.

    Parameters
    ----------
    features : unscaled, the model's columns in its order, index known_at (UTC, increasing).
    segment : int (N,), changes at each session edge and gap. Needed when the model has a look-back: a window never
        crosses one.
    rows : positions to predict; None: all. Those whose window is cut short are left out of the result.
    batch : rows handed to the model at a time; it bounds memory and changes no number.

    Returns
    -------
    DataFrame, index known_at of the rows predicted; p_short, p_neutral, p_long (float64, summing to 1). Of meta-labels
    p_neutral is that of passing, p_long that of acting, p_short 0.

    Raises
    ------
    SettingsError for other features than the model's, FactoryError for a look-back without segments.
    """
    model.check_features(features.columns)
    rows = np.arange(len(features), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    if model.lookback:
        if segment is None:
            raise FactoryError(
                f"A model that looks back {model.lookback} rows must know where sessions end",
                where="segment",
                next_step="pass the segments stored with the features",
            )
        rows = rows[mask_rows_with_full_window(np.asarray(segment), rows, model.lookback)]
    scaled = preprocessing_from_dict(model.scaler).transform(features.to_numpy(dtype=np.float32))
    p_N3 = np.empty((len(rows), 3))
    for first in range(0, len(rows), batch):
        some = rows[first : first + batch]
        p_N3[first : first + batch] = predict_scaled_rows(model, scaled, some)
    return pd.DataFrame(p_N3, index=features.index[rows], columns=PROBABILITIES)


def predict_scaled_rows(model: TrainedModel, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return calibrated probabilities, float64 (len(rows), 3), of some of the scaled rows.

    rows : positions; each has its whole window before it.
    """
    p_N3 = condition_on_classes(model.predict_rows(scaled_NF, rows), model.classes)
    return condition_on_classes(Calibration.from_dict(model.calibration).apply(p_N3), model.classes)


def stacked_predictions(state: Mapping, predictions: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the stack's calibrated probabilities on the rows that every base model predicts.

    state : of a registered stack.
    predictions : base model -> its probabilities without calibration.
    """
    index = common_prediction_index(predictions)
    parts = {name: frame.loc[index, PROBABILITIES].to_numpy() for name, frame in predictions.items()}
    p_N3 = Calibration.from_dict(state["calibration"]).apply(Stack.from_dict(state["stack"]).predict_proba(parts))
    return pd.DataFrame(
        condition_on_classes(p_N3, stored_label_classes(state["spec"])), index=index, columns=PROBABILITIES
    )


def common_prediction_index(frames: Mapping[str, pd.DataFrame]) -> pd.DatetimeIndex:
    """Return the rows that all frames have, in time order."""
    first, *others = frames.values()
    index = first.index
    for frame in others:
        index = index[index.isin(frame.index)]
    return index
