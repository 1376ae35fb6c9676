"""When the next checkpoint is due: at once, soon while a run is young, then as rarely as is safe here."""

import math
from collections.abc import Callable

from ml_factory.runs.planner import LONGEST_CADENCE, cadence

# Where saves cost next to nothing Young's interval is seconds: a mount would never rest, and little is gained.
_SHORTEST_CADENCE = 30.0
# What a save in the background takes from the training beside it, as a share of its time.
_SHARE_BESIDE = 0.15


class SaveTimer:
    """The timer of one unit of work.

    longest : seconds between two saves of a run that is no longer young.
    first : seconds between saves until `longest` has passed since the first one: a new run has most to lose.
    clock : seconds that never go back.
    mean_life : seconds a session lives before it is taken away unannounced; infinite where none is.
    """

    def __init__(
        self, longest: float = LONGEST_CADENCE, first: float = 120.0, *, clock: Callable[[], float],
        mean_life: float = math.inf,
    ):  # fmt: skip
        self.longest, self.first, self.clock, self.mean_life = longest, first, clock, mean_life
        self._began = self._last = None
        self._cost = 0.0

    def due(self) -> bool:
        """Whether a save is due now; the first is at once."""
        if self._last is None:
            return True
        now = self.clock()
        young = now - self._began < self.longest
        return now - self._last >= min(self.first if young else self.longest, self.interval)

    @property
    def interval(self) -> float:
        """Seconds between two saves of a run that is no longer young, by what a save has cost so far."""
        if self._cost == 0 or math.isinf(self.mean_life):
            return self.longest
        return min(self.longest, max(_SHORTEST_CADENCE, cadence(self._cost, self.mean_life, self.longest)))

    def saved(self) -> None:
        """A save was handed over now."""
        self._last = self.clock()
        self._began = self._last if self._began is None else self._began

    def measured(self, blocking: float, writing: float) -> None:
        """What a save cost: seconds in which training stood still, and seconds until it was written beside it."""
        self._cost = blocking + _SHARE_BESIDE * writing
