"""A clean pipeline, what a leak is, and the list that every leak enters when it is written.

A leak in a feature gives an honest twin of its column too, so that its share of rows and its size can be measured.
"""

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
    """What the library builds, and stand-ins for all that a training fits: quick, and clean.

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
            "selection": Fitted(selection(x, y, train)),
            "early stopping": Fitted(early_stopping(x, y, train, held_out), stops_on),
            "calibrator": Fitted(calibrator(x, y, train, held_out), stops_on),
        }


def selection(x, y, rows):
    """The five columns that go most with the outcome."""
    x, y = x[rows] - x[rows].mean(0), y[rows] - y[rows].mean()
    score = np.abs(x.T @ y) / np.sqrt((x**2).sum(0) + 1e-30)
    return np.sort(np.argsort(-score, kind="stable")[:5])


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


def calibrator(x, y, train, judge):
    printed = x[judge] @ slopes(x, y, train)[-1]
    return float(printed @ y[judge] / (printed @ printed + 1e-30))


# ---- what a leak is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a column may be made of: base bars, hours, raw bars, facts."""

    bars: pd.DataFrame
    base: ResampledBars
    market: MarketSpec

    @property
    def log_close(self) -> np.ndarray:
        return np.log(self.base.close)

    @property
    def moves(self) -> np.ndarray:
        return np.diff(self.log_close, prepend=self.log_close[:1])

    @property
    def hours(self) -> ResampledBars:
        return resample_bars(self.bars, self.market, 60)


Column = Callable[[Seen], np.ndarray]


@dataclass(frozen=True)
class Leak:
    """mechanism : what went wrong.  part, column : where the proof must see it.  kind : "", "sparse" or "tiny".

    spoil : clean pipeline -> leaky one.  honest, leaky : the column of a feature leak, as it should be and as it is.
    """

    mechanism: str
    part: str
    column: str
    spoil: Callable[[Learning], object]
    name: str
    kind: str = ""
    honest: Column | None = None
    leaky: Column | None = None


CATALOGUE: list[Leak] = []


def feature_leak(mechanism: str, honest: Column, kind: str = ""):
    """A leak that is one more column, named after its mechanism."""

    def add(leaky: Column) -> Column:
        name = leaky.__name__

        class WithColumn(Learning):
            def spoilt_features(self, rows, bars, facts):
                market = MarketSpec.from_dict(facts)
                base = resample_bars(bars, market, self.settings.features.base_minutes)
                column = np.asarray(leaky(Seen(bars, base, market)), np.float64)
                return rows.astype(np.float64).assign(**{name: column[rows_of(base, rows)]})

        CATALOGUE.append(Leak(mechanism, "features", name, remade(WithColumn), name, kind, honest, leaky))
        return leaky

    return add


def leak(mechanism: str, part: str, column: str, kind: str = ""):
    """A leak that is the clean pipeline with a method done wrong."""

    def add(pipeline: type) -> type:
        CATALOGUE.append(Leak(mechanism, part, column, remade(pipeline), pipeline.__name__, kind))
        return pipeline

    return add


def remade(kind: type) -> Callable[[Learning], object]:
    return lambda clean: kind(**{name: getattr(clean, name) for name in clean.__dataclass_fields__})


def measured(leak: Leak, bars: pd.DataFrame, clean: Learning) -> tuple[float, float]:
    """(share of rows that leak, largest leak in deviations of the honest column) of a feature leak."""
    facts = clean.facts(bars)
    market = MarketSpec.from_dict(facts)
    base = resample_bars(bars, market, 5)
    rows = rows_of(base, clean.tables(bars, facts)["features"].rows)
    seen = Seen(bars, base, market)
    one, two = (np.asarray(make(seen), np.float64)[rows] for make in (leak.honest, leak.leaky))
    apart = (one != two) & ~(np.isnan(one) & np.isnan(two))
    sizes = np.abs(one - two)[apart]
    return float(apart.mean()), float(np.nanmax(sizes, initial=0.0) / np.nanstd(one))


def rows_of(base: ResampledBars, rows: pd.DataFrame) -> np.ndarray:
    """The base bar of each row."""
    return np.searchsorted(base.known_at, rows.index.as_unit("ns").asi8)
