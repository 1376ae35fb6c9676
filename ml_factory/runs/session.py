"""What is left of this session: a Colab runtime ends a fixed time after it began, not after the notebook began."""

import math
import os
import time
from pathlib import Path

from ml_factory.runs.workspace import on_colab

# Hours a runtime may live at most, by tier; Colab promises none of them, so they are upper bounds.
TIER_HOURS = {"free": 12.0, "pro": 24.0, "pro+": 24.0, "enterprise": 24.0}


def runtime_started(proc: Path = Path("/proc")) -> float:
    """When this runtime (its process 1) began, in seconds since 1970; this very moment where /proc does not tell."""
    try:
        stat = (proc / "1" / "stat").read_text()
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        # The command's name, in brackets, may hold spaces; field 22 is counted from behind it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return time.time()


def hours_remaining(tier: str = "free", limit_hours: float | None = None, now: float | None = None) -> float:
    """Hours until this runtime may be taken away at the latest; infinite off Colab without a limit given.

    tier : a key of TIER_HOURS; an unknown one counts as free.  limit_hours : overrides the tier.
    now : seconds since 1970, for tests.
    """
    if limit_hours is None:
        if not on_colab():
            return math.inf
        limit_hours = TIER_HOURS.get(tier, TIER_HOURS["free"])
    lived = (time.time() if now is None else now) - runtime_started()
    return max(0.0, limit_hours - lived / 3600)
