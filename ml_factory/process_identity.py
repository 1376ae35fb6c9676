"""Identity of this process: its rank in a torchrun group, and its machine since the last boot."""

import os
import socket
from functools import lru_cache
from pathlib import Path


def launched_by_torchrun() -> bool:
    """Return True when torchrun started this process as one of a group."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def process_rank() -> int:
    """Return this process's rank in its torchrun group; 0 without a group."""
    return int(os.environ.get("RANK", 0)) if launched_by_torchrun() else 0


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Return a name for this machine since its last boot, distinct also for machines with equal host names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()
