"""Cost of appended bars compared with a prepare of all bars, in CPU seconds.

    python -m benchmarks.appending --file ../shared/data/bars/NQ_1m.parquet --symbol NQ

Each line of JSON is one number of new bars: a full prepare of the file without them, the prepare that finds them
appended, and the seconds of its phases. Busy machines stretch wall time; CPU time less.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path

import pandas as pd

from ml_factory import pipeline
from ml_factory.storage.workspace import Workspace


def seconds_of(
    place: Workspace, symbol: str, bars: pd.DataFrame, horizons: tuple[int, ...]
) -> tuple[float, float, dict]:
    """CPU and wall seconds of a prepare of these bars, and its phases' wall seconds."""
    bars.to_parquet(place.raw_bars(symbol), index=False)
    cpu, wall = time.process_time(), time.perf_counter()
    result = pipeline.prepare(place, symbol, horizons)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return round(cpu, 4), round(wall, 4), result.phases["seconds"].round(3).to_dict()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--file", required=True, type=Path)
    words.add_argument("--symbol", required=True)
    words.add_argument("--horizons", default="20")
    words.add_argument("--new", default="70000,7000,1380,60,1", help="numbers of new bars; 1380 are a day of CME")
    options = words.parse_args()
    horizons = tuple(int(one) for one in options.horizons.split(","))
    logging.disable(logging.WARNING)
    bars = pd.read_parquet(options.file)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no copies of parts beside the user's own
        for new in map(int, options.new.split(",")):
            place = Workspace(Path(folder) / f"{new}")
            seconds_of(place, options.symbol, bars.iloc[:20_000], horizons)  # kernels are loaded
            seconds_of(place, options.symbol, bars.iloc[:21_000], horizons)
            full_cpu, full_wall, _ = seconds_of(place, options.symbol, bars.iloc[: len(bars) - new], horizons)
            cpu, wall, phases = seconds_of(place, options.symbol, bars, horizons)
            reported = {
                "bench": "appending",
                "bars": len(bars),
                "new": new,
                "full_cpu_s": full_cpu,
                "appended_cpu_s": cpu,
            }
            reported |= {"full_wall_s": full_wall, "appended_wall_s": wall, "ratio": round(full_cpu / cpu, 2)}
            print(json.dumps(reported | {"phases_wall_s": phases}), flush=True)


if __name__ == "__main__":
    main()
