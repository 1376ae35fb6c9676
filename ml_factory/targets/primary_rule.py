"""Primary rule of meta-labels (AFML 3.6): the side is the sign of a column of the row."""

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import build_feature_column
from ml_factory.targets.labels import LabelSpec


def primary_rule_side(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.Series:
    """Return the side, int8, index known_at of `base`: +1 or -1, and 0 without a bet.

    The sign of the column `spec.primary` where it is at least `spec.primary_least` from 0; the other side with
    `spec.against`. Columns are centred and look back only, so a side is known with its row; until a column's window is
    full there is none. Raises SettingsError for a column that the base bars do not have.
    """
    values = build_feature_column(base, market, spec.primary)
    bet = np.isfinite(values) & (np.abs(values) >= spec.primary_least)
    side = np.where(bet, np.sign(values), 0.0).astype(np.int8)
    index = pd.DatetimeIndex(base.known_at.view("M8[ns]"), tz="UTC", name="known_at")
    return pd.Series(-side if spec.against else side, index=index, name="side")
