"""Shared functions of the benchmarks: interleaved timing, peak memory, one JSON line a measurement."""

import importlib
import json
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple


class Taken(NamedTuple):
    """Seconds of one run, or the best of several (each clock by itself); `cpu` counts all threads."""

    wall: float
    cpu: float


def timed(call: Callable[[], object]) -> tuple[object, Taken]:
    """Return the result of the call, and the time it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, Taken(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[Taken]]:
    """`repeats` rounds, each side once a round: whatever else the machine does, it does to all of them."""
    runs: dict[str, list[Taken]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            result, taken = timed(call)
            runs[name].append(taken)
            del result  # outside the clock
    return runs


def best(runs: list[Taken]) -> Taken:
    return Taken(min(run.wall for run in runs), min(run.cpu for run in runs))


def median_wall(runs: list[Taken]) -> float:
    return statistics.median(run.wall for run in runs)


def seconds(runs: list[Taken]) -> dict[str, float]:
    """Return the timing fields of a line."""
    least = best(runs)
    return {"wall_s": digits(least.wall), "median_wall_s": digits(median_wall(runs)), "cpu_s": digits(least.cpu)}


def rated(runs: list[Taken], rows: int) -> dict[str, float]:
    """`seconds`, and rows a second."""
    return seconds(runs) | {"rows_per_s": round(rows / best(runs).wall)}


def times(runs: list[Taken], of: list[Taken]) -> dict[str, float]:
    """Return the ratios to `of`: best and median wall time, best CPU time."""
    one, other = best(runs), best(of)
    return {
        "times_ours_wall": digits(one.wall / other.wall, 3),
        "times_ours_median": digits(median_wall(runs) / median_wall(of), 3),
        "times_ours_cpu": digits(one.cpu / max(other.cpu, 1e-9), 3),
    }


def median_ratio(runs: list[Taken], of: list[Taken], clock: str = "wall") -> float:
    """Return the median of the ratios to `of` in each round: the machine's state in a round affects both."""
    pairs = zip(runs, of, strict=True)
    return statistics.median(getattr(one, clock) / max(getattr(other, clock), 1e-9) for one, other in pairs)


def digits(number: float, count: int = 4) -> float:
    return float(f"{number:.{count}g}")


def print_json(**facts) -> None:
    print(json.dumps(facts), flush=True)


def setting(pair: str) -> tuple[str, object]:
    """NAME=VALUE of a command line, the value as JSON, or else text."""
    name, _, value = pair.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextmanager
def peak_memory():
    """Yields a dict; afterwards its "bytes" are the most resident memory the process was seen to hold inside."""
    # On demand: the environments of peers and of XLA, which measure time alone, do not have it.
    process = importlib.import_module("psutil").Process()
    done, found = threading.Event(), {"bytes": 0}

    def watch() -> None:
        while not done.is_set():
            found["bytes"] = max(found["bytes"], process.memory_info().rss)
            done.wait(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
        found["bytes"] = max(found["bytes"], process.memory_info().rss)
