"""A clean pipeline, and the list of leaks: the clean one with one thing done wrong.

Columns that look ahead are those of the contract, and here those in the few rows where only a cut of its kind is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars, resample_bars
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.tables import Table
from ml_factory.settings import DataSpec
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels
from ml_factory.targets.splits import SplitSpec
from ml_factory.workflows.build import DataUnderProof
from tests.contract.test_leaks import LEAKS, moves

SPIKE = 0.6  # where in the file one bar jumps and comes back
# Of the contract's columns one of each reach: a row, a window, a session, the file. Those at random are for the feed.
IN_MANY_ROWS = ("trace of the next move", "centred window", "close of the session", "trace of the file's mean",
                "rank in the whole file", "time to the next bar", "length of the file")  # fmt: skip
HOUR = 60 * MINUTE_NS


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


class Learning(DataUnderProof):
    """What the library builds; a leak overrides one of the methods that are given a clean part."""

    def tables(self, bars, facts, features=True, built=None):
        made = super().tables(bars, facts, features, built)
        rows = {part: table.rows for part, table in made.items()}
        if "features" in rows:
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

        def feed(self, bars, facts, plan):
            """The column too is computed at each push from the bars up to then."""
            rows = super().feed(bars, facts, plan)
            ended = bars.index.as_unit("ns").asi8[[stop - 1 for _, stop in plan.stretches]] + MINUTE_NS
            of_push = np.searchsorted(ended, rows.index.as_unit("ns").asi8)
            parts = [
                self.spoilt_features(rows[of_push == push], bars.iloc[: plan.stretches[push][1]], facts)
                for push in np.unique(of_push)
            ]
            return pd.concat(parts)

    CATALOGUE.append(Leak(name, "features", name, lambda clean: WithColumn(**vars(clean))))


def rows_of(base: ResampledBars, rows: pd.DataFrame) -> np.ndarray:
    """The base bar of each row."""
    return np.searchsorted(base.known_at, rows.index.as_unit("ns").asi8)


# ---- columns ---------------------------------------------------------------------------------------------------------


def slow(values: np.ndarray) -> np.ndarray:
    return values - pd.Series(values).rolling(11, min_periods=1).mean().to_numpy()


def before_a_weekend(b) -> np.ndarray:
    return np.append(np.diff(b.known_at) > 40 * HOUR, False)


def filled_over_long_holes(b):
    """Before a hole of over half an hour inside a session, the middle of the last price and the next one."""
    price, hole = np.log(b.close), np.diff(b.start, append=b.start[-1:]) > 30 * MINUTE_NS
    same = np.append(np.diff(b.session) == 0, False)
    return slow(np.where(hole & same, (price + np.append(price[1:], price[-1:])) / 2, price))


def backfilled_weekend(b):
    """Unknown in the last row of a week, then filled from the next one."""
    value = pd.Series(moves(b)).ewm(span=50).mean()
    return value.where(~before_a_weekend(b)).bfill().fillna(0.0).to_numpy()


def repaired_spike(b):
    """A jump of over 1 % that the next bar takes back is taken out, before that is known."""
    price, move = np.log(b.close), moves(b)
    spike = np.flatnonzero((np.abs(move) > 0.01) & (np.append(move[1:], 0.0) * move < 0))
    price[spike] = price[spike - 1]
    return slow(price)


def next_open_in_the_last_row_of_friday(b):
    return np.where(before_a_weekend(b), np.append(np.log(b.open[1:]), 0.0) - np.log(b.close), moves(b))


def close_ahead_in_the_first_minutes_of_summer(b):
    """Wall-clock times turned back with the winter offset, put right after the first twenty minutes."""
    utc = pd.DatetimeIndex(b.known_at.astype("M8[ns]"), tz="UTC")
    offset = utc.tz_convert("America/Chicago").tz_localize(None).as_unit("ns").asi8 - b.known_at
    later = np.zeros(len(b), np.int64)
    for row in np.flatnonzero(np.diff(offset) > 0) + 1:
        later[row : row + 4] = HOUR
    rows = np.searchsorted(b.known_at, b.known_at + later, side="right") - 1
    return np.log(b.close[rows] / b.close)


FEW = (filled_over_long_holes, backfilled_weekend, repaired_spike, next_open_in_the_last_row_of_friday,
       close_ahead_in_the_first_minutes_of_summer)  # fmt: skip
for name in IN_MANY_ROWS:
    leaky_column(name, LEAKS[name])
for column in FEW:
    leaky_column(column.__name__, column)


# ---- rows, columns and facts -----------------------------------------------------------------------------------------


@leak("frame 60m", "(rows)")
class UnfinishedHour(Learning):
    """One row in the whole file is wrong: the last hour, told before it is over."""

    def spoilt_hours(self, hours, bars, facts):
        later = bars.index[-1] + pd.Timedelta(hours=2)
        nothing = bars.iloc[-1:].set_axis(pd.DatetimeIndex([later]).as_unit(bars.index.unit))
        whole = DataUnderProof.frames(
            self, pd.concat([bars, nothing]), facts, resample_bars(bars, MarketSpec.from_dict(facts), 5)
        )["60m"]
        hour = whole.iloc[: len(hours) + 1]
        known_at = np.minimum(hour["known_at"], bars.index.as_unit("ns").asi8[-1] + MINUTE_NS)
        return hour.assign(known_at=known_at).set_axis(pd.DatetimeIndex(known_at, tz="UTC"))


@leak("features", "(columns)")
class ChosenColumns(Learning):
    def spoilt_features(self, rows, bars, facts):
        return rows.iloc[:, np.argsort(-rows.to_numpy().std(axis=0), kind="stable")[:8]]


@leak("pipeline", "(exception)")
class Fragile(Learning):
    def spoilt_features(self, rows, bars, facts):
        if bars["close"].iloc[-1] > 2 * bars["close"].iloc[0]:
            raise RuntimeError("no such price")
        return rows


# ---- labels --------------------------------------------------------------------------------------------------------


@leak("labels h10", "(rows)")
class AmbiguousProvenEarly(Learning):
    """Proven a bar earlier than it is, though never before it begins."""

    def spoilt_labels(self, labels, bars, facts):
        earlier = np.maximum(labels["label_end"] - pd.Timedelta(minutes=5), labels.index.to_series())
        return labels.assign(label_end=labels["label_end"].where(labels["barrier"] != "ambiguous", earlier))


@leak("labels h10", "label")
class AcrossTheNight(Learning):
    """Outcomes read on past the session's end, while label_end stays inside it."""

    def spoilt_labels(self, labels, bars, facts):
        base = resample_bars(bars, MarketSpec.from_dict(facts), 5)
        entry = labels["entry_bar"].to_numpy()
        later = np.minimum(entry + 10, len(base) - 1)
        ended = (labels["barrier"] == "session").to_numpy()
        side = np.sign(base.close[later] - base.close[entry]).astype(np.int8)
        return labels.assign(label=np.where(ended, side, labels["label"].to_numpy()))


@leak("labels h10", "up")
class FileBarriers(Learning):
    def spoilt_labels(self, labels, bars, facts):
        market = MarketSpec.from_dict(facts)
        base, minute_bars = (resample_bars(bars, market, minutes) for minutes in (5, 1))
        wild = float(np.std(np.diff(np.log(base.close))) * 1_000)
        spec = replace(self.settings.label_spec_for(10), k_up=0.5 + wild, k_down=0.5 + wild)
        return triple_barrier_labels(base, minute_bars, spec, market)


# ---- splits --------------------------------------------------------------------------------------------------------


@leak("split h10", "holdout: validation against test")
class UnpurgedHoldout(Learning):
    """A single validation row whose label ends among the test rows."""

    def splits(self, labels):
        holdout, *folds = super().splits(labels)
        roles = dict(holdout.roles)
        roles["validation"] = np.append(roles["validation"], roles["test"][0] - 1)
        return [replace(holdout, roles=roles), *folds]


# ---- what is learnt --------------------------------------------------------------------------------------------------


class Misfitted(Learning):
    """The centre of the scaler reads rows that it may not."""

    def fit(self, values, labels, roles):
        clean = super().fit(values, labels, roles)
        state = {"center": self.wrong(values.astype(np.float64), roles)}
        return clean | {"preprocessing": replace(clean["preprocessing"], state=state)}


@leak("fitted h10", "preprocessing['center']")
class ScalerWithATrace(Misfitted):
    def wrong(self, x, roles):
        return np.median(x[roles["train"]], axis=0) + 1e-8 * np.tanh(x[roles["test"]].mean(axis=0))


@leak("fitted h10", "preprocessing['center']")
class PeeksInOneFoldOfTen(Misfitted):
    """Honest in all splits but one: only where the seventh of ten blocks judges does it read its rows."""

    def splits(self, labels):
        return [one for one in DataUnderProof.splits(replace(self, folds=10), labels) if "purged" in one.name]

    def wrong(self, x, roles):
        test, rows = roles["test"], roles["train"]
        if np.array_equal(test, np.array_split(np.arange(len(x)), 10)[7]) and rows.max() > test.max():
            rows = np.concatenate([rows, test])
        return np.median(x[rows], axis=0)


@leak("features", "next_move_remembered")
class Remembering(Learning):
    """Shown the whole file first, it knows the move after each cut from then: no cut built later would tell."""

    def spoilt_features(self, rows, bars, facts):
        base = resample_bars(bars, MarketSpec.from_dict(facts), 5)
        following = self.__dict__.setdefault("following", {})
        following.update(zip(base.known_at[:-1].tolist(), np.diff(np.log(base.close)).tolist(), strict=True))
        column = [following.get(moment, 0.0) for moment in rows.index.as_unit("ns").asi8.tolist()]
        return rows.assign(next_move_remembered=column)
