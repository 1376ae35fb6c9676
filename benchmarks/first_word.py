"""CPU seconds (user and system, with children) until a command has answered before its own work begins.

    python -m benchmarks.first_word

Runs --help of the program and of every verb, and one wrong argument of each kind, three times each; prints the median,
and first that of a Python that imports NumPy alone.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.measure import digits, print_json
from tests.contract.doors import verbs

LIMIT = 2.0
WRONG = (
    ("no-such-verb",),
    ("train", "--model", "xgbost"),
    ("train", "--horizon", "0"),
    ("train", "--symbol", "BTC/USDT"),
    ("prepare", "--symbol", "MES", "--data", "none.csv"),
    ("suite", "--symbol", "MES", "--data", "none.csv"),
    ("export-data", "--source", "host/db", "--output", "a.csv"),
    ("export-data", "--source", "postgresql://user@host/db", "--output", "a.csv", "--symbol", "MES'"),
    ("prepare", "--symbol", "MES"),
    ("train", "--symbol", "MES"),
    ("predict", "--symbol", "MES"),
    ("serve", "none.bundle"),
    ("audit",),
    ("run", "99"),
    ("run", "02", "-p", "HORIZ=3"),
)


def cpu_seconds(words: Sequence[str], folder: str) -> float:
    """CPU seconds of Python with these words, whatever its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "ML_FACTORY_ROOT": folder}
    subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    commands = [("-c", "import numpy")]
    commands += [
        ("-m", "ml_factory", *words) for words in (("--help",), *((verb, "--help") for verb in verbs()), *WRONG)
    ]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for words in commands:
            seconds = statistics.median(cpu_seconds(words, folder) for _ in range(3))
            worst = max(worst, seconds)
            print_json(bench="first_word", cpu_s=digits(seconds, 3), command=f"python {' '.join(words)}")
    print_json(bench="first_word", cpu_s=digits(worst, 3), command="most", wanted=f"under {LIMIT:.0f} s")


if __name__ == "__main__":
    main()
