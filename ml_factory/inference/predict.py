"""Batch predictions from a bundle."""

import numpy as np
import pandas as pd

from ml_factory.datasets.covariates import compute_covariates
from ml_factory.datasets.preprocessing import apply_preprocessing_step, preprocessing_from_dict
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import FactoryError
from ml_factory.evaluation.calibration import Calibration, condition_on_classes
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import Bundle
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.models.registry import build_model_from_state


def predict_features(
    bundle: Bundle,
    features: pd.DataFrame,
    *,
    segment: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    close: np.ndarray | None = None,
    batch: int = 65_536,
) -> pd.DataFrame:
    """Return calibrated probabilities for feature rows.

    Parameters
    ----------
    features : unscaled, the bundle's columns in its order, index known_at (UTC, increasing).
    segment : int (N,), changes at each session edge and gap. Needed when the bundle has a look-back: a window never
        crosses one.
    rows : positions to predict; None: all. Those whose window is cut short are left out of the result.
    close : float64 (N,); needed when a step before the scaler follows the price.
    batch : rows handed to the model at a time; it bounds memory and changes no number.

    Returns
    -------
    DataFrame, index known_at of the rows predicted; p_short, p_neutral, p_long (float64, summing to 1). Of meta-labels
    p_neutral is that of passing, p_long that of acting, p_short 0.

    Raises
    ------
    SettingsError for other features than the bundle's, FactoryError for a look-back without segments.
    """
    bundle.check_features(features.columns)
    rows = np.arange(len(features), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    if bundle.lookback:
        if segment is None:
            raise FactoryError(
                f"A model that looks back {bundle.lookback} rows must know where sessions end",
                where="segment",
                next_step="pass the segments stored with the features",
            )
        rows = rows[mask_rows_with_full_window(np.asarray(segment), rows, bundle.lookback)]
    scaled = apply_preprocessing_step(
        preprocessing_from_dict(bundle.scaler), features.to_numpy(dtype=np.float32), close
    )
    model, calibration = build_model_from_state(bundle.model_state), Calibration.from_dict(bundle.calibration)
    p_N3 = np.empty((len(rows), 3))
    for first in range(0, len(rows), batch):
        some = rows[first : first + batch]
        covariates = compute_covariates(model, features.index[some], bundle.spec)
        calibrated = calibration.apply(
            condition_on_classes(
                model.predict_proba(_inputs(scaled, some, bundle.lookback, covariates)), bundle.classes
            )
        )
        p_N3[first : first + batch] = condition_on_classes(calibrated, bundle.classes)
    return pd.DataFrame(p_N3, index=features.index[rows], columns=PROBABILITIES)


def _inputs(scaled_NF: np.ndarray, rows: np.ndarray, lookback: int, covariates: dict):
    if not lookback:
        return scaled_NF[rows]
    # torch is loaded for networks only: a booster's bundle predicts where torch is not installed.
    windows = import_module_or_explain("ml_factory.datasets.windows")
    return windows.Windows(scaled_NF, rows, lookback, covariates)
