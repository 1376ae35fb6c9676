"""Extent of a proof."""

from dataclasses import dataclass

from ml_factory.errors import SettingsError
from ml_factory.leakage.perturbations import PERTURBATIONS, TRUNCATE

FULL_CUTS, QUICK_CUTS = 50, 10


@dataclass(frozen=True)
class ProofSpec:
    """Extent of a proof.

    cuts : number of moments
    whole_cuts : how many of them are tested on the whole file too
    ways : perturbations in addition to the truncation
    ways_a_cut : how many of those at each cut, alternating
    ahead : bars of future in a window
    whole_bars : most bars of a whole file
    unseen_bars : most bars in `build_pipeline_on_prefixes`; 0: none
    fit_rows : labels on which fitted objects are tested
    fit_splits : on the first so many of the splits; None: on every one, of all schemes and folds
    feed_rows : rows of features compared with a stream, bar by bar
    enough : different leaks after which the proof stops
    """

    cuts: int = FULL_CUTS
    whole_cuts: int = 8
    ways: tuple[str, ...] = tuple(PERTURBATIONS)
    ways_a_cut: int = len(PERTURBATIONS)
    ahead: int = 3_000
    whole_bars: int | None = None
    unseen_bars: int | None = None
    fit_rows: int = 30_000
    fit_splits: int | None = None
    feed_rows: int = 10_000
    enough: int = 1_000
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.cuts, bool) or not isinstance(self.cuts, int) or self.cuts < 1:
            wanted = f"a whole number, {FULL_CUTS} or more for the full form"
            raise SettingsError("This many cuts cannot be made", where="cuts", got=repr(self.cuts), wanted=wanted)

    @property
    def form(self) -> str:
        """ "full" where every cut meets every perturbation and there are at least 50, else "quick"."""
        whole = self.cuts >= FULL_CUTS and self.ways_a_cut >= len(PERTURBATIONS) and self.whole_bars is None
        return "full" if whole else "quick"

    def perturbations_at(self, number: int) -> tuple[str, ...]:
        """Return the perturbations of the n-th cut, the truncation first."""
        rotated = [self.ways[(number * self.ways_a_cut + k) % len(self.ways)] for k in range(self.ways_a_cut)]
        return (TRUNCATE, *rotated)


QUICK = ProofSpec(
    cuts=QUICK_CUTS,
    whole_cuts=2,
    ways_a_cut=2,
    whole_bars=400_000,
    unseen_bars=60_000,
    fit_rows=6_000,
    fit_splits=1,
    feed_rows=2_000,
)
