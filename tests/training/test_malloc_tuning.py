"""Freed memory stays while a training runs, and goes back when it is over."""

import os
import platform
import subprocess
import sys

import pytest

from ml_factory.training import malloc_tuning
from ml_factory.training.device import CudaDevice, Device, XlaDevice
from ml_factory.training.spec import TrainSpec
from tests.training.test_loop import run

usual = platform.libc_ver()[0] == "glibc" and not any("tcmalloc" in os.environ.get(name, "") for name in ["LD_PRELOAD"])
pytestmark = pytest.mark.skipif(not usual, reason="malloc is not glibc's here")

PROGRAM = """
import resource
from pathlib import Path
import numpy as np
from ml_factory.training.malloc_tuning import keep_freed_malloc_memory

MB = 1 << 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def fresh(rounds=8):
    began = faults()
    for _ in range(rounds):
        for size in (70, 40, 70):
            np.ones(size * MB, np.uint8)
    return (faults() - began) / rounds

fresh(2)
outside, before = fresh(), resident()
with keep_freed_malloc_memory():
    with keep_freed_malloc_memory():
        fresh(2)
        inside = fresh()
    nested, held = fresh(), resident()
after, again = resident(), fresh()
print(outside, inside, nested, again, (held - before) // MB, (after - before) // MB)
"""


def reported(**environment: str) -> list[float]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    # NumPy asks for huge pages, of which few are faults.
    run = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(
        run, env={**clean, "NUMPY_MADVISE_HUGEPAGE": "0", **environment}, capture_output=True, text=True, check=True
    ).stdout
    return [float(number) for number in out.split()]


def test_keep_freed_memory_reuses_blocks_inside_and_releases_after():
    outside, inside, nested, again, held, after = reported()
    malloc_tuning = 180 * 2**20 / os.sysconf("SC_PAGE_SIZE")
    assert outside > 0.9 * malloc_tuning and again > 0.5 * malloc_tuning
    assert inside < 0.01 * malloc_tuning and nested < 0.01 * malloc_tuning
    assert held >= 69 and after < 10


def test_keep_freed_memory_with_malloc_variables_set_changes_nothing():
    outside, inside, *_ = reported(MALLOC_ARENA_MAX="2")
    assert inside > 0.9 * outside


def test_fit_on_cpu_keeps_freed_memory_until_end_or_error():
    seen = []
    run(TrainSpec(epochs=2, batch=5), callbacks=[lambda epoch, metrics: seen.append(malloc_tuning._inside)])
    assert seen == [1, 1] and malloc_tuning._inside == 0
    with pytest.raises(ZeroDivisionError):
        run(TrainSpec(epochs=2, batch=5), callbacks=[lambda epoch, metrics: 1 / 0])
    assert malloc_tuning._inside == 0


@pytest.mark.parametrize("kind, inside", [(Device, 1), (CudaDevice, 0), (XlaDevice, 0)])
def test_device_training_keeps_freed_memory_on_cpu_only(kind, inside):
    with kind("any", 1).keep_memory_in_training():
        assert malloc_tuning._inside == inside
