"""Identity of this process: its rank in a torchrun group, a random id, the kernel that it runs on, and its cores.

Nothing is owned by a host name or a process number: two containers may have the same of both.
"""

import os
from functools import lru_cache
from pathlib import Path


def launched_by_torchrun() -> bool:
    """Return True when torchrun started this process as one of a group."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def process_rank() -> int:
    """Return this process's rank in its torchrun group; 0 without a group."""
    return int(os.environ.get("RANK", 0)) if launched_by_torchrun() else 0


def process_id() -> str:
    """Return the random id of this process, 16 hex digits; a forked child has its own."""
    return _process_id


def machine_cores() -> int:
    """Return the cores of this machine that are for this process: a container's or a batch system's share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores() -> int:
    """Return the cores that this process uses: those of the machine, at most OMP_NUM_THREADS where it is set."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(int(wanted) if wanted.isdecimal() and int(wanted) else machine_cores(), machine_cores())


def wants_bfloat16() -> bool:
    """Return whether XLA_USE_BF16, or as some guides spell it XLA_USEBF16, is 1."""
    return any(os.environ.get(name, "").strip() == "1" for name in ("XLA_USE_BF16", "XLA_USEBF16"))


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of the running kernel since its start, one for all its containers; "" where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _draw_process_id() -> None:
    global _process_id
    _process_id = os.urandom(8).hex()


_draw_process_id()
os.register_at_fork(after_in_child=_draw_process_id)
