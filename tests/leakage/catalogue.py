"""A clean pipeline, and the list that every leak enters when it is written: the clean one with one thing done wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars, resample_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.blind import Fitted
from ml_factory.leakage.tables import Table
from ml_factory.settings import DataSpec
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec
from ml_factory.workflows.build import DataUnderProof

SPIKE = 0.6  # where in the file one bar jumps and comes back


def clean_pipeline(symbol: str = "DEMO", **more) -> "Learning":
    """Few columns, one horizon, three folds: enough for every kind of leak, and quick to build."""
    settings = DataSpec(
        features=FeatureSpec(base_minutes=5, frames=(60,), families=("calendar", "momentum")),
        labels=LabelSpec(sigma_span=50),
        splits=SplitSpec(embargo_bars=16),
        **more,
    )
    return Learning(symbol, settings, (10,), folds=3)


def bars_with_events() -> pd.DataFrame:
    """Five weeks of a made-up market over a change of the clocks, with holes, a spike and a bar that touches all."""
    bars = synthetic_bars(days=26, seed=11, start="2024-02-20", missing=0.01)
    closing = np.flatnonzero(bars.index.minute % 5 == 4)  # the last minute of a base bar, which its close shows
    bars.iloc[closing[int(len(closing) * SPIKE)], :4] *= 1.02
    wide = int(len(bars) * 0.7)
    bars.iloc[wide, bars.columns.get_loc("high")] *= 1.03
    bars.iloc[wide, bars.columns.get_loc("low")] *= 0.97
    gone = np.zeros(len(bars), bool)
    for share, minutes in ((0.45, 130), (0.66, 75), (0.8, 25), (0.9, 12)):
        gone[int(len(bars) * share) :][:minutes] = True
    return bars[~gone]


# ---- the clean pipeline learns too ---------------------------------------------------------------------------------


class Learning(DataUnderProof):
    """What the library builds, and a stand-in for what a training fits: quick, and clean.

    A leak overrides one of the methods that are given a clean part.
    """

    def tables(self, bars, facts, features=True):
        made = super().tables(bars, facts, features)
        rows = {part: table.rows for part, table in made.items()}
        rows["features"] = self.spoilt_features(rows["features"], bars, facts)
        rows["frame 60m"] = self.spoilt_hours(rows["frame 60m"], bars, facts)
        rows["labels h10"] = self.spoilt_labels(rows["labels h10"], bars, facts)
        ends = {part: one.index if part != "labels h10" else one["label_end"] for part, one in rows.items()}
        return {part: Table(one, pd.DatetimeIndex(ends[part]).as_unit("ns").asi8) for part, one in rows.items()}

    def spoilt_features(self, rows, bars, facts):
        return rows

    def spoilt_hours(self, hours, bars, facts):
        return hours

    def spoilt_labels(self, labels, bars, facts):
        return labels

    def fit(self, values, labels, roles):
        x, y = values.astype(np.float64), labels["label"].to_numpy(np.float64)
        train, held_out = roles["train"], roles.get("validation", roles["train"])
        stops_on = ("train", "validation") if "validation" in roles else ("train",)
        return super().fit(values, labels, roles) | {
            "early stopping": Fitted(early_stopping(x, y, train, held_out), stops_on),
        }


def slopes(x, y, rows, steps: int = 12):
    """Weights of a linear model after each step of a descent."""
    scale = x[rows].std(0) + 1e-12
    z, target, weights, path = x[rows] / scale, y[rows], np.zeros(x.shape[1]), []
    for _ in range(steps):
        weights = weights - 0.02 * z.T @ (z @ weights - target) / len(z)
        path.append(weights / scale)
    return path


def early_stopping(x, y, train, judge):
    losses = np.array([np.mean((x[judge] @ weights - y[judge]) ** 2) for weights in slopes(x, y, train)])
    return {"losses": losses, "best": int(losses.argmin())}


# ---- what a leak is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leak:
    """part, column : where the proof must see it.  spoil : clean pipeline -> leaky one."""

    name: str
    part: str
    column: str
    spoil: Callable[[Learning], object]


CATALOGUE: list[Leak] = []


def leak(part: str, column: str):
    """A leak that is the clean pipeline with a method done wrong."""

    def add(pipeline: type) -> type:
        CATALOGUE.append(Leak(pipeline.__name__, part, column, lambda clean: pipeline(**vars(clean))))
        return pipeline

    return add


def leaky_column(name: str, column: Callable[[ResampledBars], np.ndarray]) -> None:
    """A leak that is one more column, of the base bars."""

    class WithColumn(Learning):
        def spoilt_features(self, rows, bars, facts):
            base = resample_bars(bars, MarketSpec.from_dict(facts), self.settings.features.base_minutes)
            return rows.astype(np.float64).assign(**{name: np.asarray(column(base), np.float64)[rows_of(base, rows)]})

    CATALOGUE.append(Leak(name, "features", name, lambda clean: WithColumn(**vars(clean))))


def rows_of(base: ResampledBars, rows: pd.DataFrame) -> np.ndarray:
    """The base bar of each row."""
    return np.searchsorted(base.known_at, rows.index.as_unit("ns").asi8)
