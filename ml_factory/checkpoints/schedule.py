"""When the next checkpoint is due: at once, soon while a run is young, then as rarely as is safe here.

And how long before a session's end the last one must begin.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ml_factory.errors import SettingsError

MAX_INTERVAL = 30 * 60.0  # seconds: what the user is promised
# Where saves cost next to nothing Young's interval is seconds: a mount would never rest, and little is gained.
_MIN_INTERVAL = 30.0
# What a save in the background takes from the training beside it, as a share of its time.
_BACKGROUND_SHARE = 0.15
# Forecasts of a save are this much too short at worst; the reserve at the end of a session is paid once.
_SAVE_MARGIN = 3.0
_MIN_RESERVE = 15.0


class SaveTimer:
    """The timer of one unit of work.

    longest : seconds between two saves of a run that is no longer young.
    first : seconds between saves until `longest` has passed since the first one: a new run has most to lose.
    clock : seconds that never go back.
    mean_life : seconds a session lives before it is taken away unannounced; infinite where none is.
    """

    def __init__(
        self, longest: float = MAX_INTERVAL, first: float = 120.0, *, clock: Callable[[], float],
        mean_life: float = math.inf,
    ):  # fmt: skip
        self.longest, self.first, self.clock, self.mean_life = longest, first, clock, mean_life
        self._began = self._last = None
        self._cost = 0.0

    def due(self) -> bool:
        """Whether a save is due now; the first is at once."""
        return self._last is None or self.clock() - self._last >= self.interval

    def due_in(self) -> float:
        """Seconds until a save is due, 0 when it is."""
        if self._last is None:
            return 0.0
        now = self.clock()
        then = self._last + self._interval(now)
        # A run that is young now may not be any more when that time has come.
        return max(self._last + self._interval(max(then, now)) - now, 0.0)

    @property
    def interval(self) -> float:
        """Seconds between two saves: Young's for what a save costs and a session lives here; as long as either is not
        known, `first` while the run is young and `longest` then."""
        return self._interval(self.clock())

    def _interval(self, now: float) -> float:
        if self._cost == 0 or math.isinf(self.mean_life):
            young = self._began is None or now - self._began < self.longest
            return min(self.first, self.longest) if young else self.longest
        return min(self.longest, max(_MIN_INTERVAL, save_interval(self._cost, self.mean_life, self.longest)))

    def record_save(self) -> None:
        """A save was handed over now."""
        self._last = self.clock()
        self._began = self._last if self._began is None else self._began

    def record_cost(self, blocking: float, writing: float) -> None:
        """What a save cost: seconds in which training stood still, and seconds until it was where it belongs."""
        self._cost = blocking + _BACKGROUND_SHARE * writing


@dataclass
class SaveDurations:
    """What the last save took, in seconds from the hand-over: the next is forecast to take as long.

    written : until it was on the first disk, 0 before the first save.  copied : until it was on the mount; 0 where
    there is none, and before the first that got there.
    """

    written: float = 0.0
    copied: float = 0.0

    @property
    def seconds(self) -> float:
        """Until a save is where it outlives this machine."""
        return max(self.written, self.copied)


def save_durations(folder: str | os.PathLike) -> SaveDurations:
    """Those of this process and the checkpoints in `folder`: a unit that begins late in a session knows what the saves
    of those before it took."""
    return _times_of(Path(os.path.abspath(folder)), os.getpid())


@lru_cache(maxsize=64)
def _times_of(folder: Path, process: int) -> SaveDurations:
    return SaveDurations()


def reserved_seconds(save_seconds: float) -> float:
    """Seconds kept free before a session's end: the last save, three times as slow as forecast, and a moment."""
    return _MIN_RESERVE + _SAVE_MARGIN * save_seconds


def save_interval(save_seconds: float, mean_life_seconds: float, longest: float = MAX_INTERVAL) -> float:
    """Seconds between two saves: min(longest, sqrt(2 * cost of a save * mean life)), Young (1974).

    save_seconds : seconds of training that one save costs.  mean_life_seconds : of a session that ends unannounced;
    infinite when its end is known, and then saves are as far apart as promised.
    """
    if not (save_seconds >= 0 and mean_life_seconds > 0):
        raise SettingsError(
            "No cadence follows from this", where="cadence", got=f"save {save_seconds} s, life {mean_life_seconds} s",
            wanted="a cost of 0 or more and a life above 0",
        )  # fmt: skip
    return min(longest, math.sqrt(2 * save_seconds * mean_life_seconds)) if save_seconds > 0 else longest
