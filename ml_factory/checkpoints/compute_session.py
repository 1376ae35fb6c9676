"""Remaining time of this session: a Colab runtime ends a fixed time after the runtime's start, not the notebook's."""

import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from ml_factory.checkpoints.schedule import reserved_save_seconds
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.storage.workspace import on_colab

FREE_TPU_HOURS = 1.5  # that a free session with a TPU usually lives
# Hours a runtime may live at most, by tier; Colab promises none of them, so they are upper bounds.
TIER_HOURS = {"free": 12.0, "pro": 24.0, "pro+": 24.0, "enterprise": 24.0}


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


@functools.cache
def _read_once(start_time: Callable[[], float]) -> float:
    return start_time()


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
    if given is None and tier not in TIER_HOURS:
        raise SettingsError(
            "Unknown Colab tier",
            where="tier, or ML_FACTORY_COLAB_TIER",
            got=repr(tier),
            next_step=did_you_mean(tier, TIER_HOURS),
        )
    if given is None and not on_colab():
        return math.inf
    lived = (time.time() - _read_once(runtime_start_time)) / 3600
    longer = (hours for hours in TIER_HOURS.values() if hours >= TIER_HOURS[tier] and hours > lived)
    limit = min(longer, default=math.inf) if given is None else _positive_hours(given)
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


def _positive_hours(value: object) -> float:
    try:
        hours = float(value)
    except (TypeError, ValueError):
        hours = math.nan
    if not hours > 0:
        raise SettingsError(
            "Not a length of a session", where="limit_hours, or ML_FACTORY_SESSION_HOURS", got=repr(value),
            wanted="hours above 0, such as 12",
        )  # fmt: skip
    return hours
