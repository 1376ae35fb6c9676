"""The feature engine alone: compared with TA-Lib, in window length, and what compiling costs.

    python -m benchmarks.features [--rows 3500000] [--repeats 3] [--only indicators windows compile]

One JSON line a measurement: wall and CPU seconds (the best of the repeats) and the median wall.
  indicators  60 standard indicators that TA-Lib has, made by it (float64, from arrays that are ready) and by two
              families of ours with the same 60 (float32, from the same frame), in turns, each with one and two threads;
              first compared to 1e-6 of each one's deviation, and 1e-5 where TA-Lib's running sums lose digits
  families    ours, a family at a time: nanoseconds a row and a value, one thread
  windows     each window function at 20 to 256 rows: it should cost the same
  compile     a child process with an empty kernel cache: seconds for each family, for all one after the other and for
              all by children on all cores, as `prepare` does; and one with a warm cache: the imports and the first call
              on 5,000 bars
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
from benchmarks.measure import best, digits, in_turns, print_json, seconds, timed, times
from ml_factory.data.resample import ResampledBars, resample_bars
from ml_factory.features import rolling
from ml_factory.features.build import FAMILIES, FeatureSpec, build_features
from ml_factory.features.engine import CHUNK, FeatureEngine, FeatureFamily
from ml_factory.workflows.warm_kernels import warm_up_kernels

PARTS = ("indicators", "families", "windows", "compile")
AHEAD = "by children"
LOOSER = ("std_10", "std_20", "std_50", "var_30", "bands_up_20", "bands_low_20", "correl_30")
UNSTABLE = 2000  # rows after which every recursion has forgotten how it was started
LENGTHS = (20, 32, 64, 128, 256)


def of_families(
    frame: ResampledBars, chosen: dict[str, FeatureFamily], threads: int
) -> tuple[Callable[[], None], list[np.ndarray]]:
    """A call that makes these families' columns of a frame, and the matrices that it writes them into."""
    widths = [len(family.names(MADE_UP, False)) for family in chosen.values()]
    outs = [np.zeros((width, len(frame)), np.float32).T for width in widths]  # columns by themselves, as TA-Lib's

    def call() -> None:
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(FeatureEngine(MADE_UP, {name: family}, coarse=False).push, frame, out)
                for (name, family), out in zip(chosen.items(), outs, strict=True)
            ]
            for job in jobs:
                job.result()

    return call, outs


def indicators(frame: ResampledBars, repeats: int) -> None:
    from benchmarks.peers import sixty  # noqa: PLC0415 - the other parts need no TA-Lib

    listed = sixty.by_talib(frame)
    ours, outs = of_families(frame, sixty.FAMILIES, 2)
    alone, _ = of_families(frame, sixty.FAMILIES, 1)

    def drop(call: Callable[[], object]) -> None:
        call()  # freed at once: its pages serve the next, as ours writes into what is there

    def theirs(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for job in [pool.submit(drop, call) for _, call in listed]:
                job.result()

    ours()
    series = _same(listed, outs, sixty)
    sides = {"ours, 2 threads": ours, "ours, 1 thread": alone}
    sides |= {"TA-Lib, 1 thread": partial(theirs, 1), "TA-Lib, 2 threads": partial(theirs, 2)}
    runs = in_turns(sides, repeats)
    for name, clocks in runs.items():
        line = seconds(clocks) | times(clocks, runs["ours, 2 threads"])
        each = {"ns_per_value": digits(1e9 * best(clocks).wall / len(frame) / series, 3)}
        print_json(bench="indicators", side=name, rows=len(frame), indicators=series, **line, **each)


def _same(listed: list, outs: list[np.ndarray], sixty: object) -> int:
    """Count the indicators once all of them agree; a difference is an AssertionError."""
    made = {}
    for names, families_columns in zip((sixty.TREND, sixty.SPREAD), outs, strict=True):
        made |= dict(zip(names, families_columns.T, strict=True))
    seen, worst = set(), {}
    for names, call in listed:
        results = call() if len(names) > 1 else (call(),)
        for name, result in zip(names, results, strict=True):
            if name:
                want, got = result[UNSTABLE:], made[name][UNSTABLE:].astype(np.float64)
                worst[name] = float(np.max(np.abs(got - want) - 1.2e-7 * np.abs(want))) / want.std()
                allowed = 1e-5 if name in LOOSER else 1e-6
                assert worst[name] <= allowed, f"{name} differs by {worst[name]:.1e} deviations, allowed {allowed}"
                seen.add(name)
    assert seen == set(made), f"not on both sides: {sorted(seen ^ set(made))}"
    name = max(worst, key=worst.get)
    print_json(
        bench="indicators equality", indicators=len(seen), worst={"name": name, "deviations": digits(worst[name], 2)}
    )
    return len(seen)


def families(frame: ResampledBars, repeats: int) -> None:
    for name in FAMILIES:
        call, outs = of_families(frame, {name: FAMILIES[name]}, 1)
        call()
        clocks = in_turns({name: call}, repeats)[name]
        width = outs[0].shape[1]
        row = 1e9 * best(clocks).cpu / len(frame)
        rates = {"cpu_ns_per_row": digits(row), "cpu_ns_per_value": digits(row / width, 3)}
        print_json(bench="families", family=name, rows=len(frame), columns=width, **seconds(clocks), **rates)


def window_lengths(rows: int, repeats: int) -> None:
    """Nanoseconds a row of each window function at each length, a block of CHUNK rows at a time."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, rolling.HISTORY + CHUNK))
    first = rolling.HISTORY
    functions = {
        "sum": lambda n: rolling.rolling_sum(x, n, 0, first),
        "max": lambda n: rolling.rolling_max(x, n, 0, first),
        "std": lambda n: rolling.rolling_std(x, n, 0, first),
        "covariance": lambda n: rolling.rolling_covariance(x, y, n, 0, first),
        "correlation": lambda n: rolling.rolling_correlation(x, y, n, 0, first),
        "bars_since_max": lambda n: rolling.bars_since_rolling_max(x, n, 0, first),
    }
    blocks = max(rows // 10 // CHUNK, 1)

    def many(function: Callable, n: int) -> None:
        for _ in range(blocks):
            function(n)

    for name, function in functions.items():
        function(20)
        runs = in_turns({str(n): partial(many, function, n) for n in LENGTHS}, repeats)
        each = {n: digits(1e9 * best(clocks).cpu / blocks / CHUNK, 3) for n, clocks in runs.items()}
        print_json(
            bench="windows",
            function=name,
            cpu_ns_per_row=each,
            longest_over_shortest=digits(each["256"] / each["20"], 3),
        )


def compiling(options: str) -> None:
    """In a process of its own: the first call of one family, or of all of them with its imports, on 5,000 bars."""
    bars = market_bars(5000)
    names = (options,) if options in FAMILIES else tuple(FAMILIES)
    spec = FeatureSpec(base_minutes=1, frames=(15, 30), families=names)

    def first_call() -> None:
        if options == AHEAD:
            warm_up_kernels(names)
        build_features(bars, MADE_UP, spec)

    _, taken = timed(first_call)
    print(json.dumps({"wall_s": digits(taken.wall, 3), "cpu_s": digits(taken.cpu, 3)}))


def compile_times() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as cache:
            print_json(bench="compile", what=f"{family} alone, empty cache", **_first_call(cache, family))
    with tempfile.TemporaryDirectory() as cache:
        for what in ("all families, empty cache", "all families, warm cache"):
            print_json(bench="compile", what=what, families=len(FAMILIES), **_first_call(cache, "all"))
    with tempfile.TemporaryDirectory() as cache:
        what = "all families, labels and a scaler by children, empty cache"
        print_json(bench="compile", what=what, families=len(FAMILIES), **_first_call(cache, AHEAD))


def _first_call(cache: str, families: str) -> dict[str, float]:
    """Seconds of the first call in a new process, and of the whole process with its imports."""
    command = [sys.executable, "-m", "benchmarks.features", "--compiling", families]
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
    parser.add_argument("--compiling", choices=("all", AHEAD, *FAMILIES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compiling:
        compiling(options.compiling)
        return
    if {"indicators", "families"} & set(options.only):
        frame = resample_bars(market_bars(options.rows), MADE_UP, 1)
        if "indicators" in options.only:
            indicators(frame, options.repeats)
        if "families" in options.only:
            families(frame, options.repeats)
    if "windows" in options.only:
        window_lengths(options.rows, options.repeats)
    if "compile" in options.only:
        compile_times()


if __name__ == "__main__":
    main()
