"""Primary rule of meta-labels (AFML 3.6): the side is the sign of a column of the row."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.data.resample import BarChunk, BarStream, ResampledBars, apply_roll_adjustment
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureSpec, build_feature_column, find_column_family
from ml_factory.features.engine import FeatureEngine
from ml_factory.targets.labels import LabelSpec


def primary_rule_side(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.Series:
    """Return the side, int8, index known_at of `base`: +1 or -1, and 0 without a bet.

    The sign of the column `spec.primary` where it is at least `spec.primary_least` from 0; the other side with
    `spec.against`. Columns are centred and look back only, so a side is known with its row; until a column's window is
    full there is none. Raises SettingsError for a column that the base bars do not have.
    """
    return _sides(build_feature_column(base, market, spec.primary), base, spec)


def _sides(values: np.ndarray, base: ResampledBars, spec: LabelSpec) -> pd.Series:
    bet = np.isfinite(values) & (np.abs(values) >= spec.primary_least)
    side = np.where(bet, np.sign(values), 0.0).astype(np.int8)
    index = pd.DatetimeIndex(base.known_at.view("M8[ns]"), tz="UTC", name="known_at")
    return pd.Series(-side if spec.against else side, index=index, name="side")


class PrimaryRuleStream:
    """Sides of a feed, bar by bar: those of `primary_rule_side` on the bars pushed so far."""

    def __init__(self, market: MarketSpec, features: FeatureSpec, spec: LabelSpec):
        self._spec, self._base = spec, BarStream(market, features.base_minutes)
        self._engine = FeatureEngine(market, {"": find_column_family(market, spec.primary)}, coarse=False)

    def push(self, bars: BarChunk) -> pd.Series:
        """Return the sides of the base bars that these checked bars complete."""
        return self._next(self._base.push(bars))

    def advance(self, now_ns: int) -> pd.Series:
        """Return the sides of the base bars that are complete by the clock (UTC ns)."""
        return self._next(self._base.advance(now_ns))

    def get_state(self) -> dict:
        """Return plain numbers and arrays; `load_state` on an equal stream continues from them exactly."""
        return {"base": self._base.get_state(), "engine": self._engine.get_state()}

    def load_state(self, state: Mapping) -> None:
        self._base.load_state(state["base"])
        self._engine.load_state(state["engine"])

    def _next(self, base: ResampledBars) -> pd.Series:
        values = self._engine.push(apply_roll_adjustment(base))
        return _sides(values[:, self._engine.names.index(self._spec.primary)], base, self._spec)
