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

from ml_factory.errors import SettingsError
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
    features : at cuts, features are tested too; False: by the feed alone, which takes a third of the time
    ahead : bars of future in a window
    feed_pushes : pushes of the feed that all features are compared with
    fit_rows : labels on which fitted objects are tested
    fit_splits : on the first so many of the splits; None: on every one, of all schemes and folds
    enough : different leaks after which the proof stops
    """

    cuts: int = FULL_CUTS
    whole_cuts: int = 8
    ways: tuple[str, ...] = tuple(PERTURBATIONS)
    features: bool = True
    ahead: int = 3_000
    feed_pushes: int = 10_000
    fit_rows: int = 30_000
    fit_splits: int | None = None
    enough: int = 1_000
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.cuts, bool) or not isinstance(self.cuts, int) or self.cuts < 1:
            wanted = f"a whole number, {FULL_CUTS} or more for the full form"
            raise SettingsError("This many cuts cannot be made", where="cuts", got=repr(self.cuts), wanted=wanted)

    @property
    def form(self) -> str:
        """ "full" with at least 50 cuts and features at each of them, else "quick"."""
        return "full" if self.cuts >= FULL_CUTS and self.features else "quick"


QUICK = ProofSpec(cuts=10, whole_cuts=1, features=False, feed_pushes=150, fit_rows=6_000, fit_splits=1)


def prove(
    subject: Any, bars: pd.DataFrame, spec: ProofSpec | None = None, *, facts: dict | None = None,
    features: Table | None = None,
) -> Findings:  # fmt: skip
    """Test whether the subject's past depends on its future; return the moments tested, and what was found there.

    subject : `workflows.build.DataUnderProof`, with the methods

        facts : facts of the market, from the first `head` bars or from settings
        tables : every part that is built, under its name: "features", "frame 60m", "labels h20"; of features on request
        feed : rows of features of a live feed, in so many pushes
        splits : every split of the rows of these labels
        fit : all objects that are fitted on a split; values [L, F] are the feature rows of the labels

    bars : checked bars
    facts, features : facts of the market and feature rows of all bars, where they are stored
    """
    run = _ProofRun(subject, bars, spec or ProofSpec())
    with progress_phase("proof", len(bars)) as done:
        run.facts = run.findings.guarded(lambda: subject.facts(bars)) if facts is None else facts
        whole = run.findings.guarded(lambda: subject.tables(bars, run.facts, features is None)) if run.facts else None
        if whole is not None:
            run.whole = whole if features is None else {"features": features, **whole}
            run.check_cuts(done)
    if whole is not None:
        run.check_feed()
        with progress_phase("fitted", run.spec.fit_rows):
            run.check_fitted()
    return run.findings


class _ProofRun:
    facts: Any
    whole: Tables

    def __init__(self, subject: Any, bars: pd.DataFrame, spec: ProofSpec):
        self.subject, self.bars, self.spec = subject, bars, spec
        self.findings = Findings(spec.enough)

    # ---- cuts ----

    def check_cuts(self, done: Callable[[int], None]) -> None:
        """Test rows and facts at every cut, on a window and some on the file from its first bar.

        done : called after each cut with its share of the bars
        """
        start, rows = self.bars.index.as_unit("ns").asi8, self.whole["features"].proven
        warm = int(np.searchsorted(start, rows[min(LEAST_ROWS, len(rows) - 1)])) + 1
        labels = {part: table for part, table in self.whole.items() if part.startswith("labels")}
        self.cuts = self.findings.cuts = choose_cut_points(
            self.bars, self.facts["calendar"], self.spec.cuts, seed=self.spec.seed, earliest=warm, rows=rows,
            labels=labels, bar_minutes=self.bar_minutes,
        )  # fmt: skip
        if not self.cuts:  # without a cut nothing is proved
            what, last = f"{RAISED} too few bars after the first row of features to cut", str(self.bars.index[-1])
            self.findings.add([Leak("pipeline", what, 0, last, last, "no cut", "none", "whole file")])
        head = self.findings.guarded(lambda: self.subject.head(self.bars)) or 0
        small = warm + SPARE_BARS + self.spec.ahead > 0.6 * len(self.bars)  # a window would be most of the file
        for number, cut in enumerate(self.cuts):
            if self.findings.full:
                break
            low, high, clean = (0, len(self.bars), self.whole) if small else self.window(cut, warm + SPARE_BARS)
            self.compare(cut, low, high, clean)
            if not small and low and self.is_spread(number):
                self.compare(cut, 0, len(self.bars), self.whole)
            if self.is_spread(number) and cut.first >= head:
                self.check_facts(cut)
            done(len(self.bars) * (number + 1) // len(self.cuts) - len(self.bars) * number // len(self.cuts))

    @property
    def bar_minutes(self) -> int:
        return self.facts.get("bar_minutes", 1)

    def is_spread(self, number: int) -> bool:
        """True for `whole_cuts` of the cuts, evenly inside the file."""
        count = min(self.spec.whole_cuts, len(self.cuts))
        return number in np.linspace(0, len(self.cuts) - 1, count + 2)[1:-1].round()

    def window(self, cut: CutPoint, back: int) -> tuple[int, int, Tables]:
        """Return (first bar, stop, tables), far enough back that rows of features exist before the cut."""
        high = min(len(self.bars), cut.first + self.spec.ahead)
        while back < cut.first:
            low = cut.first - back
            try:
                clean = self.tables(self.bars.iloc[low:high])
                if not self.spec.features or np.count_nonzero(clean["features"].proven <= cut.at) >= LEAST_ROWS:
                    return low, high, clean
            except Exception:  # noqa: BLE001 - too short for a first row; the longest window is the file
                pass
            back *= 2
        return 0, len(self.bars), self.whole

    def tables(self, bars: pd.DataFrame) -> Tables:
        return self.subject.tables(bars, self.facts, self.spec.features)

    def compare(self, cut: CutPoint, low: int, high: int, clean: Tables) -> None:
        """Perturb the bars after the cut in each way, build, and record every difference up to the cut."""
        scope = "whole file" if high - low == len(self.bars) else "window"
        for way in (TRUNCATE, *self.spec.ways):
            if self.findings.full:
                return
            other = self.findings.guarded(
                lambda way=way: self.tables(self.perturbed(cut, way, low, high)), cut=cut.moment, why=cut.why, way=way
            )
            until = cut.quiet if way in SAME_TIMES else cut.at
            for part, table in (other or {}).items():
                ours = clean[part].known_by(until)
                self.findings.count(part, len(ours))
                at = {"cut": cut.moment, "disturbance": way, "scope": scope}
                self.findings.add(compare(part, table.known_by(until), ours, cut.why, found_at=at))

    def perturbed(self, cut: CutPoint, way: str, low: int = 0, high: int | None = None) -> pd.DataFrame:
        return perturb_future_bars(self.bars.iloc[low:high], cut.first - low, way, self.spec.seed, self.bar_minutes)

    def check_facts(self, cut: CutPoint) -> None:
        """Check that the facts of the market are the same whatever follows the bars they are derived from."""
        for way in (TRUNCATE, *self.spec.ways):
            other = self.findings.guarded(
                lambda way=way: self.subject.facts(self.perturbed(cut, way)), cut=cut.moment, why=cut.why, way=way
            )
            self.findings.count("facts", 1)
            first = str(self.bars.index[0])
            self.findings.add(
                Leak("facts", name, 1, first, cut.moment, cut.why, way, "whole file")
                for name in (self.facts if other is not None else ()) if other.get(name) != self.facts[name]
            )  # fmt: skip

    # ---- feed, splits and fitted objects ----

    def check_feed(self) -> None:
        """Compare every row with that of a feed, at whose pushes no later bar exists, for leaks that no cut meets."""
        spec = self.spec
        if not spec.feed_pushes or self.findings.full:
            return
        fed = self.findings.guarded(lambda: self.subject.feed(self.bars, self.facts, spec.feed_pushes, spec.seed))
        if fed is not None:
            self.findings.count("features, fed bar by bar", min(len(fed), spec.feed_pushes))
            rows = self.whole["features"].rows
            rows = rows[[name for name in fed.columns if name in rows.columns]]
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
            values = features.to_numpy()[features.index.get_indexer(labels.index)]
            for split in (guarded(partial(self.subject.splits, labels)) or ())[: self.spec.fit_splits]:
                self.findings.count(f"fitted {horizon}", len(labels))
                leaks = partial(find_blind_leaks, self.subject.fit, values, labels, split, f"fitted {horizon}")
                self.findings.add(guarded(lambda leaks=leaks: list(leaks())) or ())
