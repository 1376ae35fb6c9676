"""Kills of a recipe's command at random moments, until it ends by itself."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

KILLS, EARLIEST, LATEST = 10, 2.0, 9.0  # seconds after the start of the command


def result_after_kills(words: Sequence[str | Path], folder: Path) -> tuple[dict, int]:
    """Run the command again and again, killed with SIGKILL; return its printed result and the number of kills.

    The moments are those of ML_FACTORY_SOAK_SEED. Fewer than ten kills where the command ends before its tenth.
    """
    drawn, kills = random.Random(int(os.environ.get("ML_FACTORY_SOAK_SEED", "0"))), 0
    while True:
        child = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if kills < KILLS:
            try:
                printed, errors = child.communicate(timeout=drawn.uniform(EARLIEST, LATEST))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.communicate()
                kills += 1
                continue
        else:
            printed, errors = child.communicate(timeout=900)
        assert child.returncode == 0, errors.decode()[-2000:]
        return json.loads(printed), kills
