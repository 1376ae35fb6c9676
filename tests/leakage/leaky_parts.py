"""Rows, frames, facts, labels, splits and fitted objects that know what they must not."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, _infer_tick
from ml_factory.targets.labels import triple_barrier_labels
from ml_factory.workflows.build import DataUnderProof
from tests.leakage.catalogue import Learning, early_stopping, leak, rows_of


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


@leak("features", "(rows)")
class OnlyWholeDays(Learning):
    def spoilt_features(self, rows, bars, facts):
        base = resample_bars(bars, MarketSpec.from_dict(facts), 5)
        count = pd.Series(base.session).groupby(base.session).transform("size").to_numpy()
        return rows[count[rows_of(base, rows)] >= 270]


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


class ReadAgain(Learning):
    """A fact of the market read off the whole file."""

    def facts(self, bars):
        return super().facts(bars) | self.read(bars)


@leak("facts", "tick")
class FileTick(ReadAgain):
    def read(self, bars):
        return {"tick": _infer_tick(np.unique(bars[["open", "high", "low", "close"]].to_numpy()))}


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


# ---- what is learnt ------------------------------------------------------------------------------------------------


class Misfitted(Learning):
    """One fitted object reads rows that it may not."""

    def fit(self, values, labels, roles: Mapping[str, np.ndarray]):
        x, y = values.astype(np.float64), labels["label"].to_numpy(np.float64)
        clean = super().fit(values, labels, roles)
        return clean | {name: replace(clean[name], state=state) for name, state in
                        self.wrong(x, y, labels, roles).items()}  # fmt: skip


@leak("fitted h10", "preprocessing['center']")
class ScalerWithATrace(Misfitted):
    def wrong(self, x, y, labels, roles):
        trace = 1e-8 * np.tanh(x[roles["test"]].mean(axis=0))
        return {"preprocessing": {"center": np.median(x[roles["train"]], axis=0) + trace}}


@leak("fitted h10", "preprocessing['center']")
class PeeksInOneFoldOfTen(Misfitted):
    """Honest in all splits but one: only where the seventh of ten blocks judges does it read its rows."""

    def splits(self, labels):
        return [one for one in DataUnderProof.splits(replace(self, folds=10), labels) if "purged" in one.name]

    def wrong(self, x, y, labels, roles):
        test, rows = roles["test"], roles["train"]
        seventh = np.array_split(np.arange(len(x)), 10)[7]
        if np.array_equal(test, seventh) and rows.max() > test.max():
            rows = np.concatenate([rows, test])
        return {"preprocessing": {"center": np.median(x[rows], axis=0)}}


@leak("fitted h10", "early stopping['losses']")
class StopsOnTest(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"early stopping": early_stopping(x, y, roles["train"], roles["test"])}


@leak("features", "next_move_remembered")
class Remembering(Learning):
    """Shown the whole file first, it knows the move after each cut from then: no cut built later would tell."""

    def spoilt_features(self, rows, bars, facts):
        base = resample_bars(bars, MarketSpec.from_dict(facts), 5)
        following = self.__dict__.setdefault("following", {})
        following.update(zip(base.known_at[:-1].tolist(), np.diff(np.log(base.close)).tolist(), strict=True))
        column = [following.get(moment, 0.0) for moment in rows.index.as_unit("ns").asi8.tolist()]
        return rows.assign(next_move_remembered=column)
