"""Primary rule of meta-labels (AFML 3.6): the side is the sign of a column of the row."""

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars, apply_roll_adjustment
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureRows, FeatureSpec, find_column_family
from ml_factory.features.engine import compute_family_columns
from ml_factory.targets.labels import LabelSpec


def primary_rule_side(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.Series:
    """Return the side, int8, index known_at of `base`: +1 or -1, and 0 without a bet.

    The sign of the column `spec.primary` where it is at least `spec.primary_least` from 0; the other side with
    `spec.against`. Columns are centred and look back only, so a side is known with its row; until a column's window is
    full there is none. Raises SettingsError for a column that the base bars do not have.
    """
    family = find_column_family(market, spec.primary)
    columns = compute_family_columns(family, apply_roll_adjustment(base), market, coarse=False)
    return _sides(columns[spec.primary], base.known_at, spec)


def primary_rule_features(market: MarketSpec, features: FeatureSpec, spec: LabelSpec) -> FeatureSpec:
    """Return the columns that a feed needs for the side; float64 rows of them go into `primary_side_of_rows`.

    Raises SettingsError for a column that the base bars do not have.
    """
    family = find_column_family(market, spec.primary)
    return FeatureSpec(features.base_minutes, frames=(), families=(family.__name__,))


def primary_side_of_rows(rows: FeatureRows, spec: LabelSpec) -> pd.Series:
    """Return the side of each row of `primary_rule_features`: that of `primary_rule_side` on the bars so far."""
    return _sides(rows.values[:, rows.names.index(spec.primary)], rows.known_at, spec)


def _sides(values: np.ndarray, known_at: np.ndarray, spec: LabelSpec) -> pd.Series:
    bet = np.isfinite(values) & (np.abs(values) >= spec.primary_least)
    side = np.where(bet, np.sign(values), 0.0).astype(np.int8)
    index = pd.DatetimeIndex(known_at.view("M8[ns]"), tz="UTC", name="known_at")
    return pd.Series(-side if spec.against else side, index=index, name="side")
