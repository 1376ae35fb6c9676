"""Save schedule: at once, often while a run is young, then every half hour, soon again after a refused save; and the
time reserved for the last save.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ml_factory.errors import SettingsError

# Worst ratio of a save's duration to its forecast; the reserve at a session's end is paid once.
_SAVE_MARGIN = 3.0
_MIN_RESERVE = 15.0
_RETRY_SECONDS = 5.0  # until a refused save is due again


@dataclass(frozen=True)
class SaveSchedule:
    """Schedule of saves, besides one every `auto_save_minutes` of the manager.

    Parameters
    ----------
    first_save_minutes : interval of saves while the run is young.
    ending : returns True when the session is about to end, given the seconds until a save is in the workspace (on the
        mount, if there is one); called at every step boundary. The state is then saved once more, and SessionOver ends
        the work.
    clock : monotonic seconds.
    """

    first_save_minutes: float = 2
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
    interval : seconds between two saves of a run that is no longer young.
    schedule : its clock, and the minutes between saves until `interval` has passed since the first one: a new run has
        most to lose.
    """

    def __init__(self, interval: float, schedule: SaveSchedule):
        self._interval, self._clock = interval, schedule.clock
        self._first_interval = min(schedule.first_save_minutes * 60, interval)
        self._first_save: float | None = None
        self._last_save: float | None = None
        self._retry_at = math.inf

    def due_in(self) -> float:
        """Return the seconds until a save is due, 0 when it is; the first is due at once."""
        if self._last_save is None:
            return 0.0
        next_save = self._last_save + self._first_interval
        if self._first_save is not None and next_save >= self._first_save + self._interval:  # no longer young by then
            next_save = self._last_save + self._interval
        return max(0.0, min(next_save, self._retry_at) - self._clock())

    def record_save(self) -> None:
        """Record that a save was handed over now; whether a disk takes it is recorded later."""
        self._last_save, self._retry_at = self._clock(), math.inf

    def record_outcome(self, accepted: bool) -> None:
        """Record whether a disk has taken the save handed over last; one that was refused is due again soon.

        A run without a checkpoint stays young.
        """
        self._retry_at = math.inf if accepted else self._clock() + _RETRY_SECONDS
        if accepted and self._first_save is None:
            self._first_save = self._last_save


def reserved_save_seconds(save_seconds: float) -> float:
    """Return the seconds reserved before a session's end: the last save, three times as slow as forecast, and a
    margin.
    """
    return _MIN_RESERVE + _SAVE_MARGIN * save_seconds
