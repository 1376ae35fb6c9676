"""Hardware that this process may use: CPU cores, an NVIDIA GPU."""

import os
from pathlib import Path


def cores() -> int:
    """Return the cores this process may use: a container's or a batch system's share of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_present(devices: Path = Path("/dev")) -> bool:
    """Return True where this process sees an NVIDIA GPU; no library is loaded for the check."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return first not in ("", "-1") and any(devices.glob("nvidia[0-9]*"))
