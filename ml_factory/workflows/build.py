"""The pure part of `prepare`: bars to features, frames and labels, each with the moment from which it is final.

`prepare` stores what `build` returns; the look-ahead proof calls it on cut and disturbed bars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from ml_factory.data.resample import (
    ResampledBars,
    known_at_index,
    resample_bars,
    resample_minute_bars_for_labels,
    to_bar_chunk,
)
from ml_factory.data.sessions import (
    DAY_NS,
    INFER_SESSIONS,
    MarketSpec,
    assign_sessions,
    distinct_in_order,
    resolve_market_spec,
)
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.features import custom
from ml_factory.features.build import FIRST_BARS, FeatureRows, FeatureStream, build_features, frame_name
from ml_factory.leakage.blind import Fitted, Split
from ml_factory.leakage.cuts import choose_cut_points
from ml_factory.leakage.proof import ProofSpec
from ml_factory.leakage.tables import Table
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator
from ml_factory.settings import DataSpec
from ml_factory.targets.make_labels import make_labels, primary_rule_side
from ml_factory.targets.splits import (
    chronological_split,
    combinatorial_purged_folds,
    purged_kfold,
    walk_forward_expanding,
    walk_forward_rolling,
)
from ml_factory.targets.weights import training_weights

Stretch = tuple[int, int]
FED_ROWS = 32  # of a stretch, and at least two bars of the coarsest frame
ROWS_A_FOLD = 4  # times the embargo: with fewer rows a fold may keep none, which is no leak
LEAST_FOLDS = 3  # of which two may be evaluated at once


@dataclass(frozen=True)
class FeedPlan:
    """Pushes of a live feed with which the proof compares features.

    stretches : (first, stop) of the bars of each push, in time order
    states : first bar of a stretch that does not go on where another stopped -> the feature stream's state before it,
        from a build that had not read further; {}: none has passed there, and bars are pushed from the first on
    """

    stretches: list[Stretch]
    states: dict[int, dict]


@dataclass(frozen=True)
class Built:
    """What bars give.

    features : None where they were left out
    base, minute_bars : bars of the base frame, and the bars inside them that labels look at (None where there are none)
    labels : horizon -> table of every proven label, whether it has a row of features or not
    feed : of the proof, with the states that the build of these features passed
    """

    features: FeatureRows | None
    base: ResampledBars
    minute_bars: ResampledBars | None
    labels: dict[int, pd.DataFrame]
    feed: FeedPlan | None = None


def build(
    bars: pd.DataFrame, market: MarketSpec, settings: DataSpec, horizons: Sequence[int], *, features: bool = True,
    base: ResampledBars | None = None,
) -> Built:  # fmt: skip
    """Build features and labels of checked bars.

    base : bars of the base frame, where they are made already

    Rows known, and labels proven, by a moment are the same bits whatever bars follow it. Raises BarsError where too few
    bars are left after warm-up.
    """
    minutes, made = settings.features.base_minutes, None
    if features:
        made = build_features(bars, market, settings.features)
    with progress_phase("frames", len(bars)):
        base = made.base if made else base or resample_bars(bars, market, minutes)
        minute_bars, labels = resample_minute_bars_for_labels(bars, market, minutes), {}
    for horizon in horizons:
        with progress_phase(f"labels {horizon}", len(base)):
            labels[horizon] = make_labels(base, minute_bars, settings.label_spec_for(horizon), market)
    return Built(made, base, minute_bars, labels)


def resolve_market_facts(symbol: str, bars: pd.DataFrame, settings: DataSpec) -> MarketSpec:
    """Return the market facts that these settings prepare: given, looked up by symbol, or inferred from 20 sessions."""
    return resolve_market_spec(
        symbol, bars, calendar=settings.calendar, tick=settings.tick, bar_minutes=settings.bars.minutes or 1
    )


@dataclass(frozen=True)
class DataUnderProof:
    """What `prepare` makes with these settings, as a subject of `leakage.proof.prove`.

    folds : folds of each scheme tested in addition to the chronological split, fewer where rows are few; 0: none
    """

    symbol: str
    settings: DataSpec
    horizons: tuple[int, ...]
    folds: int

    def facts(self, bars: pd.DataFrame) -> dict:
        return resolve_market_facts(self.symbol, bars, self.settings).to_dict()

    def head(self, bars: pd.DataFrame) -> int:
        """Return the number of bars in the first 20 sessions (or 20 days with a bar, if that is more), plus one.

        The additional bar shows that they are over: before it, one more bar may still belong to the last of them.
        """
        start = bars.index.as_unit("ns").asi8
        calendar = resolve_market_facts(self.symbol, bars, self.settings).calendar
        days = (assign_sessions(start, calendar).id, start // DAY_NS)
        last = [np.searchsorted(day, distinct_in_order(day)[:INFER_SESSIONS][-1], side="right") for day in days]
        return int(max(last)) + 1

    def built(self, bars: pd.DataFrame, facts: dict, features: bool = True) -> Built:
        """Build as `prepare` does, with copies of the user's own features that have not been called before."""
        with custom.stateless_custom_features():
            return build(bars, MarketSpec.from_dict(facts), self.settings, self.horizons, features=features)

    def tables(
        self, bars: pd.DataFrame, facts: dict, features: bool = True, built: Built | None = None
    ) -> dict[str, Table]:
        """Return every part under its name; `built` where the bars are built already."""
        built, tables = built or self.built(bars, facts, features), {}
        if built.features is not None:
            tables["features"] = _known(built.features.to_frame())
        tables |= {f"frame {name}": _known(frame) for name, frame in self.frames(bars, facts, built.base).items()}
        for horizon, labels in built.labels.items():
            proven = pd.DatetimeIndex(labels["label_end"]).as_unit("ns").asi8
            tables[f"labels h{horizon}"] = Table(labels, proven)
        return tables

    def frames(self, bars: pd.DataFrame, facts: dict, base: ResampledBars) -> dict[str, pd.DataFrame]:
        """Return the base bars, the coarse bars and the sides of meta-labels, index known_at."""
        market, spec = MarketSpec.from_dict(facts), self.settings.features
        made = {spec.base_minutes: base} | {minutes: resample_bars(bars, market, minutes) for minutes in spec.frames}
        frames = {frame_name(minutes): _frame(vars(one)) for minutes, one in made.items()}
        for labels in map(self.settings.label_spec_for, self.horizons[:1]):  # all bet alike
            if labels.kind == "meta":  # a side is known with its row, not with its label
                frames["primary side"] = primary_rule_side(base, labels, market).to_frame()
        return frames

    def feed_plan(self, bars: pd.DataFrame, facts: dict, spec: ProofSpec) -> FeedPlan:
        """Plan the pushes of a feed, with a place for each state that a build of the features can fill.

        They cover the file and end at random base bars; or they are short, and end where leaks are: at the cuts of
        every kind, and a bar and two base bars after them.
        """
        market, minutes = MarketSpec.from_dict(facts), self.settings.features.base_minutes
        if spec.feed_all:
            first = np.searchsorted(bars.index.as_unit("ns").asi8, resample_bars(bars, market, minutes).start)
            ends = seeded_generator(0, "feed").permutation(first)[: spec.feed_pushes]
            return FeedPlan(list(pairwise(np.unique([0, *ends, len(bars)]).tolist())), {})
        longest = max([minutes, *self.settings.features.frames])
        warm = max(FIRST_BARS["base"] * minutes, FIRST_BARS["coarse"] * longest) // market.bar_minutes
        cuts = choose_cut_points(
            bars, market.calendar, spec.feed_pushes // 3, earliest=min(warm, len(bars) // 2),
            bar_minutes=market.bar_minutes,
        )  # fmt: skip
        back = max(FED_ROWS * minutes, 2 * longest) // market.bar_minutes
        at = np.array([cut.first for cut in cuts], np.int64)
        later = [at, at + 1, at + 2 * minutes // market.bar_minutes + 1]
        ends = np.unique(np.minimum(later, len(bars))).tolist()
        stretches = [(max(end - back, before), end) for before, end in pairwise([0, *ends])]
        return FeedPlan(stretches, {first: {} for first, _ in stretches if first not in {0, *ends}})

    def feed(self, bars: pd.DataFrame, facts: dict, plan: FeedPlan) -> pd.DataFrame:
        """Return the features of a live feed with these pushes, index known_at: at each push no later bar exists.

        The last row of each push has no future, the rows before it the future of that push alone: so a leak of one row
        ahead is met in as many rows as there are pushes, a longer one in more. The user's own features are left out: a
        stream may compute them with other last bits.
        """
        market, spec, given, at = MarketSpec.from_dict(facts), self.settings.features, [], 0
        stream, chunk = FeatureStream(market, spec), to_bar_chunk(bars, market)
        with progress_phase("live feed", len(bars)) as done:
            for first, stop in plan.stretches:
                if state := plan.states.get(first):
                    stream.load_state(state)
                elif first != at:
                    stream.push(chunk.part(at, first))
                given.append(stream.push(chunk.part(first, stop)))
                done(stop - at)
                at = stop
        own = len(stream.names) - len(spec.custom)
        index = known_at_index(np.concatenate([one.known_at for one in given]))
        values = np.concatenate([one.values[:, :own] for one in given])
        return pd.DataFrame(values, index=index, columns=stream.names[:own], copy=False)

    def splits(self, labels: pd.DataFrame) -> list[Split]:
        """Return the chronological split, and the folds of every scheme where rows suffice."""
        embargo = self.settings.splits.embargo_bars
        parts = [Split("holdout", chronological_split(labels, self.settings.splits), embargo)]
        folds = min(self.folds, len(labels) // (ROWS_A_FOLD * (1 + embargo)))
        if folds < LEAST_FOLDS:
            return parts
        schemes = {
            "purged": (embargo, purged_kfold(labels, folds, embargo)),
            "expanding": (0, walk_forward_expanding(labels, folds)),
            "rolling": (0, walk_forward_rolling(labels, folds)),
            "combinatorial": (embargo, combinatorial_purged_folds(labels, folds, 2, embargo)),
        }
        for name, (kept_away, pairs) in schemes.items():
            for number, (train, test) in enumerate(pairs):
                parts.append(Split(f"{name} fold {number}", {"train": train, "test": test}, kept_away))
        return parts

    def fit(self, values: np.ndarray, labels: pd.DataFrame, roles: Mapping[str, np.ndarray]) -> dict[str, Fitted]:
        """Fit the steps up to the scaler, and training weights."""
        rows = np.asarray(roles["train"])
        return {
            "preprocessing": Fitted(fit_preprocessing_steps(self.settings.preprocess, values, rows).to_dict()),
            "training weights": Fitted(training_weights(labels.iloc[rows])),
        }


def _known(rows: pd.DataFrame) -> Table:
    return Table(rows, rows.index.as_unit("ns").asi8)


def _frame(columns: Mapping[str, object]) -> pd.DataFrame:
    """Return the arrays of a frame of bars as a table."""
    arrays = {name: values for name, values in columns.items() if isinstance(values, np.ndarray)}
    return pd.DataFrame(arrays, index=known_at_index(arrays["known_at"]), copy=False)
