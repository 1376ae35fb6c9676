"""The feature engine alone: beside TA-Lib, in window length, and what compiling costs.

    python -m benchmarks.features [--rows 3500000] [--repeats 3] [--only indicators windows compile]

One JSON line a measurement: wall and CPU seconds (the best of the repeats) and the median wall.
  indicators  TA-Lib makes 60 standard series out of arrays that are ready: means, sums, deviations, extremes, RSI,
              MACD, ADX and so on. Our 51 columns of momentum and volatility on the base frame are made of as many of
              such series; ours makes all of them from the bars, with the logarithms, ratios and roots on top, and
              stores float32. In turns, each with one thread and with two. `ns_per_series` divides both by 60
  families    ours, a family at a time: nanoseconds a row and a value, one thread
  windows     each window function at 20 to 256 rows: it should cost the same
  compile     a child process with an empty kernel cache: seconds for each family; and one with a warm cache: the
              imports and the first call on 5,000 bars
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from benchmarks.market import MADE_UP, market_bars
from benchmarks.measure import best, digits, in_turns, seconds, tell, times
from ml_factory.data.resample import Frame, base_frame
from ml_factory.features import windows
from ml_factory.features.build import FAMILIES, FeatureSpec, build_features
from ml_factory.features.engine import CHUNK, FrameFeatures

PARTS = ("indicators", "families", "windows", "compile")
SERIES = 60
LENGTHS = (20, 32, 64, 128, 256)


def of_families(frame: Frame, names: tuple[str, ...], threads: int) -> Callable[[], None]:
    """A call that makes these families' columns of a frame, into matrices that are there already."""
    engines = [FrameFeatures(MADE_UP, {name: FAMILIES[name]}, coarse=False) for name in names]
    outs = [np.zeros((len(frame), len(engine.names)), np.float32) for engine in engines]

    def call() -> None:
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(FrameFeatures(MADE_UP, {name: FAMILIES[name]}, coarse=False).push, frame, out)
                for name, out in zip(names, outs, strict=True)
            ]
            for job in jobs:
                job.result()

    return call


def indicators(frame: Frame, repeats: int) -> None:
    from benchmarks.twins import talib_series  # noqa: PLC0415 - the other parts need no TA-Lib

    calls = talib_series.calls(frame)

    def theirs(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for job in [pool.submit(call) for call in calls]:
                job.result()

    columns = ("momentum", "volatility")
    sides = {"ours, 2 threads": of_families(frame, columns, 2), "ours, 1 thread": of_families(frame, columns, 1)}
    sides |= {"TA-Lib, 1 thread": partial(theirs, 1), "TA-Lib, 2 threads": partial(theirs, 2)}
    for call in sides.values():
        call()  # compiled
    runs = in_turns(sides, repeats)
    for name, clocks in runs.items():
        line = seconds(clocks) | times(clocks, runs["ours, 2 threads"])
        each = {"ns_per_series": digits(1e9 * best(clocks).wall / len(frame) / SERIES, 3)}
        tell(bench="indicators", side=name, rows=len(frame), series=SERIES, **line, **each)


def families(frame: Frame, repeats: int) -> None:
    for name in FAMILIES:
        call = of_families(frame, (name,), 1)
        call()
        clocks = in_turns({name: call}, repeats)[name]
        width = len(FrameFeatures(MADE_UP, {name: FAMILIES[name]}, coarse=False).names)
        row = 1e9 * best(clocks).cpu / len(frame)
        rates = {"cpu_ns_per_row": digits(row), "cpu_ns_per_value": digits(row / width, 3)}
        tell(bench="families", family=name, rows=len(frame), columns=width, **seconds(clocks), **rates)


def window_lengths(rows: int, repeats: int) -> None:
    """Nanoseconds a row of each window function at each length, a block of CHUNK rows at a time."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, windows.HISTORY + CHUNK))
    first = windows.HISTORY
    functions = {
        "sum": lambda n: windows.window_sum(x, n, 0, first),
        "max": lambda n: windows.window_max(x, n, 0, first),
        "std": lambda n: windows.window_std(x, n, 0, first),
        "covariance": lambda n: windows.window_covariance(x, y, n, 0, first),
        "correlation": lambda n: windows.window_correlation(x, y, n, 0, first),
        "bars_since_max": lambda n: windows.bars_since_max(x, n, 0, first),
        "rank": lambda n: windows.window_rank(x, n, first),
    }
    blocks = max(rows // 10 // CHUNK, 1)

    def many(function: Callable, n: int) -> None:
        for _ in range(blocks):
            function(n)

    for name, function in functions.items():
        function(20)
        runs = in_turns({str(n): partial(many, function, n) for n in LENGTHS}, repeats)
        each = {n: digits(1e9 * best(clocks).cpu / blocks / CHUNK, 3) for n, clocks in runs.items()}
        tell(
            bench="windows",
            function=name,
            cpu_ns_per_row=each,
            longest_over_shortest=digits(each["256"] / each["20"], 3),
        )


def compiling(family: str | None) -> None:
    """In a process of its own: the first call of one family, or of all of them with its imports, on 5,000 bars."""
    bars = market_bars(5000)
    names = (family,) if family else tuple(FAMILIES)
    began = time.perf_counter()
    build_features(bars, MADE_UP, FeatureSpec(base_minutes=1, frames=(15, 30), families=names))
    print(json.dumps({"seconds": time.perf_counter() - began}))


def compile_times() -> None:
    found = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as cache:
            found[family] = digits(_child(cache, "--compiling", family)[0], 3)
            if family == next(iter(FAMILIES)):
                found[f"{family} again"] = digits(_child(cache, "--compiling", family)[0], 3)
    tell(bench="compile", what="a family alone, empty cache", seconds=found)
    with tempfile.TemporaryDirectory() as cache:
        for what in ("all families, empty cache", "all families, warm cache"):
            first, whole = _child(cache, "--compiling", "all")
            facts = {"first_call_s": digits(first, 3), "with_imports_s": digits(whole, 3)}
            tell(bench="compile", what=what, families=len(FAMILIES), **facts)


def _child(cache: str, *options: str) -> tuple[float, float]:
    """(Seconds of the first call, of the whole process)."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.features", *options]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"NUMBA_CACHE_DIR": cache}
    ).stdout
    return json.loads(told)["seconds"], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--compiling", choices=("all", *FAMILIES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compiling:
        compiling(None if asked.compiling == "all" else asked.compiling)
        return
    if {"indicators", "families"} & set(asked.only):
        frame = base_frame(market_bars(asked.rows), MADE_UP, 1)
        if "indicators" in asked.only:
            indicators(frame, asked.repeats)
        if "families" in asked.only:
            families(frame, asked.repeats)
    if "windows" in asked.only:
        window_lengths(asked.rows, asked.repeats)
    if "compile" in asked.only:
        compile_times()


if __name__ == "__main__":
    main()
