"""Kernels compiled ahead on a machine that has none yet: children compile shares of them, whoever needs one loads it.

Numba compiles one kernel at a time in a process, and a Colab machine is always new: one family after the other is more
than a minute of waiting, for one core of two. What is compiled lies in the folder of `ml_factory.compiled`; a mark
there says that a share is complete for this numba and this processor, so that a second `prepare` starts nothing.
"""

import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name

from ml_factory.data.resample import base_frame
from ml_factory.data.sessions import market_for
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.models.contract import cores
from ml_factory.progress import phase
from ml_factory.runs.children import Child, Link, NoAnswer
from ml_factory.runs.ownership import exclusive
from ml_factory.runs.storage import fingerprint
from ml_factory.targets.labels import LabelSpec, triple_barrier

DAYS = 15  # of made-up bars: so many that a scaler of them is the one of large files
PATIENCE = 600.0  # seconds for a share, before whoever waits compiles it where its progress is seen
TARGETS = "targets"  # labels, and the scaler
# The longest first: so the last to end is a short one. Families that are not named follow.
LONGEST = ("volatility", "momentum", "volume", "microstructure", TARGETS, "regime")
_log = logging.getLogger("ml_factory")


def compile_ahead(families: Iterable[str]) -> None:
    """Compile what a data set of these families needs and this machine lacks, on all its cores.

    With one core, or where a single share is lacking, nothing is done: the first call compiles it as well. A child that
    fails stops nobody either: that is said, and the first calls compile what it left.
    """
    folder, wanted = Path(os.environ["NUMBA_CACHE_DIR"]), (*families, TARGETS)
    if cores() < 2 or len(_lacking(folder, wanted)) < 2:
        return
    with exclusive(folder / "ahead.lock"):  # a second process waits here, and finds what the first one made
        lacking = _lacking(folder, wanted)
        with phase("kernels", len(lacking), of="kinds") as done:
            queue = SimpleQueue()
            for share in lacking:
                queue.put(share)
            workers = min(cores(), len(lacking))
            with ThreadPoolExecutor(max(workers, 1)) as pool:
                for work in [pool.submit(_compile_shares, queue, folder, done) for _ in range(workers)]:
                    work.result()


def _lacking(folder: Path, wanted: Iterable[str]) -> list[str]:
    """Shares without a mark, the longest first."""
    lacking = [share for share in wanted if not _mark(folder, share).exists()]
    return sorted(lacking, key=lambda share: LONGEST.index(share) if share in LONGEST else len(LONGEST))


def _mark(folder: Path, share: str) -> Path:
    """Where it is noted that numba finds this share compiled: what it keeps is of one version, and of one processor."""
    whose = [platform.python_version(), numba.__version__, get_host_cpu_name()]
    return folder / f"{share}-{fingerprint(whose)[:12]}.whole"


def _compile_shares(queue: SimpleQueue, folder: Path, done: Callable[[int], None]) -> None:
    """Have a child compile shares until none is left."""
    with closing(Child(__name__, [], "compiling", PATIENCE, paths=[Path(path) for path in sys.path if path])) as child:
        while True:
            try:
                share = queue.get_nowait()
                child.ask({"share": share})
            except Empty:
                return
            except NoAnswer as error:
                _log.warning("Kernels of %s could not be compiled ahead, their first call will: %s", share, error)
            else:
                _mark(folder, share).touch()
            done(1)


# ---------------------------------------------------------------------- in the child


def serve(channel: str, parent: str) -> None:
    """Compile what is asked for until the parent is gone."""

    def answer(request: dict) -> tuple[dict, bytes]:
        compile_share(request["share"])
        return {}, b""

    Link(channel, parent).answer_with(answer)


def compile_share(share: str) -> None:
    """Make the columns of one family, or labels and a scaler, of a few made-up days: numba keeps what it compiled."""
    bars = synthetic_market(SyntheticSpec(days=DAYS)).bars
    market = market_for("DEMO", bars)
    family, frames = ("calendar", (15,)) if share == TARGETS else (share, ())
    matrix = build_features(bars, market, FeatureSpec(base_minutes=1, frames=frames, families=(family,)))
    if share == TARGETS:
        triple_barrier(base_frame(bars, market, 5), matrix.base, LabelSpec(), market)
        RobustScaler.fit(matrix.values, np.arange(len(matrix)))
