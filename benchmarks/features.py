"""The feature engine alone: nanoseconds a row of each family, and what compiling costs.

    python -m benchmarks.features [--rows 3500000] [--repeats 3] [--only families compile]

One JSON line a measurement: wall and CPU seconds (the best of the repeats) and the median wall.
  families  a family at a time on the base frame, and then bar by bar, as a feed brings them
  compile   a child process with an empty kernel cache, and then with a warm one: the imports and the first call of all
            families on 5,000 bars
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks.market import MADE_UP, market_bars
from benchmarks.measure import best, digits, in_turns, print_json, seconds, timed
from ml_factory.data.resample import ResampledBars, resample_bars
from ml_factory.features.build import FAMILIES, FeatureSpec, build_features
from ml_factory.features.engine import FeatureEngine

PARTS = ("families", "compile")
FED = 1000  # bars that are pushed singly


def families(frame: ResampledBars, repeats: int) -> None:
    """Nanoseconds a row and a value of each family over the whole frame, and microseconds of a single bar."""
    for name, family in FAMILIES.items():
        engine = FeatureEngine(MADE_UP, {name: family}, coarse=False)
        out = np.empty((len(frame), len(engine.names)), np.float32)

        def push(engine: FeatureEngine = engine, out: np.ndarray = out) -> None:
            engine.push(frame, out)

        def feed(engine: FeatureEngine = engine) -> None:
            for row in range(min(FED, len(frame))):
                engine.push(frame.part(row, row + 1))

        push()
        clocks = in_turns({"whole": push, "fed": feed}, repeats)
        row = 1e9 * best(clocks["whole"]).cpu / len(frame)
        rates = {"cpu_ns_per_row": digits(row), "cpu_ns_per_value": digits(row / out.shape[1], 3)}
        rates["cpu_us_per_fed_bar"] = digits(1e6 * best(clocks["fed"]).cpu / min(FED, len(frame)), 3)
        columns = {"rows": len(frame), "columns": out.shape[1]}
        print_json(bench="families", family=name, **columns, **seconds(clocks["whole"]), **rates)


def compiling() -> None:
    """In a process of its own: the first call of all families, with its imports, on 5,000 bars."""

    def first_call() -> None:
        build_features(market_bars(5000), MADE_UP, FeatureSpec(base_minutes=1, frames=(15, 30)))

    _, taken = timed(first_call)
    print(json.dumps({"wall_s": digits(taken.wall, 3), "cpu_s": digits(taken.cpu, 3)}))


def compile_times() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for what in ("empty cache", "warm cache"):
            print_json(bench="compile", what=what, **_first_call(cache))


def _first_call(cache: str) -> dict[str, float]:
    """Seconds of the first call in a new process, and of the whole process with its imports."""
    command = [sys.executable, "-m", "benchmarks.features", "--compiling"]
    began = time.perf_counter()
    printed = subprocess.check_output(command, text=True, env=os.environ | {"NUMBA_CACHE_DIR": cache})
    return {f"first_call_{clock}": value for clock, value in json.loads(printed).items()} | {
        "whole_process_s": digits(time.perf_counter() - began, 3)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compiling:
        compiling()
        return
    if "families" in options.only:
        families(resample_bars(market_bars(options.rows), MADE_UP, 5), options.repeats)
    if "compile" in options.only:
        compile_times()


if __name__ == "__main__":
    main()
