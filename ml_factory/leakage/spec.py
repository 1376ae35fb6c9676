"""How much a proof tries: of a whole file, and of bars that were appended to one that is proved."""

import math
from dataclasses import dataclass, replace

from ml_factory.errors import SettingsError
from ml_factory.leakage.perturbations import TRUNCATE, WAYS

FULL_CUTS, QUICK_CUTS = 50, 10


@dataclass(frozen=True)
class ProofSpec:
    """How much is tried.

    cuts : moments.  whole_cuts : how many of them on the whole file too.  ways : disturbances beside the truncation.
    ways_a_cut : how many of those at each cut, taking turns.  ahead : bars of future in a window.
    whole_bars : a whole file is taken to be this long at most.
    unseen_bars : and this long by `build_on_prefixes`; 0: none.
    fit_rows : labels that fitted objects are tried on.  fit_splits : on the first so many of the splits;
        None: on every one, of all schemes and folds.
    feed_rows : rows of features compared with a feed, bar by bar.
    enough : different leaks after which the proof need not go on.
    least_cuts, least_fed, least_fitted : what is tried of appended bars, however few they are (`of_part`).
    """

    cuts: int = FULL_CUTS
    whole_cuts: int = 8
    ways: tuple[str, ...] = tuple(WAYS)
    ways_a_cut: int = len(WAYS)
    ahead: int = 3_000
    whole_bars: int | None = None
    unseen_bars: int | None = None
    fit_rows: int = 30_000
    fit_splits: int | None = None
    feed_rows: int = 50_000
    enough: int = 1_000
    least_cuts: int = QUICK_CUTS
    least_fed: int = 500
    least_fitted: int = 1_500
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.cuts, bool) or not isinstance(self.cuts, int) or self.cuts < 1:
            wanted = f"a whole number, {FULL_CUTS} or more for the full form"
            raise SettingsError("This many cuts cannot be made", where="cuts", got=repr(self.cuts), wanted=wanted)

    @property
    def form(self) -> str:
        """full where every cut meets every disturbance and there are at least 50, else "quick"."""
        whole = self.cuts >= FULL_CUTS and self.ways_a_cut >= len(WAYS) and self.whole_bars is None
        return "full" if whole else "quick"

    def ways_at(self, number: int) -> tuple[str, ...]:
        """The disturbances of the n-th cut, the truncation first."""
        turn = [self.ways[(number * self.ways_a_cut + k) % len(self.ways)] for k in range(self.ways_a_cut)]
        return (TRUNCATE, *turn)

    def of_part(self, new: int, bars: int) -> "ProofSpec":
        """What is tried of the last `new` of so many bars, of which the others are proved: as much a bar as of a whole
        file, and no less than the floors.

        The same code was tried with the same settings on the bars before, so what is looked for is what only the new
        bars would show. Nothing is cut on the whole file: its facts are those of the bars before.
        """
        share = new / bars
        return replace(
            self, whole_cuts=0,
            cuts=max(self.least_cuts, math.ceil(self.cuts * share)),
            feed_rows=max(self.least_fed, math.ceil(self.feed_rows * share)),
            fit_rows=min(self.fit_rows, max(self.least_fitted, math.ceil(self.fit_rows * share))),
        )  # fmt: skip


QUICK = ProofSpec(
    cuts=QUICK_CUTS,
    whole_cuts=2,
    ways_a_cut=2,
    whole_bars=400_000,
    unseen_bars=60_000,
    fit_rows=6_000,
    fit_splits=1,
    feed_rows=2_000,
    least_cuts=2,
    least_fed=24,
    least_fitted=300,
)
