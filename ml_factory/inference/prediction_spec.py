"""Raw bars to predictions with the stored settings of training: check, features, probabilities, side."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarReport
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import RawBarSpec, validate_bars
from ml_factory.errors import CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.inference.predict import FittedModels
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.primary_rule import primary_rule_side


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

    @property
    def stream_bars(self) -> RawBarSpec:
        """Format of single bars of a feed: that of the training's bars, with their length."""
        return replace(self.bars, minutes=self.market.bar_minutes)

    def predict_bars(self, bars: pd.DataFrame, fitted: FittedModels) -> tuple[pd.DataFrame, pd.Series]:
        """Return (probabilities, close) of checked bars; of meta-labels only the rows where the primary side bets,
        with its `side`.
        """
        matrix = build_features(bars, self.market, self.features)
        features = matrix.to_frame()
        frame = fitted.predict_features(features, segment=matrix.segment)
        frame = self.keep_bets(frame, matrix.base)
        return frame, pd.Series(matrix.close, index=features.index, name="close")

    def keep_bets(self, frame: pd.DataFrame, base: ResampledBars) -> pd.DataFrame:
        """Return the predictions of meta-labels where the primary side bets, with their `side`; others unchanged."""
        if self.labels.kind != "meta":
            return frame
        return keep_bets(frame, primary_rule_side(base, self.labels, self.market))


def keep_bets(frame: pd.DataFrame, side: pd.Series) -> pd.DataFrame:
    """Return the predictions of meta-labels where the primary side is not 0, with that `side`."""
    side = side.reindex(frame.index)
    return frame.assign(side=side)[np.asarray(side != 0)]
