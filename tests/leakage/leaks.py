"""A clean pipeline, and every way we know of to spoil it: each leak is the clean one with one thing done wrong.

A leak in a feature gives an honest twin of its column too, so that its share of rows and its size can be measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import signal

from ml_factory.data.resample import Frame, base_frame
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec, _infer_calendar, _infer_tick
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.subject import Fitted, Split, StandardPipeline
from ml_factory.targets.labels import LabelSpec, triple_barrier
from ml_factory.targets.splits import SplitSpec, purged_kfold
from ml_factory.targets.weights import training_weights

SPIKE = 0.6  # where in the file one bar jumps and comes back


def clean_pipeline(symbol: str = "DEMO", **more) -> "Learning":
    """Few columns, one horizon, three folds: enough for every kind of leak, and quick to build."""
    return Learning(
        symbol,
        FeatureSpec(base_minutes=5, frames=(60,), families=("calendar", "momentum")),
        (LabelSpec(horizon=10, sigma_span=50),),
        SplitSpec(embargo_bars=16),
        folds=3,
        **more,
    )


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


class Learning(StandardPipeline):
    """The library's pipeline, and stand-ins for all that a training fits: quick, and clean."""

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
    said = x[judge] @ slopes(x, y, train)[-1]
    return float(said @ y[judge] / (said @ said + 1e-30))


# ---- what a leak is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a column may be made of: base bars, hours, raw bars, facts."""

    bars: pd.DataFrame
    base: Frame
    market: MarketSpec

    @property
    def log_close(self) -> np.ndarray:
        return np.log(self.base.close)

    @property
    def moves(self) -> np.ndarray:
        return np.diff(self.log_close, prepend=self.log_close[:1])

    @property
    def hours(self) -> Frame:
        return base_frame(self.bars, self.market, 60)


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
            def features(self, bars, facts):
                known_at, values, names = super().features(bars, facts)
                market = MarketSpec.from_dict(facts)
                base = base_frame(bars, market, self.features_spec.base_minutes)
                column = np.asarray(leaky(Seen(bars, base, market)), np.float64)
                rows = np.searchsorted(base.known_at, known_at)
                return known_at, np.column_stack([values.astype(np.float64), column[rows]]), [*names, name]

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
    known_at, *_ = clean.features(bars, facts)
    market = MarketSpec.from_dict(facts)
    base = base_frame(bars, market, 5)
    rows = np.searchsorted(base.known_at, known_at)
    seen = Seen(bars, base, market)
    one, two = (np.asarray(make(seen), np.float64)[rows] for make in (leak.honest, leak.leaky))
    apart = (one != two) & ~(np.isnan(one) & np.isnan(two))
    sizes = np.abs(one - two)[apart]
    return float(apart.mean()), float(np.nanmax(sizes, initial=0.0) / np.nanstd(one))


# ---- columns that look ahead ---------------------------------------------------------------------------------------


def own_move(seen: Seen) -> np.ndarray:
    return seen.moves


def rolling(values: np.ndarray, **how) -> np.ndarray:
    return pd.Series(values).rolling(11, min_periods=1, **how).mean().to_numpy()


def by_session(seen: Seen, values: np.ndarray, what: str) -> np.ndarray:
    return pd.Series(values).groupby(seen.base.session).transform(what).to_numpy()


def typical(seen: Seen) -> np.ndarray:
    return np.log((seen.base.high + seen.base.low + seen.base.close) / 3)


@feature_leak("negative shift", own_move)
def next_move(seen):
    return np.append(seen.moves[1:], 0.0)


@feature_leak("negative shift", own_move)
def move_of_a_month_later(seen):
    return np.append(seen.moves[4_000:], np.zeros(min(4_000, len(seen.moves))))


@feature_leak("negative shift", own_move, kind="tiny")
def trace_of_the_next_move(seen):
    return seen.moves + 1e-6 * np.append(seen.moves[1:], 0.0)


@feature_leak("centred window", lambda seen: rolling(seen.moves))
def centred_mean(seen):
    return rolling(seen.moves, center=True)


@feature_leak("zero-phase filter", lambda seen: signal.lfilter(*signal.butter(2, 0.1), seen.moves))
def filtered_both_ways(seen):
    return signal.filtfilt(*signal.butter(2, 0.1), seen.moves, padlen=0)


@feature_leak("FFT convolution", lambda seen: np.convolve(seen.moves, np.ones(7))[: len(seen.moves)], kind="tiny")
def convolved_by_fft(seen):
    """Looks back only, yet its rounding depends on every later bar."""
    return signal.fftconvolve(seen.moves, np.ones(7))[: len(seen.moves)]


@feature_leak("smoothed regime", own_move)
def smoothed_state(seen):
    forward = pd.Series(seen.moves**2).ewm(span=20).mean()
    backward = pd.Series(seen.moves[::-1] ** 2).ewm(span=20).mean()[::-1].to_numpy()
    return forward.to_numpy() + backward


@feature_leak("whole-day VWAP", own_move)
def day_vwap(seen):
    volume = seen.base.volume if seen.base.volume is not None else np.ones(len(seen.base))
    total = by_session(seen, typical(seen) * volume, "sum")
    return seen.log_close - total / by_session(seen, volume, "sum")


@feature_leak("whole-day high", own_move)
def day_high(seen):
    return np.log(by_session(seen, seen.base.high, "max")) - seen.log_close


@feature_leak("day frame joined on its date", own_move)
def close_of_the_day(seen):
    return np.log(by_session(seen, seen.base.close, "last")) - seen.log_close


@feature_leak("left-labelled join", own_move)
def hour_by_its_start(seen):
    hours = seen.hours
    rows = np.searchsorted(hours.start, seen.base.known_at, side="right") - 1
    return np.where(rows >= 0, np.log(hours.close[rows]), np.nan) - seen.log_close


@feature_leak("interpolation over a gap", lambda seen: seen.log_close - rolling(seen.log_close), kind="sparse")
def filled_over_long_holes(seen):
    """Before a hole of over half an hour inside a session, the middle of the last price and the next one."""
    hole = np.diff(seen.base.start, append=seen.base.start[-1:]) > 30 * MINUTE_NS
    same = np.append(np.diff(seen.base.session) == 0, False)
    following = np.append(seen.log_close[1:], seen.log_close[-1:])
    filled = np.where(hole & same, (seen.log_close + following) / 2, seen.log_close)
    return filled - rolling(seen.log_close)


@feature_leak("backfill", lambda seen: week_ends(seen)[0], kind="sparse")
def backfilled_weekend(seen):
    """Unknown in the last row of a week, then filled from the next one."""
    return pd.Series(week_ends(seen)[1]).bfill().fillna(0.0).to_numpy()


def week_ends(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """A slow column, whole and with its last row before each weekend unknown."""
    value = pd.Series(seen.moves).ewm(span=50).mean().to_numpy()
    last = np.append(np.diff(seen.base.known_at) > 40 * 60 * MINUTE_NS, False)
    return value, np.where(last, np.nan, value)


@feature_leak("spike repair with the next bar", lambda seen: seen.log_close - rolling(seen.log_close), kind="sparse")
def repaired_spike(seen):
    """A jump of over 1 % that the next bar takes back is taken out, before that is known."""
    repaired, jump = seen.log_close.copy(), np.abs(seen.moves) > 0.01
    spike = np.flatnonzero(jump & (np.append(seen.moves[1:], 0.0) * seen.moves < 0))
    repaired[spike] = repaired[spike - 1]
    return repaired - rolling(seen.log_close)


@feature_leak("scale of the full sample", own_move)
def z_of_the_whole_file(seen):
    return (seen.moves - seen.moves.mean()) / seen.moves.std()


@feature_leak("scale of the full sample", own_move, kind="tiny")
def centred_by_a_trace_of_the_mean(seen):
    return seen.moves - 1e-3 * seen.moves.mean()


@feature_leak("quantile of the full sample", own_move)
def above_the_ninth_decile(seen):
    return (seen.moves > np.quantile(seen.moves, 0.9)).astype(float)


@feature_leak("rank over the full file", own_move)
def rank_in_the_file(seen):
    return pd.Series(seen.moves).rank(pct=True).to_numpy()


@feature_leak("divided by the file's maximum", own_move)
def share_of_the_highest(seen):
    return seen.base.close / seen.base.high.max()


@feature_leak("PCA fitted on all rows", own_move)
def first_component(seen):
    lags = np.column_stack([np.roll(seen.moves, k) for k in range(5)])
    lags[:5] = 0.0
    _, vectors = np.linalg.eigh(np.cov(lags.T))
    return lags @ vectors[:, -1]


@feature_leak("target encoding over all rows", own_move)
def usual_outcome_of_the_hour(seen):
    hour = (seen.base.known_at % DAY_NS) // (60 * MINUTE_NS)
    following = pd.Series(np.append(seen.moves[1:], 0.0))
    return following.groupby(hour).transform("mean").to_numpy()


@feature_leak("volume of the future", own_move)
def next_volume(seen):
    volume = seen.base.volume if seen.base.volume is not None else seen.base.high - seen.base.low
    return np.log1p(np.append(volume[1:], 0.0))


@feature_leak("join shifted by daylight saving", lambda seen: hours_by(seen, seen.base.known_at))
def hour_by_a_fixed_offset(seen):
    """Wall-clock times turned back with the winter offset: an hour ahead as soon as the clocks have changed."""
    return hours_by(seen, seen.base.known_at + summer(seen.base.known_at) * 60 * MINUTE_NS)


@feature_leak("join shifted by daylight saving", lambda seen: hours_by(seen, seen.base.known_at), kind="sparse")
def hour_ahead_in_the_first_minutes_of_summer(seen):
    """The same, put right after the first twenty minutes."""
    now, change = seen.base.known_at, np.flatnonzero(np.diff(summer(seen.base.known_at)) == 1) + 1
    first = np.zeros(len(now), np.int64)
    for row in change:
        first[row : row + 4] = 1
    return hours_by(seen, now + first * 60 * MINUTE_NS)


def summer(known_at: np.ndarray) -> np.ndarray:
    utc = pd.DatetimeIndex(known_at.astype("M8[ns]"), tz="UTC")
    offset = utc.tz_convert("America/Chicago").tz_localize(None).as_unit("ns").asi8 - known_at
    return (offset == -5 * 60 * MINUTE_NS).astype(np.int64)


def hours_by(seen: Seen, moment: np.ndarray) -> np.ndarray:
    hours = seen.hours
    rows = np.searchsorted(hours.known_at, moment, side="right") - 1
    return np.where(rows >= 0, np.log(hours.close[rows]), np.nan) - seen.log_close


@feature_leak("known by the session's end", own_move, kind="sparse")
def next_open_in_the_last_row_of_friday(seen):
    weekend = np.append(np.diff(seen.base.known_at) > 40 * 60 * MINUTE_NS, False)
    return np.where(weekend, np.append(np.log(seen.base.open[1:]), 0.0) - seen.log_close, seen.moves)


# ---- rows, frames and facts ----------------------------------------------------------------------------------------


@leak("the last bucket emitted unfinished", "frame 60m", "(rows)", kind="sparse")
class UnfinishedHour(Learning):
    """One row in the whole file is wrong: the last hour, told before it is over."""

    def frames(self, bars, facts):
        later = bars.index[-1] + pd.Timedelta(hours=2)
        nothing = bars.iloc[-1:].set_axis(pd.DatetimeIndex([later]).as_unit(bars.index.unit))
        frames, whole = super().frames(bars, facts), super().frames(pd.concat([bars, nothing]), facts)
        hour = {name: column[: len(frames["60m"]["start"]) + 1] for name, column in whole["60m"].items()
                if isinstance(column, np.ndarray)}  # fmt: skip
        hour["known_at"] = np.minimum(hour["known_at"], bars.index.as_unit("ns").asi8[-1] + MINUTE_NS)
        return frames | {"60m": hour}


@leak("frames known at their start", "frame 60m", "(rows)")
class LeftLabelled(Learning):
    def frames(self, bars, facts):
        frames = super().frames(bars, facts)
        hour = frames["60m"]
        return frames | {"60m": dict(hour) | {"known_at": hour["start"].copy()}}


@leak("rows that later prove to be of short days are dropped", "features", "(rows)")
class OnlyWholeDays(Learning):
    def features(self, bars, facts):
        known_at, values, names = super().features(bars, facts)
        base = base_frame(bars, MarketSpec.from_dict(facts), 5)
        count = pd.Series(base.session).groupby(base.session).transform("size").to_numpy()
        kept = count[np.searchsorted(base.known_at, known_at)] >= 270
        return known_at[kept], values[kept], names


@leak("columns chosen by looking at the file", "features", "(columns)")
class ChosenColumns(Learning):
    def features(self, bars, facts):
        known_at, values, names = super().features(bars, facts)
        kept = np.argsort(-values.std(axis=0), kind="stable")[:8]
        return known_at, values[:, kept], [names[k] for k in kept]


@leak("an error that depends on what follows", "pipeline", "(exception)")
class Fragile(Learning):
    def features(self, bars, facts):
        if bars["close"].iloc[-1] > 2 * bars["close"].iloc[0]:
            raise RuntimeError("no such price")
        return super().features(bars, facts)


class ReadAnew(Learning):
    """A fact of the market read off the whole file."""

    def facts(self, bars):
        return super().facts(bars) | self.read(bars)


@leak("tick of the whole file", "facts", "tick")
class FileTick(ReadAnew):
    def read(self, bars):
        return {"tick": _infer_tick(np.unique(bars[["open", "high", "low", "close"]].to_numpy()))}


@leak("calendar of the whole file", "facts", "calendar")
class FileCalendar(ReadAnew):
    def read(self, bars):
        weekend = (bars.index.day_of_week == 5).any()
        return {"calendar": "24h" if weekend else _infer_calendar(bars.index.as_unit("ns").asi8)}


@leak("presence of volume in the whole file", "facts", "has_volume")
class FileVolume(ReadAnew):
    def read(self, bars):
        return {"has_volume": "volume" in bars and bool((bars["volume"] < 1e5).all())}


# ---- labels --------------------------------------------------------------------------------------------------------


class Relabelled(Learning):
    def labels(self, bars, facts):
        return {name: self.spoilt(labels, bars, facts) for name, labels in super().labels(bars, facts).items()}


def claimed(labels: pd.DataFrame, rows: np.ndarray, earlier: pd.Timedelta) -> pd.DataFrame:
    """The labels with these rows said to be proven earlier than they are, though never before they begin."""
    end = labels["label_end"].where(~rows, np.maximum(labels["label_end"] - earlier, labels.index.to_series()))
    return labels.assign(label_end=end)


@leak("label_end too early", "labels h10", "(rows)")
class ProvenABarEarly(Relabelled):
    def spoilt(self, labels, bars, facts):
        return claimed(labels, np.ones(len(labels), bool), pd.Timedelta(minutes=5))


@leak("label_end too early", "labels h10", "(rows)", kind="sparse")
class AmbiguousProvenEarly(Relabelled):
    def spoilt(self, labels, bars, facts):
        return claimed(labels, (labels["barrier"] == "ambiguous").to_numpy(), pd.Timedelta(minutes=5))


@leak("labels across a session's end", "labels h10", "label")
class AcrossTheNight(Relabelled):
    """Outcomes read on past the session's end, while label_end stays inside it."""

    def spoilt(self, labels, bars, facts):
        base = base_frame(bars, MarketSpec.from_dict(facts), 5)
        entry = labels["entry_bar"].to_numpy()
        later = np.minimum(entry + 10, len(base) - 1)
        ended = (labels["barrier"] == "session").to_numpy()
        side = np.sign(base.close[later] - base.close[entry]).astype(np.int8)
        return labels.assign(label=np.where(ended, side, labels["label"].to_numpy()))


@leak("barriers from the whole file", "labels h10", "up")
class FileBarriers(Learning):
    def labels(self, bars, facts):
        market = MarketSpec.from_dict(facts)
        base, fine = (base_frame(bars, market, minutes) for minutes in (5, 1))
        wild = float(np.std(np.diff(np.log(base.close))) * 1_000)
        spec = replace(self.label_specs[0], k_up=0.5 + wild, k_down=0.5 + wild)
        return {"h10": triple_barrier(base, fine, spec, market)}


@leak("concurrency with labels that come later", "labels h10", "uniqueness")
class UniquenessOfTheFile(Relabelled):
    def spoilt(self, labels, bars, facts):
        return labels.assign(uniqueness=labels["uniqueness"] / labels["uniqueness"].mean())


# ---- splits --------------------------------------------------------------------------------------------------------


@leak("unpurged fold", "split h10", "fold 1: train beside test")
class Unpurged(Learning):
    def splits(self, labels):
        rows = np.arange(len(labels))
        blocks = np.array_split(rows, 3)
        return [Split(f"fold {k}", {"train": np.delete(rows, block), "test": block}) for k, block in enumerate(blocks)]


@leak("embargo too short", "split h10", "fold 1: train beside test")
class ShortEmbargo(Learning):
    def splits(self, labels):
        folds = purged_kfold(labels, 3, 15)
        return [Split(f"fold {k}", {"train": train, "test": test}, 16) for k, (train, test) in enumerate(folds)]


@leak("unpurged holdout", "split h10", "holdout: validation beside test", kind="sparse")
class UnpurgedHoldout(Learning):
    """A single validation row whose label ends among the test rows."""

    def splits(self, labels):
        holdout, *folds = super().splits(labels)
        roles = dict(holdout.roles)
        roles["validation"] = np.append(roles["validation"], roles["test"][0] - 1)
        return [replace(holdout, roles=roles), *folds]


@leak("shuffled rows", "split h10", "shuffled: train beside test")
class Shuffled(Learning):
    def splits(self, labels):
        rows = np.random.default_rng(0).permutation(len(labels))
        cut = int(len(rows) * 0.8)
        return [Split("shuffled", {"train": np.sort(rows[:cut]), "test": np.sort(rows[cut:])})]


# ---- what is learnt ------------------------------------------------------------------------------------------------


class Misfitted(Learning):
    """One fitted object reads rows that it may not."""

    def fit(self, values, labels, roles: Mapping[str, np.ndarray]):
        x, y = values.astype(np.float64), labels["label"].to_numpy(np.float64)
        clean = super().fit(values, labels, roles)
        return clean | {name: replace(clean[name], state=state) for name, state in
                        self.wrong(x, y, labels, roles).items()}  # fmt: skip


@leak("scaler fitted on all rows", "fitted h10", "preprocessing['center']")
class ScalerOfAll(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"preprocessing": {"center": np.median(x, axis=0)}}


@leak("scaler fitted on validation rows too", "fitted h10", "preprocessing['center']")
class ScalerOfTwo(Misfitted):
    def wrong(self, x, y, labels, roles):
        rows = np.concatenate([roles["train"], roles.get("validation", roles["test"])])
        return {"preprocessing": {"center": np.median(x[rows], axis=0)}}


@leak("scaler fitted on all rows", "fitted h10", "preprocessing['center']", kind="tiny")
class ScalerWithATrace(Misfitted):
    def wrong(self, x, y, labels, roles):
        trace = 1e-8 * np.tanh(x[roles["test"]].mean(axis=0))
        return {"preprocessing": {"center": np.median(x[roles["train"]], axis=0) + trace}}


@leak("training weights over test rows", "fitted h10", "training weights ")
class WeightsOfAll(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"training weights": training_weights(labels)[roles["train"]]}


@leak("early stopping over test rows", "fitted h10", "early stopping['losses']")
class StopsOnTest(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"early stopping": early_stopping(x, y, roles["train"], roles["test"])}


@leak("selection over test rows", "fitted h10", "selection ")
class SelectsOnAll(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"selection": selection(x, y, np.concatenate([roles["train"], roles["test"]]))}


@leak("calibrator fitted on test rows", "fitted h10", "calibrator ")
class CalibratesOnTest(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"calibrator": calibrator(x, y, roles["train"], roles["test"])}


@leak("class prior counted on all rows", "fitted h10", "calibrator ")
class PriorOfAll(Misfitted):
    def wrong(self, x, y, labels, roles):
        return {"calibrator": float(np.mean(y == 1))}
