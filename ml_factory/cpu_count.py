"""How many of the machine's cores are ours."""

import os


def cores() -> int:
    """Cores this process may use: a container's or a batch system's share of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
