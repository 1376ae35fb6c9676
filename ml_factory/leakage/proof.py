"""Cut, disturb what follows, build anew, and compare every row that was proven before the cut, to the bit.

Most cuts are proved on a window of bars around them, since a build of the window costs the same wherever the cut is.
A window would not show what is read off a whole file (a tick, a scale, a rank), so some cuts are proved on the file
from its first bar as well, and the facts of the market are asked of every shortened file.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.leakage.cut_points import Cut, choose_cuts
from ml_factory.leakage.fitted import labels_to_divide, leaks_of_fitted, leaks_of_splits, rows_to_fit
from ml_factory.leakage.perturbations import KEEP_THEIR_TIMES, TRUNCATE, disturb
from ml_factory.leakage.pipeline_under_test import Pipeline, Split, tables_of
from ml_factory.leakage.prefix_builds import PrefixBuild, build_on_prefixes
from ml_factory.leakage.progress_file import ProofProgress
from ml_factory.leakage.spec import ProofSpec
from ml_factory.leakage.streaming_check import shared
from ml_factory.leakage.tables import RAISED, Difference, Leak, Table, differences
from ml_factory.progress import phase
from ml_factory.targets.label_table import usable_rows

LEAST_ROWS = 24  # rows of features that a window must show before its cut
SPARE_BARS = 2_000


@dataclass(frozen=True)
class Proof:
    """leaks : empty when none was found.  compared : part -> rows compared, over all cuts and disturbances.

    builds : how often the pipeline was run.  history : bars before a cut that a window needs.
    """

    form: str
    cuts: tuple[Cut, ...]
    disturbances: tuple[str, ...]
    compared: Mapping[str, int]
    leaks: tuple[Leak, ...]
    builds: int
    history: int
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.leaks


def prove(
    pipeline: Pipeline, bars: pd.DataFrame, spec: ProofSpec | None = None, *, facts: dict | None = None,
    whole: Callable[[], Mapping[str, Table]] | None = None, since: int = 0, history: int = 0,
    progress: Callable[[int, int], None] | None = None, seen: Sequence[PrefixBuild] = (),
    tried: ProofProgress | None = None,
) -> Proof:  # fmt: skip
    """Try to make the pipeline's past depend on its future.

    bars : checked bars.  facts : what the pipeline said of them, where that is at hand.  whole : makes the
    tables of all of them where some lie ready; called when the first bars alone have been built.
    seen : first sights beside those that are made here, of a time at which no later bar had been shown.
    since, history : bars before `since` are proved: only those after it are tried, as `ProofSpec.of_part` says, behind
    `history` bars of their past.
    progress : called with (builds done, builds in all).
    tried : where each step is kept, so that a proof that was killed goes on and ends with the same.
    """
    spec = spec or ProofSpec()
    if not since:
        return _Attempt(pipeline, bars, spec, progress, tried).run(facts, whole, seen=seen)
    part = spec.of_part(len(bars) - since, len(bars))
    low, tables = _behind(pipeline, bars, facts, since, history, spec.ahead)
    attempt = _Attempt(pipeline, bars.iloc[low:], part, progress, tried, turn=since)
    return attempt.run(facts, tables and (lambda: tables), since - low)


def _behind(
    pipeline: Pipeline, bars: pd.DataFrame, facts: dict, since: int, history: int, ahead: int
) -> tuple[int, Mapping[str, Table] | None]:
    """From which bar on to build so that rows of features stand before `since`, and the tables of those bars.

    None where the bars cannot be built: then the attempt says why.
    """
    # Few new bars are built with all of their past each time, many in windows of it.
    back = history if len(bars) - since <= history + ahead else 2 * history
    until = bars.index.as_unit("ns").asi8[since]
    while True:
        low = max(0, since - back)
        try:
            tables = tables_of(pipeline, bars.iloc[low:], facts)
            enough = np.count_nonzero(tables["features"].proven <= until) >= LEAST_ROWS
        except Exception:  # noqa: BLE001 - the past may be too short for a first row; the longest is the file
            tables, enough = None, False
        if enough or not low:
            return low, tables
        back *= 2


class _Attempt:
    def __init__(
        self, pipeline: Pipeline, bars: pd.DataFrame, spec: ProofSpec, progress: Callable | None,
        tried: ProofProgress | None = None, turn: int = 0,
    ):  # fmt: skip
        """turn : which kinds of cuts and disturbances come first, where few are tried."""
        self.pipeline, self.bars, self.spec, self.progress = pipeline, bars, spec, progress
        self.record, self.turn, self.did = tried, turn, []
        self.leaks: dict[tuple[str, str], Leak] = {}
        self.compared: dict[str, int] = {}
        self.cuts: list[Cut] = []
        self.builds, self.told, self.history, self.started = 0, 0, 0, time.perf_counter()

    def run(
        self, facts: dict | None, build: Callable | None, since: int = 0, seen: Sequence[PrefixBuild] = ()
    ) -> Proof:
        if not since:
            seen = (*seen, *build_on_prefixes(self.pipeline, self.bars, facts, self.spec.unseen_bars))
        facts = self.tried(lambda: self.pipeline.facts(self.bars)) if facts is None else facts
        whole = None
        if facts is not None:
            self.bar_minutes = facts.get("bar_minutes", 1)
            whole = self.tried(build or (lambda: tables_of(self.pipeline, self.bars, facts)))
        if whole is not None:
            self.try_first_sights(seen, whole)
            self.history = self.bars_before_the_first_row(whole["features"]) + SPARE_BARS
            self.choose(facts, whole, since)
            self.recall()
            with phase("proof", len(self.bars)) as self.done:
                self.each(self.cuts_to_try(facts, whole))
            self.each([("feed", lambda: self.try_feed(facts, whole["features"], since))])
            if self.spec.fit_rows:
                with phase("fitted", self.spec.fit_rows):
                    self.try_fitted(whole, facts, since)
        return Proof(
            self.spec.form, tuple(self.cuts), self.spec.ways, self.compared, tuple(self.leaks.values()), self.builds,
            self.history, time.perf_counter() - self.started,
        )  # fmt: skip

    def cuts_to_try(self, facts: dict, whole: Mapping[str, Table]) -> Iterator[tuple[str, Callable]]:
        """(name, step) of everything that is tried at cuts."""
        yield "facts", lambda: self.try_facts(facts)
        for number, cut in enumerate(self.cuts):
            yield f"window {number}", lambda n=number, c=cut: self.try_window(n, c, facts, whole)
        # Some cuts again, on the file from its first bar; where windows are the file that is done.
        for number, cut in self.spread([] if self.small else self.cuts):
            yield f"whole file {number}", lambda n=number, c=cut: self.try_whole(n, c, facts, whole)

    def each(self, steps: Iterable[tuple[str, Callable]]) -> None:
        """Take the steps that were not taken before, and keep what each has found."""
        for name, step in steps:
            if name not in self.did:
                step()
                self.did.append(name)
                if self.record:
                    self.record.save(self.so_far())

    def once(self, name: str, build: Callable):
        """What `build` gives, or None: a step that later ones need, so it is built again where it was tried before."""
        if name in self.did:
            before = self.builds, dict(self.leaks)
            made = self.tried(build)
            if self.leaks.keys() == before[1].keys():  # what it may raise was told then
                self.builds, self.leaks = before
            return made
        made = []
        self.each([(name, lambda: made.append(self.tried(build)))])
        return made[0]

    def so_far(self) -> dict:
        leaks, cuts = [leak.to_dict() for leak in self.leaks.values()], [cut.at for cut in self.cuts]
        return {"cuts": cuts, "did": self.did, "leaks": leaks, "compared": self.compared, "builds": self.builds}

    def recall(self) -> None:
        """Go on from what was kept of this very proof."""
        told = self.record.load() if self.record else None
        if told and told["cuts"] == [cut.at for cut in self.cuts]:
            self.did, self.compared, self.builds = told["did"], told["compared"], told["builds"]
            self.leaks |= {(leak.part, leak.column): leak for leak in (Leak(**one) for one in told["leaks"])}

    # -- one step each ---------------------------------------------------------------------------------------------

    def choose(self, facts: dict, whole: Mapping[str, Table], since: int) -> None:
        start = self.bars.index.as_unit("ns").asi8
        warm = whole["features"].at[min(LEAST_ROWS, len(whole["features"]) - 1)]
        earliest = max(int(np.searchsorted(start, warm)) + 1, since)
        labels = {part: table for part, table in whole.items() if part.startswith("labels")}
        self.cuts = choose_cuts(
            self.bars, facts["calendar"], self.spec.cuts, seed=self.spec.seed, earliest=earliest,
            rows=whole["features"].at, labels=labels, turn=self.turn, bar_minutes=self.bar_minutes,
        )  # fmt: skip
        if not self.cuts:  # nothing tried is nothing proved
            what, last = f"{RAISED} too few bars after the first row of features to cut", str(self.bars.index[-1])
            self.found(Leak("pipeline", what, 0, last, None, last, "no cut", "none", "whole file"))

    def try_first_sights(self, seen: Sequence[PrefixBuild], whole: Mapping[str, Table]) -> None:
        """What was made of the first bars before any later one was shown is what the whole file gives there."""
        for sight in seen:
            self.builds += 1
            last = self.bars.index[sight.stop - 1] + pd.Timedelta(minutes=self.bar_minutes)
            moment, why, way = str(last), "before later bars were shown", TRUNCATE
            if sight.tables is None:
                what = f"{RAISED} {sight.error}"
                self.found(Leak("pipeline", what, 0, moment, None, moment, why, way, "whole file"))
            for part, table in (sight.tables or {}).items():
                for one in differences(whole[part], table, last.as_unit("ns").value)[1]:
                    self.found(_leak(part, one, moment, why, way, "whole file"))

    def try_facts(self, facts: dict) -> None:
        """What holds for the market is the same whatever follows the bars it may be read from."""
        head = self.tried(lambda: self.pipeline.head(self.bars)) if self.spec.whole_cuts else None
        for number, cut in self.spread([cut for cut in self.cuts if head is not None and cut.first >= head]):
            for way in self.ways_at(number):
                here = self.bars.iloc[: self.whole_end(cut)]
                other = self.tried(
                    lambda b=here, c=cut, w=way: self.pipeline.facts(self.disturbed(b, c.first, w, 0)), cut, way
                )
                self.count("facts", 1)
                for name in facts if other is not None else ():
                    if other.get(name) != facts[name]:
                        first = str(self.bars.index[0])
                        self.found(Leak("facts", name, 1, first, None, cut.moment, cut.why, way, "whole file"))

    def try_window(self, number: int, cut: Cut, facts: dict, whole: Mapping[str, Table]) -> None:
        if len(self.leaks) >= self.spec.enough:
            return
        low, high, clean = self.window(cut, facts, whole)
        scope = "whole file" if high - low == len(self.bars) else "window"
        here = self.bars.iloc[low:high]
        for way in self.ways_at(number):
            self.compare(clean, here, cut.first - low, cut, way, facts, scope)

    def try_whole(self, number: int, cut: Cut, facts: dict, whole: Mapping[str, Table]) -> None:
        here, ways = self.bars.iloc[: self.whole_end(cut)], self.ways_at(number)
        for way in ways if self.spec.form == "full" else ways[:1]:
            self.compare(whole, here, cut.first, cut, way, facts, "whole file")

    def try_feed(self, facts: dict, features: Table, since: int) -> None:
        """Every row beside that of a feed which had no later bar: for leaks that no cut happens to meet."""
        if not self.spec.feed_rows or not hasattr(self.pipeline, "feed") or len(self.leaks) >= self.spec.enough:
            return
        fed = self.tried(lambda: self.pipeline.feed(self.bars, facts, self.spec.feed_rows, self.spec.seed, since))
        if fed is None:
            return
        last = int(features.at[-1])
        rows, found = differences(fed, shared(features, fed), last)
        self.count("features, fed bar by bar", min(rows, self.spec.feed_rows))
        for one in found:
            first_row = str(pd.Timestamp(one.first, tz="UTC"))
            self.found(replace(_leak("features", one, first_row, "its own bar", "live feed", "whole file"), size=None))

    def spread(self, cuts: list[Cut]) -> list[tuple[int, Cut]]:
        """`whole_cuts` of these cuts, evenly over the file, numbered."""
        cuts = [cut for cut in cuts if cut.first < (self.spec.whole_bars or len(self.bars))]
        count = min(self.spec.whole_cuts, len(cuts))
        chosen = np.unique(np.linspace(0, len(cuts) - 1, count).round().astype(int)) if count else ()
        return [(number, cuts[k]) for number, k in enumerate(chosen)]

    def whole_end(self, cut: Cut) -> int:
        """Where a whole file ends for this cut: with its last bar, unless `whole_bars` says sooner."""
        limit = self.spec.whole_bars or len(self.bars)
        return min(len(self.bars), max(limit, cut.first + self.spec.ahead))

    def try_fitted(self, whole: Mapping[str, Table], facts: dict, since: int) -> None:
        """Splits keep the rule on all rows, fitted objects are tried on the first `fit_rows` labels; both on the last
        ones where only those are new."""
        made = self.once("labels", lambda: self.pipeline.labels(self.bars, facts))
        for horizon, labels in (made or {}).items():
            labels, row = rows_to_fit(labels, whole["features"])
            first = len(labels) - labels_to_divide(self.pipeline, labels, self.spec.fit_rows) if since else 0
            labels, row = labels.iloc[first:], row[first:]
            if len(labels):
                self.each([(f"rule {horizon}", lambda x=labels, h=horizon: self.tried(lambda: self.try_rule(x, h)))])
                usable = usable_rows(labels)  # rows whose facts were inferred train nothing: begin behind them
                begin = 0 if since or not len(usable) else int(usable[0])
                some = slice(begin, None if since else begin + self.spec.fit_rows)
                self.each(self.fits_to_try(labels.iloc[some], whole["features"].matrix[row[some]], horizon))

    def try_rule(self, labels: pd.DataFrame, horizon: str) -> None:
        self.take(leaks_of_splits(labels, self.pipeline.splits(labels), horizon))

    def fits_to_try(self, labels: pd.DataFrame, values: np.ndarray, horizon: str) -> Iterator[tuple[str, Callable]]:
        """(name, step) of all that is fitted on one split after the other."""

        def fit(split: Split) -> None:
            self.count(f"fitted {horizon}", len(labels))
            self.take(leaks_of_fitted(self.pipeline, values, labels, [split], horizon, self.spec.seed))

        splits = self.once(f"parts {horizon}", lambda: self.pipeline.splits(labels)[: self.spec.fit_splits])
        for number, split in enumerate(splits or ()):
            yield f"fitted {horizon} {number}", lambda s=split: self.tried(lambda: fit(s))

    # -- what the steps share --------------------------------------------------------------------------------------

    def ways_at(self, number: int) -> tuple[str, ...]:
        return self.spec.ways_at(number + self.turn)

    @property
    def small(self) -> bool:
        """Whether windows would be most of the file: then the file itself is the window."""
        return self.history + self.spec.ahead > 0.6 * len(self.bars)

    def window(self, cut: Cut, facts: dict, whole: Mapping[str, Table]) -> tuple[int, int, Mapping[str, Table]]:
        """(first bar, stop, its tables): far enough back that rows of features stand before the cut."""
        back, high = self.history, min(len(self.bars), cut.first + self.spec.ahead)
        while not self.small and back < cut.first:
            low = cut.first - back
            try:
                clean = tables_of(self.pipeline, self.bars.iloc[low:high], facts)
            except Exception:  # noqa: BLE001 - a window may be too short for a first row; the longest is the file
                clean = None
            self.builds += 1
            if clean is not None and np.count_nonzero(clean["features"].proven <= cut.at) >= LEAST_ROWS:
                return low, high, clean
            back *= 2
        return 0, len(self.bars), whole

    def compare(
        self, clean: Mapping[str, Table], bars: pd.DataFrame, first: int, cut: Cut, way: str, facts: dict, scope: str
    ) -> None:
        """Disturb these bars from position `first` on, build, and keep every difference up to the cut."""
        if len(self.leaks) >= self.spec.enough:
            return
        other = self.tried(
            lambda: tables_of(self.pipeline, self.disturbed(bars, first, way, self.spec.seed), facts), cut, way, scope
        )
        self.tell()
        until = cut.quiet if way in KEEP_THEIR_TIMES else cut.at
        for part, table in (other or {}).items():
            rows, found = differences(clean[part], table, until)
            self.count(part, rows)
            for one in found:
                self.found(_leak(part, one, cut.moment, cut.why, way, scope))

    def disturbed(self, bars: pd.DataFrame, first: int, way: str, seed: int) -> pd.DataFrame:
        return disturb(bars, first, way, seed, self.bar_minutes)

    def tell(self) -> None:
        """How far the builds have come, as builds and as a share of the rows."""
        now = len(self.bars) * self.builds // self.expected_builds
        self.done(now - self.told)
        self.told = now
        if self.progress:
            self.progress(self.builds, self.expected_builds)

    @property
    def expected_builds(self) -> int:
        return max(self.builds, (len(self.cuts) + self.spec.whole_cuts) * (1 + self.spec.ways_a_cut))

    def tried(self, build: Callable, cut: Cut | None = None, way: str = "none", scope: str = "whole file"):
        """What `build` gives, or None: an exception is a failure of the pipeline, whatever it is."""
        self.builds += 1
        try:
            return build()
        except Exception as error:  # noqa: BLE001 - fails closed: what cannot be built is not proven
            moment, why = (cut.moment, cut.why) if cut else ("none", "the bars as they are")
            what = f"{RAISED} {type(error).__name__}: {error}"
            self.found(Leak("pipeline", what, 0, moment, None, moment, why, way, scope))
            return None

    def take(self, leaks) -> None:
        for leak in leaks:
            self.found(leak)

    def count(self, part: str, rows: int) -> None:
        self.compared[part] = self.compared.get(part, 0) + rows

    def found(self, leak: Leak) -> None:
        """Keep the first sight of each column, with the worst of the later ones."""
        known = self.leaks.get((leak.part, leak.column))
        if known is None:
            self.leaks[leak.part, leak.column] = leak
            return
        sizes = [size for size in (known.size, leak.size) if size is not None]
        self.leaks[leak.part, leak.column] = replace(
            known, rows=max(known.rows, leak.rows), size=max(sizes, default=None), cuts=known.cuts + 1
        )

    def bars_before_the_first_row(self, features: Table) -> int:
        start = self.bars.index.as_unit("ns").asi8
        return int(np.searchsorted(start, features.at[min(LEAST_ROWS, len(features) - 1)]))


def _leak(part: str, one: Difference, moment: str, why: str, way: str, scope: str) -> Leak:
    size = one.size if np.isfinite(one.size) else None
    return Leak(part, one.column, one.rows, str(pd.Timestamp(one.first, tz="UTC")), size, moment, why, way, scope)
