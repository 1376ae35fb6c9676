"""What bars that were appended cost beside a prepare of them all, in CPU seconds.

    python -m benchmarks.appending --file ../shared/data/bars/NQ_1m.parquet --symbol NQ

Each line of JSON is one share of new bars: a full prepare of the file without them, the prepare that finds them
appended, and what of it is the proof of the new part. Busy machines stretch wall time; CPU time hardly.
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
from ml_factory.runs.workspace import Workspace


def cpu_of(place: Workspace, symbol: str, bars: pd.DataFrame, horizons: tuple[int, ...]) -> tuple[float, dict]:
    """CPU seconds of a prepare of these bars, and its phases' wall seconds."""
    bars.to_parquet(place.raw_bars(symbol), index=False)
    started = time.process_time()
    result = pipeline.prepare(place, symbol, horizons)
    return time.process_time() - started, result.phases["seconds"].round(3).to_dict()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--file", required=True, type=Path)
    words.add_argument("--symbol", required=True)
    words.add_argument("--horizons", default="20")
    words.add_argument("--shares", default="0.01,0.001")
    asked = words.parse_args()
    horizons = tuple(int(one) for one in asked.horizons.split(","))
    logging.disable(logging.WARNING)
    bars = pd.read_parquet(asked.file)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no copies of parts beside the user's own
        for share in map(float, asked.shares.split(",")):
            place = Workspace(Path(folder) / f"{share}")
            cpu_of(place, asked.symbol, bars.iloc[:20_000], horizons)  # kernels are loaded
            cpu_of(place, asked.symbol, bars.iloc[:21_000], horizons)
            stop = len(bars) - round(len(bars) * share)
            full, _ = cpu_of(place, asked.symbol, bars.iloc[:stop], horizons)
            appended, phases = cpu_of(place, asked.symbol, bars, horizons)
            told = {
                "bench": "appending",
                "bars": len(bars),
                "new": len(bars) - stop,
                "full_cpu_s": full,
                "appended_cpu_s": appended,
            }
            print(json.dumps(told | {"ratio": full / appended, "phases_wall_s": phases}), flush=True)


if __name__ == "__main__":
    main()
