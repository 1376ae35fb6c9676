"""Hardware that this process may use: CPU cores."""

import os


def cores() -> int:
    """Return the cores this process may use: a container's or a batch system's share of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
