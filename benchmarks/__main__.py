"""Run benchmarks one after the other, and print a table of the lines of each.

python -m benchmarks pipeline boosters [-- --rows 500000]    # make bench BENCH="pipeline boosters"
"""

import json
import subprocess
import sys
from contextlib import suppress

import pandas as pd


def main() -> int:
    """Return the exit code of the first benchmark that fails, else 0."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    lines = []
    for name in words[:at]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *words[at + 1 :]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                with suppress(ValueError):
                    lines.append(json.loads(line))
        if process.returncode:
            return process.returncode
    for bench, part in pd.DataFrame(lines, columns=None if lines else ["bench"]).groupby("bench", sort=False):
        shown = part.drop(columns="bench").dropna(axis=1, how="all")
        print(f"\n{bench}\n{shown.to_string(index=False, na_rep='')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
