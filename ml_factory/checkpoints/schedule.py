"""When to save: at once, often while a run is young, then every half hour, soon again after a refused save, and before
the session ends. A Colab runtime ends a fixed time after the runtime's start, not the notebook's.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_factory.errors import SettingsError, check_known
from ml_factory.storage.workspace import on_colab

# Worst ratio of a save's duration to its forecast; the reserve at a session's end is paid once.
_SAVE_MARGIN = 3.0
_MIN_RESERVE = 15.0
_RETRY_SECONDS = 5.0  # until a refused save is due again
_YOUNG_SECONDS = 120.0  # between two saves of a young run, which has most to lose
FREE_TPU_HOURS = 1.5  # that a free session with a TPU usually lives
# Hours a runtime may live at most, by tier; Colab promises none of them, so they are upper bounds.
TIER_HOURS = {"free": 12.0, "pro": 24.0, "pro+": 24.0, "enterprise": 24.0}


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


@functools.cache
def runtime_start_time(proc: Path = Path("/proc")) -> float:
    """Return the start of this runtime (its process 1), seconds since 1970; the current time where /proc is not
    readable.
    """
    try:
        stat = (proc / "1" / "stat").read_text()
        boot_line = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        # The command's name, in brackets, may hold spaces; field 22 is counted from behind it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot_line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return time.time()


def configured_hours_remaining(tier: str | None = None, limit_hours: float | None = None) -> float:
    """Return the hours until this runtime may be ended at the latest; infinite off Colab without a limit.

    Parameters
    ----------
    tier : a key of TIER_HOURS; by default $ML_FACTORY_COLAB_TIER, else "free". A runtime that outlived its tier's limit
        belongs to a larger one; one that outlived all has no end in sight.
    limit_hours : overrides the tier, and counts off Colab too; by default $ML_FACTORY_SESSION_HOURS.

    Raises SettingsError for an unknown tier.
    """
    given = limit_hours if limit_hours is not None else os.environ.get("ML_FACTORY_SESSION_HOURS") or None
    tier = str(tier or os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower()
    if given is None:
        check_known("Unknown Colab tier", "tier, or ML_FACTORY_COLAB_TIER", tier, TIER_HOURS)
        if not on_colab():
            return math.inf
    lived = (time.time() - runtime_start_time()) / 3600
    longer = (hours for hours in TIER_HOURS.values() if hours >= TIER_HOURS[tier] and hours > lived)
    if given is None:
        limit = min(longer, default=math.inf)
    else:
        limit = _number(
            given, "limit_hours, or ML_FACTORY_SESSION_HOURS", "hours above 0, such as 12", lambda hours: hours > 0
        )
    return max(0.0, limit - lived)


def is_session_ending(save_seconds: float) -> bool:
    """Return True when only the time for the last save is left. Cheap: called at every step."""
    return configured_hours_remaining() * 3600 < reserved_save_seconds(save_seconds)


def is_free_tpu_session() -> bool:
    """Return True on a TPU runtime of Colab's free tier."""
    tpu = os.environ.get("COLAB_TPU_1VM") == "1" or bool(os.environ.get("TPU_ACCELERATOR_TYPE"))
    return tpu and str(os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower() == "free"


def expected_hours_left() -> float:
    """Return the hours that work should be planned for: the configured ones; on a free TPU at most a session's usual
    life.
    """
    return min(configured_hours_remaining(), FREE_TPU_HOURS if is_free_tpu_session() else math.inf)


def checkpoint_minutes_from_environment() -> float:
    """Return the minutes between two checkpoints: 30, overridden by ML_FACTORY_SAVE_MINUTES.

    0 saves after every epoch or booster block: for a machine that may vanish at any moment, and for tests.
    """
    text = os.environ.get("ML_FACTORY_SAVE_MINUTES", "").strip() or "30"
    return _number(
        text, "ML_FACTORY_SAVE_MINUTES", "minutes, 0 or more, such as 10", lambda minutes: 0 <= minutes < math.inf
    )


def _number(value: Any, where: str, wanted: str, fits: Callable[[float], bool]) -> float:
    """Return a number that fits. Raises SettingsError for any other text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not fits(number):
        raise SettingsError(
            "This time cannot be used", where=where, got=repr(value), wanted=wanted, next_step="set it, or leave it out"
        )
    return number
