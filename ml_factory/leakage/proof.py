"""Cut the bars, perturb the future, build again, and compare every row proven before the cut, to the bit.

Most cuts are tested on a window of bars around them, since a build of the window costs the same wherever the cut is. A
window does not reveal values derived from the whole file (a tick, a scale, a rank), so some cuts are tested on the file
from its first bar as well, and the facts of the market are derived from every shortened file. Cuts are samples: every
row of features is compared with a feed too, and what is split and fitted with the rows that each may read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.leakage.blind import find_blind_leaks, find_unpurged_rows
from ml_factory.leakage.cuts import (
    PERTURBATIONS,
    SAME_TIMES,
    TRUNCATE,
    CutPoint,
    choose_cut_points,
    perturb_future_bars,
)
from ml_factory.leakage.tables import RAISED, Findings, Leak, Table, compare
from ml_factory.progress import progress_phase
from ml_factory.targets.label_table import usable_label_rows

FULL_CUTS = 50
LEAST_ROWS = 24  # rows of features that a window must show before its cut
SPARE_BARS = 2_000
Tables = Mapping[str, Table]


@dataclass(frozen=True)
class ProofSpec:
    """Extent of a proof.

    cuts : number of moments
    whole_cuts : how many of them are tested on the whole file too
    ways : perturbations of the future in addition to its truncation
    whole_ways : of those the ones on the whole file
    thorough : at each cut features are tested too, and a window meets every future; False: features at one cut for each
        of `whole_cuts`, and by the feed, and a window meets one future, in turns: a third of the time
    ahead : bars of future in a window
    feed_pushes : pushes of the feed that features are compared with
    feed_all : the pushes cover the file; False: they are short and end at cuts of every kind
    fit_rows : labels on which fitted objects are tested
    fit_splits : on the first so many of the splits; None: on every one, of all schemes and folds
    """

    cuts: int = FULL_CUTS
    whole_cuts: int = 8
    ways: tuple[str, ...] = tuple(PERTURBATIONS)
    whole_ways: tuple[str, ...] = tuple(PERTURBATIONS)
    thorough: bool = True
    ahead: int = 3_000
    feed_pushes: int = 10_000
    feed_all: bool = True
    fit_rows: int = 30_000
    fit_splits: int | None = None

    def __post_init__(self):
        check_settings(self, cuts="[1, inf)")

    @property
    def form(self) -> str:
        """ "full" with at least 50 cuts, and thorough; else "quick"."""
        return "full" if self.cuts >= FULL_CUTS and self.thorough else "quick"


QUICK = ProofSpec(
    cuts=16,
    whole_cuts=1,
    whole_ways=(),
    thorough=False,
    ahead=1_500,
    feed_pushes=48,
    feed_all=False,
    fit_rows=6_000,
    fit_splits=1,
)


def prove(
    subject: Any, bars: pd.DataFrame, spec: ProofSpec, *, facts: dict | None = None,
    features: Table | None = None, built: Any = None, found: Findings | None = None,
) -> Findings:  # fmt: skip
    """Test whether the subject's past depends on its future; return the moments tested, and what was found there.

    subject : `workflows.build.DataUnderProof`, with the methods

        facts : facts of the market, from the first `head` bars or from settings
        tables : every part that is built, under its name: "features", "frame 60m", "labels h20"; of features on request
        feed_plan, feed : pushes of a live feed, and their rows of features
        splits : every split of the rows of these labels
        fit : all objects that are fitted on a split; values [L, F] are the feature rows of the labels

    bars : checked bars
    facts, features : facts of the market and feature rows of all bars, where they are stored
    built : `workflows.build.Built` of these bars, where it is there: then nothing of it is built again
    found : of other checks, to be added to and returned
    """
    run = _ProofRun(subject, bars, spec, found or Findings())
    with progress_phase("proof", len(bars)) as done:
        run.facts = run.findings.guarded(lambda: subject.facts(bars)) if facts is None else facts
        make = partial(subject.tables, bars, run.facts, features is None, built)
        whole = run.findings.guarded(make) if run.facts else None
        if whole is not None:
            run.whole = whole if features is None else {"features": features, **whole}
            run.check_cuts(done)
    if whole is not None:
        run.check_feed(built)
        with progress_phase("fitted", run.spec.fit_rows):
            run.check_fitted()
    return run.findings


class _ProofRun:
    facts: Any
    whole: Tables

    def __init__(self, subject: Any, bars: pd.DataFrame, spec: ProofSpec, findings: Findings):
        self.subject, self.bars, self.spec, self.findings = subject, bars, spec, findings

    # ---- cuts ----

    def check_cuts(self, done: Callable[[int], None]) -> None:
        """Test rows and facts at every cut, on a window and some on the file from its first bar.

        done : called after each cut with its share of the bars
        """
        start, rows = self.bars.index.as_unit("ns").asi8, self.whole["features"].proven
        warm = int(np.searchsorted(start, rows[min(LEAST_ROWS, len(rows) - 1)])) + 1
        labels = {part: table for part, table in self.whole.items() if part.startswith("labels")}
        cuts = self.findings.cuts = choose_cut_points(
            self.bars, self.facts["calendar"], self.spec.cuts, earliest=warm, rows=rows,
            labels=labels, bar_minutes=self.bar_minutes,
        )  # fmt: skip
        if not cuts:  # without a cut nothing is proved
            what, last = f"{RAISED} too few bars after the first row of features to cut", str(self.bars.index[-1])
            self.findings.add([Leak("pipeline", what, 0, last, last, "no cut", "none", "whole file")])
        head = self.findings.guarded(lambda: self.subject.head(self.bars)) or 0
        small = warm + SPARE_BARS + self.spec.ahead > 0.6 * len(self.bars)  # a window would be most of the file
        for number, cut in enumerate(cuts):
            spread = self.is_spread(number)
            features, whole = self.spec.thorough or spread, (0, len(self.bars), self.whole)
            back = SPARE_BARS + (warm if features else 0)
            low, high, clean = whole if small else self.window(cut, back, features)
            ways = (TRUNCATE, *self.spec.ways)
            if not self.spec.thorough and not small:  # alternating
                ways = (ways[number % len(ways)],)
            self.compare(cut, low, high, clean, ways, features)
            if not small and low and spread:
                self.compare(cut, *whole, (TRUNCATE, *self.spec.whole_ways), self.spec.thorough)
            if spread and cut.first >= head:
                self.check_facts(cut)
            done(len(self.bars) * (number + 1) // len(cuts) - len(self.bars) * number // len(cuts))

    @property
    def bar_minutes(self) -> int:
        return self.facts.get("bar_minutes", 1)

    def is_spread(self, number: int) -> bool:
        """True for `whole_cuts` of the cuts, evenly inside the file."""
        cuts = len(self.findings.cuts)
        return number in np.linspace(0, cuts - 1, min(self.spec.whole_cuts, cuts) + 2)[1:-1].round()

    def window(self, cut: CutPoint, back: int, features: bool) -> tuple[int, int, Tables]:
        """Return (first bar, stop, tables), far enough back that rows of features and labels exist before the cut."""
        high = min(len(self.bars), cut.first + self.spec.ahead)
        while back < cut.first:
            low = cut.first - back
            try:
                clean = self.subject.tables(self.bars.iloc[low:high], self.facts, features)
                if all(
                    np.count_nonzero(table.proven <= cut.at) >= (2 if part.startswith("frame") else LEAST_ROWS)
                    for part, table in clean.items()
                ):
                    return low, high, clean
            except Exception:  # noqa: BLE001 - too short for a first row; the longest window is the file
                pass
            back *= 2
        return 0, len(self.bars), self.whole

    def compare(self, cut: CutPoint, low: int, high: int, clean: Tables, ways: tuple[str, ...], features: bool) -> None:
        """Perturb the bars after the cut in each way, build, and record every difference up to the cut."""
        scope = "whole file" if high - low == len(self.bars) else "window"
        for way in ways:
            other = self.findings.guarded(
                lambda way=way: self.subject.tables(self.perturbed(cut, way, low, high), self.facts, features),
                cut=cut.moment, why=cut.why, way=way,
            )  # fmt: skip
            until = cut.quiet if way in SAME_TIMES else cut.at
            for part, table in (other or {}).items():
                ours = clean[part].known_by(until)
                self.findings.count(part, len(ours))
                at = {"cut": cut.moment, "disturbance": way, "scope": scope}
                self.findings.add(compare(part, table.known_by(until), ours, cut.why, found_at=at))

    def perturbed(self, cut: CutPoint, way: str, low: int, high: int) -> pd.DataFrame:
        return perturb_future_bars(self.bars.iloc[low:high], cut.first - low, way, bar_minutes=self.bar_minutes)

    def check_facts(self, cut: CutPoint) -> None:
        """Check that the facts of the market are the same whatever follows the bars they are derived from."""
        until = cut.first + self.spec.ahead
        for way in (TRUNCATE, *self.spec.ways):
            other = self.findings.guarded(
                lambda way=way: self.subject.facts(self.perturbed(cut, way, 0, until)),
                cut=cut.moment, why=cut.why, way=way,
            )  # fmt: skip
            self.findings.count("facts", 1)
            first = str(self.bars.index[0])
            self.findings.add(
                Leak("facts", name, 1, first, cut.moment, cut.why, way, "whole file")
                for name in (self.facts if other is not None else ()) if other.get(name) != self.facts[name]
            )  # fmt: skip

    # ---- feed, splits and fitted objects ----

    def check_feed(self, built: Any) -> None:
        """Compare rows with those of a feed, at whose pushes no later bar exists, for leaks that no cut meets."""
        if not self.spec.feed_pushes:
            return
        plan = (built and built.feed) or self.subject.feed_plan(self.bars, self.facts, self.spec)
        fed = self.findings.guarded(lambda: self.subject.feed(self.bars, self.facts, plan))
        if fed is not None:
            self.findings.count("features, fed bar by bar", len(plan.stretches))
            known = self.whole["features"].proven
            rows = self.whole["features"].rows[[name for name in fed if name in self.whole["features"].rows]]
            if not self.spec.feed_all:  # those that became known in the stretches
                ended = self.bars.index.as_unit("ns").asi8 + self.bar_minutes * MINUTE_NS
                first, stop = np.searchsorted(known, ended[np.array(plan.stretches) - 1], side="right").T
                rows = rows.iloc[np.concatenate([np.arange(*one) for one in zip(first, stop, strict=True)])]
            at = {"disturbance": "live feed", "scope": "whole file"}
            leaks = compare("features", fed, rows, "its own bar", found_at=at)
            self.findings.add(replace(leak, cut=leak.first_row) for leak in leaks)

    def check_fitted(self) -> None:
        """Check splits on all rows, and fitted objects on the first `fit_rows` labels that train."""
        if not self.spec.fit_rows:
            return
        features, guarded = self.whole["features"].rows, self.findings.guarded
        for part, table in self.whole.items():
            kind, _, horizon = part.partition(" ")
            if kind != "labels":
                continue
            labels = table.rows[table.rows.index.isin(features.index)]
            for split in (guarded(partial(self.subject.splits, labels)) or ()) if len(labels) else ():
                self.findings.add(find_unpurged_rows(labels, split, f"split {horizon}"))
            usable = usable_label_rows(labels)  # rows whose facts were inferred train nothing: a few of them suffice
            first = int(usable[0]) if len(usable) else 0
            labels = labels.iloc[max(0, first - self.spec.fit_rows // 8) : first + self.spec.fit_rows]
            values = features.to_numpy()[features.index.searchsorted(labels.index)]
            for split in (guarded(partial(self.subject.splits, labels)) or ())[: self.spec.fit_splits]:
                self.findings.count(f"fitted {horizon}", len(labels))
                leaks = partial(find_blind_leaks, self.subject.fit, values, labels, split, f"fitted {horizon}")
                self.findings.add(guarded(lambda leaks=leaks: list(leaks())) or ())
