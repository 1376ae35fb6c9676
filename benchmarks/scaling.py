"""Independent trainings as units of a sweep on every core, against as many bare processes.

    python -m benchmarks.scaling [--units 4] [--rounds 4000] [--repeats 1]

Each side trains LightGBM on DEMO with other seeds, one thread a training, in a workspace of its own: `distribute` with
Ray's start and end, and for each core one process that trains its share one after another. Target: the sweep does at
least .95 of the bare processes' work a second, where a unit takes minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import digits, in_turns, median_ratio, print_json, seconds
from ml_factory import pipeline
from ml_factory.process_identity import cores
from ml_factory.storage.workspace import Workspace

LEAST = 0.95
BARE = """
import json, sys
from ml_factory import pipeline
for seed in json.loads(sys.argv[3]):
    pipeline.train(sys.argv[1], "DEMO", 20, "lightgbm", model_settings=json.loads(sys.argv[2]), seed=seed)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=1)
    given, count = parser.parse_args(), cores()
    own = {"rounds": given.rounds, "patience": 0}  # each unit has the same work
    os.environ |= {"ML_FACTORY_WANDB": "off"}
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        prepared, copies = Path(folder, "prepared"), iter(range(1000))
        pipeline.prepare(Workspace(prepared), "DEMO", (20,))

        def copied() -> str:
            return str(shutil.copytree(prepared, Path(folder, str(next(copies)))))

        def bare() -> None:
            place = copied()
            shares = [list(range(first, given.units, count)) for first in range(count)]
            started = [
                subprocess.Popen([sys.executable, "-c", BARE, place, json.dumps(own), json.dumps(share)], env=alone)
                for share in shares
            ]
            codes = [process.wait() for process in started]
            assert not any(codes)

        def sweep() -> None:
            place, file = copied(), Path(folder, "sweep.yaml")
            units = {"symbols": ["DEMO"], "horizons": [20], "models": {"lightgbm": own}, "seeds": [*range(given.units)]}
            file.write_text(json.dumps(units | {"make": ["train"]}))  # JSON is YAML
            words = [sys.executable, "-m", "ml_factory", "distribute", str(file), "--workspace", place]
            subprocess.run(words, check=True, capture_output=True)

        runs = in_turns({"bare processes": bare, "sweep": sweep}, given.repeats)
    share = median_ratio(runs["bare processes"], runs["sweep"])
    for name, taken in runs.items():
        print_json(bench="scaling", side=name, units=given.units, cores=count, **seconds(taken))
    print_json(bench="scaling", side="sweep", share_of_bare=digits(share, 3), wanted=f"at least {LEAST}")


if __name__ == "__main__":
    main()
