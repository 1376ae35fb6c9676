"""Run benchmarks one after the other; print a table of the lines of each, then one of all ratios to peers.

python -m benchmarks pipeline boosters [-- --rows 500000]    # make bench BENCH="pipeline boosters"

A line's ratios are its numbers whose names have the word `times`, `by`, `share` or `overhead`.
"""

import json
import re
import subprocess
import sys
from contextlib import suppress

import pandas as pd

RATIO = re.compile(r"(^|_)(times|by|share|overhead)(_|$)")


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
    print("\nratios")
    for line in lines:
        about = " ".join(str(value) for name, value in line.items() if isinstance(value, str) and name != "wanted")
        for name, value in line.items():
            if RATIO.search(name):
                print(f"{about:60} {name:24} {value}  {line.get('wanted', line.get('limit', ''))}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
