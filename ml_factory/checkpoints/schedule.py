"""Save schedule: at once, often while a run is young, then every half hour, soon again after a refused save; and the
time reserved for the last save.
"""

import math
import time
from collections.abc import Callable

# Worst ratio of a save's duration to its forecast; the reserve at a session's end is paid once.
_SAVE_MARGIN = 3.0
_MIN_RESERVE = 15.0
_RETRY_SECONDS = 5.0  # until a refused save is due again
_YOUNG_SECONDS = 120.0  # between two saves of a young run, which has most to lose


class SaveTimer:
    """Schedule of one unit of work.

    Parameters
    ----------
    interval : seconds between two saves, once as many have passed since the first one; two minutes until then.
    clock : monotonic seconds.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic):
        self._interval, self._clock, self._began = interval, clock, clock()
        self._first_interval = min(_YOUNG_SECONDS, interval)
        self._first_save: float | None = None
        self._last_save: float | None = None
        self._retry_at = math.inf

    def due_in(self, pause: float = 0.0) -> float:
        """Return the seconds until a save is due, 0 when it is; the first is due at once.

        pause : least seconds after the last save, before the first one after the timer was made.
        """
        if self._last_save is None:
            return max(0.0, self._began + pause - self._clock())
        next_save = self._last_save + self._first_interval
        if self._first_save is not None and next_save >= self._first_save + self._interval:  # no longer young by then
            next_save = self._last_save + self._interval
        return max(0.0, min(max(next_save, self._last_save + pause), self._retry_at) - self._clock())

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
