"""Run readings in a child process with limits of time and memory, and say what each cost: `read_with_limits`."""

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS, MEGABYTES = 2.0, 200.0  # what the refusal of a hostile file may cost
_ROOT = Path(__file__).resolve().parents[1]
_SLACK = 3  # the limits of the system end a runaway child; the costs are measured


@dataclass(frozen=True)
class ReadingOutcome:
    """What a reading did: the name and text of its error ("" without one), CPU seconds, and megabytes above idle."""

    error: str
    text: str
    seconds: float
    megabytes: float

    def check_refused(self, *errors: str) -> None:
        """Fail unless the reading raised one of these errors, in one line and within the limits."""
        assert self.error in errors, (self.error, self.text)
        assert self.text and "\n" not in self.text.strip() and len(self.text) < 1500, self.text
        self.check_costs()

    def check_costs(self) -> None:
        assert self.seconds < SECONDS and self.megabytes < MEGABYTES, self


def read_with_limits(reader: str, paths: Iterable[Path], **environment: str) -> list[ReadingOutcome]:
    """Call `reader`, "module:function" or "module:object.method", with each path, in one child.

    Fails where the child ends without an answer: by a signal, or after 60 s.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.limited_reading", reader, *map(str, paths)], cwd=_ROOT, text=True,
        capture_output=True, timeout=60, check=False, env={**os.environ, "ML_FACTORY_WANDB": "off", **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    return [ReadingOutcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"error"')]


def _read(call, path: Path) -> ReadingOutcome:
    reset_peak_memory()
    began, idle, error, text = time.process_time(), peak_megabytes(), "", ""
    resource.setrlimit(resource.RLIMIT_CPU, (int(began + _SLACK * SECONDS) + 1, resource.RLIM_INFINITY))
    try:
        call(path)
    except Exception as caught:  # noqa: BLE001 - the caller decides which is right
        error, text = type(caught).__name__, str(caught)
    return ReadingOutcome(error, text, time.process_time() - began, peak_megabytes() - idle)


def reset_peak_memory() -> None:
    """Let the peak begin again at what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    return status_kilobytes("VmHWM") / 1024


def status_kilobytes(field: str) -> int:
    """Return a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def _main(reader: str, *paths: str) -> None:
    module, _, name = reader.partition(":")
    call = importlib.import_module(module)
    for part in name.split("."):
        call = getattr(call, part)
    most = status_kilobytes("VmSize") * 1024 + int(_SLACK * MEGABYTES * (1 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for path in paths:
        print(json.dumps(asdict(_read(call, Path(path)))), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
