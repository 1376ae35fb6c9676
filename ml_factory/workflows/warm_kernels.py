"""Compile numba kernels ahead on a new machine: worker processes compile shares of them in parallel.

Numba compiles one kernel at a time per process, and a Colab machine is always new: compiling in sequence is more than a
minute of waiting on one of two cores. Compiled kernels are in the folder of `ml_factory.numba_cache`; a marker file
there records that a share is complete for this numba and this processor, so that a second `prepare` compiles nothing.
"""

import logging
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name
from numba.core import caching

from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import resolve_market_spec
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.hardware import cores
from ml_factory.numba_cache import numba_source_files
from ml_factory.progress import progress_phase
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.worker_process import WorkerParentConnection, WorkerProcess, WorkerUnavailableError
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels

DAYS = 15  # of synthetic bars, enough for the scaler of large files
PATIENCE = 600.0  # seconds for a share, then the main process compiles it
TARGETS = "targets"  # labels and the scaler
# The longest first, so that the last to end is a short one. Other families follow.
LONGEST = ("volatility", "momentum", "volume", "microstructure", TARGETS, "regime")
_log = logging.getLogger("ml_factory")


def warm_up_kernels(families: Iterable[str]) -> None:
    """Compile the missing kernels of these feature families on all cores.

    With one core, or one missing share, nothing is done: the first call compiles it as well. A worker that fails is
    logged, and the first calls compile the rest.
    """
    folder, wanted = Path(os.environ["NUMBA_CACHE_DIR"]), (*families, TARGETS)
    missing = _missing_shares(folder, wanted)
    if cores() < 2 or len(missing) < 2:
        return
    # A second process waits for the lock, and finds what the first one made.
    with progress_phase("kernels", len(missing), of="kinds") as done, file_lock(folder / "ahead.lock"):
        if lacking := _missing_shares(folder, wanted):
            _compile_in_workers(deque(lacking), folder, done)


def _missing_shares(folder: Path, wanted: Iterable[str]) -> list[str]:
    """Return the shares without a marker file, the longest first."""
    lacking = [share for share in wanted if not _mark(folder, share).exists()]
    return sorted(lacking, key=lambda share: LONGEST.index(share) if share in LONGEST else len(LONGEST))


def _mark(folder: Path, share: str) -> Path:
    """Return the marker file of a complete share, for this Python, numba, processor and checkout.

    Numba finds a compiled kernel by the path and the time of its source file: another checkout compiles its own.
    """
    whose = [platform.python_version(), numba.__version__, get_host_cpu_name()]
    sources = [[str(path), path.stat().st_mtime_ns] for path in numba_source_files()]
    return folder / f"{share}-{fingerprint_json([*whose, *sources])[:12]}.whole"


def _compile_in_workers(shares: deque[str], folder: Path, done: Callable[[int], None]) -> None:
    """Compile shares in one worker per core until none is left; an interrupt waits for none."""
    where, workers = [path for path in sys.path if path], min(cores(), len(shares))
    children = [WorkerProcess(__name__, [folder], "compiling", PATIENCE, where) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        try:
            for work in [pool.submit(_compile, child, shares, folder, done) for child in children]:
                work.result()
        finally:
            shares.clear()
            for child in children:
                child.close()


def _compile(child: WorkerProcess, shares: deque[str], folder: Path, done: Callable[[int], None]) -> None:
    while True:
        try:
            share = shares.popleft()
        except IndexError:
            return
        try:
            child.call(share)
        except WorkerUnavailableError as error:
            _log.warning("Kernels of %s could not be compiled ahead, their first call will: %s", share, error)
        else:
            _mark(folder, share).touch()
        done(1)


# ---------------------------------------------------------------------- in the child


def serve(channel: str, parent: str, folder: str) -> None:
    """Compile what is asked for until the parent is gone."""
    _save_one_at_a_time(Path(folder) / "save.lock")

    WorkerParentConnection(channel, parent).answer_requests(warm_up_kernel_share)


def _save_one_at_a_time(lock: Path) -> None:
    """Serialise numba's writes to its cache index.

    Numba reads a function's index, picks a file for a new kernel and writes both, all without a lock: two processes
    could pick the same file.
    """
    save = caching.IndexDataCacheFile.save

    def alone(files: caching.IndexDataCacheFile, key: object, data: object) -> None:
        with file_lock(lock):
            save(files, key, data)

    caching.IndexDataCacheFile.save = alone


def warm_up_kernel_share(share: str) -> None:
    """Compile one family's kernels, or those of labels and a scaler, by running them on a few synthetic days."""
    bars = synthetic_market(SyntheticSpec(days=DAYS)).bars
    market = resolve_market_spec("DEMO", bars)
    family, frames = ("calendar", (15,)) if share == TARGETS else (share, ())
    matrix = build_features(bars, market, FeatureSpec(base_minutes=1, frames=frames, families=(family,)))
    if share == TARGETS:
        triple_barrier_labels(resample_bars(bars, market, 5), matrix.base, LabelSpec(), market)
        RobustScaler.fit(matrix.values, np.arange(len(matrix)))
