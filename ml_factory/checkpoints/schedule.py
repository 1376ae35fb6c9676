"""Save schedule: at once, often while a run is young, then at Young's interval, soon again after a refused save; and
the time reserved for the last save.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ml_factory.errors import SettingsError
from ml_factory.process_identity import process_id

MAX_INTERVAL = 30 * 60.0  # seconds; the documented upper bound
# Where saves are almost free Young's interval is seconds: the mount would be busy all the time for little gain.
_MIN_INTERVAL = 30.0
# Slowdown of training while a save is written in the background, as a fraction of the writing time.
_BACKGROUND_SHARE = 0.15
# Worst ratio of a save's duration to its forecast; the reserve at a session's end is paid once.
_SAVE_MARGIN = 3.0
_MIN_RESERVE = 15.0
# Seconds until a refused save is due again: of the first refusal, doubled by each further one, and the longest.
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 10.0


@dataclass(frozen=True)
class SaveSchedule:
    """Schedule of saves, besides one every `auto_save_minutes` of the manager.

    Parameters
    ----------
    first_save_minutes : interval of saves while the run is young.
    mean_life_seconds : mean time until a session is preempted; a shorter one makes saves more frequent.
    ending : returns True when the session is about to end, given the seconds until a save is in the workspace (on the
        mount, if there is one); called at every step boundary. The state is then saved once more, and SessionOver ends
        the work.
    clock : monotonic seconds.
    """

    first_save_minutes: float = 2
    mean_life_seconds: float = math.inf
    ending: Callable[[float], bool] = lambda save_seconds: False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not self.first_save_minutes >= 0:
            raise SettingsError(
                "A time between saves is not negative", where="first_save_minutes", got=self.first_save_minutes,
                wanted=">= 0",
            )  # fmt: skip


class SaveTimer:
    """Schedule of one unit of work.

    Parameters
    ----------
    max_interval : seconds between two saves of a run that is no longer young.
    first_interval : seconds between saves until `max_interval` has passed since the first one: a new run has most to
        lose.
    clock : monotonic seconds.
    mean_life : mean seconds until a session is preempted; infinite without preemption.
    """

    def __init__(
        self, max_interval: float = MAX_INTERVAL, first_interval: float = 120.0, *, clock: Callable[[], float],
        mean_life: float = math.inf,
    ):  # fmt: skip
        self.max_interval, self.first_interval = max_interval, first_interval
        self.clock, self.mean_life = clock, mean_life
        self._first_save: float | None = None
        self._last_save: float | None = None
        self._retry_at, self._refusals, self._accepted = math.inf, 0, False
        self._cost = 0.0

    def due(self) -> bool:
        """Return True when a save is due now; the first is due at once."""
        if self._last_save is None:
            return True
        now = self.clock()
        return now >= self._retry_at or now - self._last_save >= self._interval(now)

    def due_in(self) -> float:
        """Return the seconds until a save is due, 0 when it is."""
        if self._last_save is None:
            return 0.0
        now = self.clock()
        then = self._last_save + self._interval(now)
        # A run that is young now may no longer be young at that time.
        return max(min(self._last_save + self._interval(max(then, now)), self._retry_at) - now, 0.0)

    @property
    def interval(self) -> float:
        """Seconds between two saves: Young's interval for the cost of a save and the mean life of a session; while
        either is unknown, `first_interval` for a young run and `max_interval` after that.
        """
        return self._interval(self.clock())

    def _interval(self, now: float) -> float:
        if self._cost == 0 or math.isinf(self.mean_life):
            young = self._first_save is None or now - self._first_save < self.max_interval
            return min(self.first_interval, self.max_interval) if young else self.max_interval
        return min(self.max_interval, max(_MIN_INTERVAL, save_interval(self._cost, self.mean_life, self.max_interval)))

    def record_save(self) -> None:
        """Record that a save was handed over now; whether a disk takes it is recorded later."""
        self._last_save, self._retry_at = self.clock(), math.inf
        self._first_save = self._last_save if self._first_save is None else self._first_save

    def record_accepted(self) -> None:
        """Record that a disk has taken the save handed over last."""
        self._accepted, self._refusals, self._retry_at = True, 0, math.inf

    def record_refused(self) -> None:
        """Record that no disk took the save handed over last: it is due again soon, the later the more were refused
        one after the other.
        """
        self._retry_at = self.clock() + min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        if not self._accepted:  # a run without a checkpoint is as young as it was
            self._first_save = None

    def record_cost(self, blocking: float, writing: float) -> None:
        """Record the cost of a save.

        Parameters
        ----------
        blocking : seconds in which training stood still.
        writing : seconds until the save was in the workspace.
        """
        self._cost = blocking + _BACKGROUND_SHARE * writing


@dataclass
class SaveDurations:
    """Durations of the last save, in seconds from the hand-over: the forecast of the next one.

    Parameters
    ----------
    written : until it was on the first disk, 0 before the first save.
    copied : until it was on the mount; 0 without a mount, and before the first that got there.
    """

    written: float = 0.0
    copied: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds until a save survives the loss of this machine."""
        return max(self.written, self.copied)


_durations: dict[tuple[Path, str], SaveDurations] = {}


def save_durations(folder: str | os.PathLike) -> SaveDurations:
    """Return the durations shared by all units of this process that save in `folder`, so that a unit that begins
    late in a session knows how long earlier saves took.
    """
    return _durations.setdefault((Path(os.path.abspath(folder)), process_id()), SaveDurations())


def reserved_save_seconds(save_seconds: float) -> float:
    """Return the seconds reserved before a session's end: the last save, three times as slow as forecast, and a
    margin.
    """
    return _MIN_RESERVE + _SAVE_MARGIN * save_seconds


def save_interval(save_seconds: float, mean_life_seconds: float, max_interval: float = MAX_INTERVAL) -> float:
    """Return the seconds between two saves: min(max_interval, sqrt(2 * cost of a save * mean life)), Young (1974).

    Parameters
    ----------
    save_seconds : seconds of training that one save costs.
    mean_life_seconds : of a session that is preempted without notice; infinite when its end is known.
    """
    if not (save_seconds >= 0 and mean_life_seconds > 0):
        raise SettingsError(
            "No save interval follows from these values", where="save_interval",
            got=f"save {save_seconds} s, life {mean_life_seconds} s", wanted="a cost of 0 or more and a life above 0",
        )  # fmt: skip
    return min(max_interval, math.sqrt(2 * save_seconds * mean_life_seconds)) if save_seconds > 0 else max_interval
