"""Cut the bars, perturb the future, build again, and compare every row proven before the cut, to the bit.

Most cuts are tested on a window of bars around them, since a build of the window costs the same wherever the cut is. A
window does not reveal values derived from the whole file (a tick, a scale, a rank), so some cuts are tested on the file
from its first bar as well, and the facts of the market are derived from every shortened file.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from ml_factory.leakage.cut_points import CutPoint, choose_cut_points
from ml_factory.leakage.perturbations import SAME_TIMES, TRUNCATE, perturb_future_bars
from ml_factory.leakage.pipeline_under_test import PipelineUnderTest, SplitUnderTest, run_pipeline_under_test
from ml_factory.leakage.prefix_builds import PrefixBuild, build_pipeline_on_prefixes
from ml_factory.leakage.proof_result import Proof
from ml_factory.leakage.proof_spec import ProofSpec
from ml_factory.leakage.split_and_fit_check import (
    check_fitted_for_leaks,
    check_splits_are_purged,
    match_labels_to_features,
)
from ml_factory.leakage.streaming_check import select_common_columns
from ml_factory.leakage.timed_tables import RAISED, ColumnDifference, Leak, TimedTable, table_differences
from ml_factory.progress import progress_phase
from ml_factory.targets.label_table import usable_label_rows

LEAST_ROWS = 24  # rows of features that a window must show before its cut
SPARE_BARS = 2_000


def prove_no_look_ahead(
    pipeline: PipelineUnderTest, bars: pd.DataFrame, spec: ProofSpec | None = None, *, facts: dict | None = None,
    whole: Callable[[], Mapping[str, TimedTable]] | None = None, progress: Callable[[int, int], None] | None = None,
    prefix_builds: Sequence[PrefixBuild] = (),
) -> Proof:  # fmt: skip
    """Test whether the pipeline's past depends on its future.

    Parameters
    ----------
    pipeline : the pipeline under test
    bars : checked bars
    spec : extent of the proof
    facts : result of `market_facts` on the bars, where available
    whole : returns the tables of all bars where some are stored; called after the prefixes were built
    progress : called with (builds done, builds in all)
    prefix_builds : builds from a time before later bars were shown, in addition to those made here
    """
    return _ProofRun(pipeline, bars, spec or ProofSpec(), progress).run(facts, whole, prefix_builds)


class _ProofRun:
    def __init__(self, pipeline: PipelineUnderTest, bars: pd.DataFrame, spec: ProofSpec, progress: Callable | None):
        self.pipeline, self.bars, self.spec, self.progress = pipeline, bars, spec, progress
        self.leaks: dict[tuple[str, str], Leak] = {}
        self.compared: dict[str, int] = {}
        self.cuts: list[CutPoint] = []
        self.builds, self.reported, self.history, self.started = 0, 0, 0, time.perf_counter()

    def run(self, facts: dict | None, build: Callable | None, prefix_builds: Sequence[PrefixBuild]) -> Proof:
        unseen = build_pipeline_on_prefixes(self.pipeline, self.bars, facts, self.spec.unseen_bars)
        facts = self.run_guarded(lambda: self.pipeline.market_facts(self.bars)) if facts is None else facts
        whole = None
        if facts is not None:
            self.bar_minutes = facts.get("bar_minutes", 1)
            whole = self.run_guarded(build or (lambda: run_pipeline_under_test(self.pipeline, self.bars, facts)))
        if whole is not None:
            self.check_prefix_builds([*prefix_builds, *unseen], whole)
            self.history = self.bars_before_first_row(whole["features"]) + SPARE_BARS
            self.select_cuts(facts, whole)
            with progress_phase("proof", len(self.bars)) as self.done:
                self.check_cuts(facts, whole)
            self.check_feed(facts, whole["features"])
            with progress_phase("fitted", self.spec.fit_rows):
                self.check_fitted_objects(whole, facts)
        return Proof(
            self.spec.form, tuple(self.cuts), self.spec.ways, self.compared, tuple(self.leaks.values()), self.builds,
            time.perf_counter() - self.started,
        )  # fmt: skip

    # -- one step each ---------------------------------------------------------------------------------------------

    def check_cuts(self, facts: dict, whole: Mapping[str, TimedTable]) -> None:
        """Test everything that is tested at cuts."""
        self.check_facts(facts)
        for number, cut in enumerate(self.cuts):
            self.check_window(number, cut, facts, whole)
        # Some cuts again, on the file from its first bar, unless windows are the whole file anyway.
        for number, cut in self.spread_cuts([] if self.small else self.cuts):
            self.check_whole_file(number, cut, facts, whole)

    def select_cuts(self, facts: dict, whole: Mapping[str, TimedTable]) -> None:
        start = self.bars.index.as_unit("ns").asi8
        warm = whole["features"].at[min(LEAST_ROWS, len(whole["features"]) - 1)]
        labels = {part: table for part, table in whole.items() if part.startswith("labels")}
        self.cuts = choose_cut_points(
            self.bars, facts["calendar"], self.spec.cuts, seed=self.spec.seed,
            earliest=int(np.searchsorted(start, warm)) + 1, rows=whole["features"].at, labels=labels,
            bar_minutes=self.bar_minutes,
        )  # fmt: skip
        if not self.cuts:  # without a cut nothing is proved
            what, last = f"{RAISED} too few bars after the first row of features to cut", str(self.bars.index[-1])
            self.add_leak(Leak("pipeline", what, 0, last, None, last, "no cut", "none", "whole file"))

    def check_prefix_builds(self, prefix_builds: Sequence[PrefixBuild], whole: Mapping[str, TimedTable]) -> None:
        """Compare the builds made before later bars were shown with the whole file's."""
        for build in prefix_builds:
            self.builds += 1
            last = self.bars.index[build.stop - 1] + pd.Timedelta(minutes=self.bar_minutes)
            moment, why, way = str(last), "before later bars were shown", TRUNCATE
            if build.tables is None:
                what = f"{RAISED} {build.error}"
                self.add_leak(Leak("pipeline", what, 0, moment, None, moment, why, way, "whole file"))
            for part, table in (build.tables or {}).items():
                for one in table_differences(whole[part], table, last.as_unit("ns").value)[1]:
                    self.add_leak(_leak(part, one, moment, why, way, "whole file"))

    def check_facts(self, facts: dict) -> None:
        """Check that the facts of the market are the same whatever follows the bars they are derived from."""
        head = self.run_guarded(lambda: self.pipeline.count_head_bars(self.bars)) if self.spec.whole_cuts else None
        for number, cut in self.spread_cuts([cut for cut in self.cuts if head is not None and cut.first >= head]):
            for way in self.spec.perturbations_at(number):
                section = self.bars.iloc[: self.whole_file_end(cut)]
                other = self.run_guarded(
                    lambda args=(section, cut.first, way, 0): self.pipeline.market_facts(self.disturbed(*args)),
                    cut,
                    way,
                )
                self.count("facts", 1)
                for name in facts if other is not None else ():
                    if other.get(name) != facts[name]:
                        first = str(self.bars.index[0])
                        self.add_leak(Leak("facts", name, 1, first, None, cut.moment, cut.why, way, "whole file"))

    def check_window(self, number: int, cut: CutPoint, facts: dict, whole: Mapping[str, TimedTable]) -> None:
        if len(self.leaks) >= self.spec.enough:
            return
        low, high, clean = self.window(cut, facts, whole)
        scope = "whole file" if high - low == len(self.bars) else "window"
        section = self.bars.iloc[low:high]
        for way in self.spec.perturbations_at(number):
            self.compare(clean, section, cut.first - low, cut, way, facts, scope)

    def check_whole_file(self, number: int, cut: CutPoint, facts: dict, whole: Mapping[str, TimedTable]) -> None:
        section, ways = self.bars.iloc[: self.whole_file_end(cut)], self.spec.perturbations_at(number)
        for way in ways if self.spec.form == "full" else ways[:1]:
            self.compare(whole, section, cut.first, cut, way, facts, "whole file")

    def check_feed(self, facts: dict, features: TimedTable) -> None:
        """Compare every row with that of a stream without later bars, for leaks that no cut detects."""
        streams = self.spec.feed_rows and hasattr(self.pipeline, "stream_features")
        if not streams or len(self.leaks) >= self.spec.enough:
            return
        fed = self.run_guarded(
            lambda: self.pipeline.stream_features(self.bars, facts, self.spec.feed_rows, self.spec.seed)
        )
        if fed is None:
            return
        last = int(features.at[-1])
        rows, found = table_differences(fed, select_common_columns(features, fed), last)
        self.count("features, fed bar by bar", min(rows, self.spec.feed_rows))
        for one in found:
            first_row = str(pd.Timestamp(one.first, tz="UTC"))
            leak = _leak("features", one, first_row, "its own bar", "live feed", "whole file")
            self.add_leak(replace(leak, size=None))

    def spread_cuts(self, cuts: list[CutPoint]) -> list[tuple[int, CutPoint]]:
        """Return `whole_cuts` of these cuts, evenly over the file, numbered."""
        cuts = [cut for cut in cuts if cut.first < (self.spec.whole_bars or len(self.bars))]
        count = min(self.spec.whole_cuts, len(cuts))
        chosen = np.unique(np.linspace(0, len(cuts) - 1, count).round().astype(int)) if count else ()
        return [(number, cuts[k]) for number, k in enumerate(chosen)]

    def whole_file_end(self, cut: CutPoint) -> int:
        """Return the end of the whole file for this cut: its last bar, or earlier by `whole_bars`."""
        limit = self.spec.whole_bars or len(self.bars)
        return min(len(self.bars), max(limit, cut.first + self.spec.ahead))

    def check_fitted_objects(self, whole: Mapping[str, TimedTable], facts: dict) -> None:
        """Check splits on all rows, and fitted objects on the first `fit_rows` labels that train."""
        made = self.run_guarded(lambda: self.pipeline.labels(self.bars, facts)) if self.spec.fit_rows else None
        for horizon, labels in (made or {}).items():
            labels, row = match_labels_to_features(labels, whole["features"])
            if not len(labels):
                continue
            self.run_guarded(partial(self.check_purging, labels, horizon))
            usable = usable_label_rows(labels)  # rows whose facts were inferred train nothing: a few of them suffice
            first = int(usable[0]) if len(usable) else 0
            some = slice(max(0, first - self.spec.fit_rows // 8), first + self.spec.fit_rows)
            values, labels = whole["features"].matrix[row[some]], labels.iloc[some]
            splits = self.run_guarded(partial(self.pipeline.splits, labels)) or ()
            for split in splits[: self.spec.fit_splits]:
                self.run_guarded(partial(self.check_fitted, values, labels, split, horizon))

    def check_purging(self, labels: pd.DataFrame, horizon: str) -> None:
        self.add_leaks(check_splits_are_purged(labels, self.pipeline.splits(labels), horizon))

    def check_fitted(self, values: np.ndarray, labels: pd.DataFrame, split: SplitUnderTest, horizon: str) -> None:
        self.count(f"fitted {horizon}", len(labels))
        self.add_leaks(check_fitted_for_leaks(self.pipeline, values, labels, [split], horizon, self.spec.seed))

    # -- shared by the steps ---------------------------------------------------------------------------------------

    @property
    def small(self) -> bool:
        """True where windows would be most of the file: the file itself is then the window."""
        return self.history + self.spec.ahead > 0.6 * len(self.bars)

    def window(
        self, cut: CutPoint, facts: dict, whole: Mapping[str, TimedTable]
    ) -> tuple[int, int, Mapping[str, TimedTable]]:
        """Return (first bar, stop, tables), far enough back that rows of features exist before the cut."""
        back, high = self.history, min(len(self.bars), cut.first + self.spec.ahead)
        while not self.small and back < cut.first:
            low = cut.first - back
            try:
                clean = run_pipeline_under_test(self.pipeline, self.bars.iloc[low:high], facts)
            except Exception:  # noqa: BLE001 - a window may be too short for a first row; the longest is the file
                clean = None
            self.builds += 1
            if clean is not None and np.count_nonzero(clean["features"].proven <= cut.at) >= LEAST_ROWS:
                return low, high, clean
            back *= 2
        return 0, len(self.bars), whole

    def compare(
        self,
        clean: Mapping[str, TimedTable],
        bars: pd.DataFrame,
        first: int,
        cut: CutPoint,
        way: str,
        facts: dict,
        scope: str,
    ) -> None:
        """Perturb these bars from position `first` on, build, and record every difference up to the cut."""
        if len(self.leaks) >= self.spec.enough:
            return
        other = self.run_guarded(
            lambda: run_pipeline_under_test(self.pipeline, self.disturbed(bars, first, way, self.spec.seed), facts),
            cut,
            way,
            scope,
        )
        self.report_progress()
        until = cut.quiet if way in SAME_TIMES else cut.at
        for part, table in (other or {}).items():
            rows, found = table_differences(clean[part], table, until)
            self.count(part, rows)
            for one in found:
                self.add_leak(_leak(part, one, cut.moment, cut.why, way, scope))

    def disturbed(self, bars: pd.DataFrame, first: int, way: str, seed: int) -> pd.DataFrame:
        return perturb_future_bars(bars, first, way, seed, self.bar_minutes)

    def report_progress(self) -> None:
        """Report the builds done, as builds and as a share of the rows."""
        now = len(self.bars) * self.builds // self.expected_builds
        self.done(now - self.reported)
        self.reported = now
        if self.progress:
            self.progress(self.builds, self.expected_builds)

    @property
    def expected_builds(self) -> int:
        return max(self.builds, (len(self.cuts) + self.spec.whole_cuts) * (1 + self.spec.ways_a_cut))

    def run_guarded(self, build: Callable, cut: CutPoint | None = None, way: str = "none", scope: str = "whole file"):
        """Return the result of `build`, or None: any exception counts as a failure of the pipeline."""
        self.builds += 1
        try:
            return build()
        except Exception as error:  # noqa: BLE001 - fails closed: what cannot be built is not proven
            moment, why = (cut.moment, cut.why) if cut else ("none", "the bars as they are")
            what = f"{RAISED} {type(error).__name__}: {error}"
            self.add_leak(Leak("pipeline", what, 0, moment, None, moment, why, way, scope))
            return None

    def add_leaks(self, leaks) -> None:
        for leak in leaks:
            self.add_leak(leak)

    def count(self, part: str, rows: int) -> None:
        self.compared[part] = self.compared.get(part, 0) + rows

    def add_leak(self, leak: Leak) -> None:
        """Keep the first leak of each column, with the worst values of the later ones."""
        known = self.leaks.get((leak.part, leak.column))
        if known is None:
            self.leaks[leak.part, leak.column] = leak
            return
        sizes = [size for size in (known.size, leak.size) if size is not None]
        self.leaks[leak.part, leak.column] = replace(
            known, rows=max(known.rows, leak.rows), size=max(sizes, default=None), cuts=known.cuts + 1
        )

    def bars_before_first_row(self, features: TimedTable) -> int:
        start = self.bars.index.as_unit("ns").asi8
        return int(np.searchsorted(start, features.at[min(LEAST_ROWS, len(features) - 1)]))


def _leak(part: str, one: ColumnDifference, moment: str, why: str, way: str, scope: str) -> Leak:
    size = one.size if np.isfinite(one.size) else None
    return Leak(part, one.column, one.rows, str(pd.Timestamp(one.first, tz="UTC")), size, moment, why, way, scope)
