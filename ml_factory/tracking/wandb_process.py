"""The process beside the run that mirrors it: started, looked at, given deadlines, let go.

Nothing it does can reach the training: it may be absent, hang, break or outlive us, and it ends by itself when its
parent is gone. What it says to the service is in `tracking`; here is only how it lives.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import SettingsError, WorkspaceError, did_you_mean
from ml_factory.lazy_module import missing_package
from ml_factory.secrets import has_wandb_key, redact
from ml_factory.storage.atomic_files import write_bytes_atomic

MODES = ("auto", "offline", "off")
INIT_SECONDS, FINISH_SECONDS = 45.0, 120.0
_log = logging.getLogger("ml_factory")
_warned: set[str] = set()  # what was said, or its topic
SERVICE = "W&B"  # one warning of it in a process: nine models on a dead line are one piece of news
_DISABLED = "W&B has failed"
_children: list[subprocess.Popen] = []  # kept so that they are reaped


class MirrorProcess:
    """Our side of it. Every method returns at once, or after the seconds it was given."""

    def __init__(self, process: subprocess.Popen, status: Path, end: Path, mode: str):
        self._process, self._status, self._end, self._mode = process, status, end, mode
        self._checked = time.monotonic()
        self._over = False

    @classmethod
    def start(cls, code: str, mode: str, home: Path, attempt, spec: dict) -> "MirrorProcess | None":
        """Start it on what `spec` tells of the run, or say once why not.

        code : what that Python runs; `spec` comes to it as JSON on standard input.
        mode : "online" or "offline".  home : the run's local folder.
        """
        if not _wandb_installed():
            warn_once("W&B is not installed: runs are recorded locally only (pip install 'ml_factory[track]')")
            return None
        for process in _children:
            process.poll()
        status, end = (home / f"mirror-{attempt.number:04d}-{attempt.session}.{name}" for name in ("status", "end"))
        spec = {**spec, "attempt": list(attempt), "mode": mode, "local": str(home), "parent": os.getpid()}
        spec |= {"init_seconds": INIT_SECONDS, "finish_seconds": FINISH_SECONDS}
        try:
            with tempfile.TemporaryFile() as text:  # not a pipe: nobody ever waits for the other to read
                text.write(redact(json.dumps({**spec, "status": str(status), "end": str(end)})).encode())
                text.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=text,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=home,
                    env=_mirror_environment(mode, home),
                    start_new_session=True,
                )
        except OSError as error:
            warn_once(f"The W&B mirror cannot be started, the run is recorded locally: {error.strerror}")
            return None
        _children.append(process)
        return cls(process, status, end, mode)

    def check(self) -> None:
        """Say once if it broke; looks at most once a second."""
        if not self._over and time.monotonic() - self._checked > 1:
            self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended well within so many seconds."""
        self._checked = time.monotonic()
        try:
            code = self._process.wait(seconds) if seconds > 0 else self._process.poll()
        except subprocess.TimeoutExpired:
            return False
        if code and not self._over:
            with suppress(OSError):
                code = self._status.read_text()
            disable_wandb(f"The W&B mirror stopped, the local record is whole: {code}")
        self._over = code is not None
        return code == 0

    def end(self, record: dict, seconds: float) -> None:
        """The run has ended: once it is connected give it this long to follow, then let it go on alone."""
        with suppress(OSError, WorkspaceError):  # without the mark it ends with its parent
            write_bytes_atomic(self._end, redact(json.dumps(record)).encode())
        self.wait(seconds if self._status.exists() else 0)
        if not self._over and self._mode == "online" and not self._status.exists():
            warn_once("W&B has not answered yet; the local record is whole, the mirror tries on for a while", SERVICE)


def run_wandb_query(code: str, spec: dict, home: Path, seconds: float, mode: str) -> dict:
    """What a child process that talks to W&B answers; it is given so many seconds, and killed then.

    code : what that Python runs; `spec` comes to it as JSON on standard input, its last line of output is the answer.
    home : an existing folder.  mode : "online" or "offline".  Raises WorkspaceError saying why there is no answer.
    """
    if not _wandb_installed():
        raise missing_package("wandb")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=home, env=_mirror_environment(mode, home), start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(json.dumps(spec).encode(), timeout=seconds)
        lines = said.splitlines()
        answer = json.loads(lines[-1]) if lines else {"error": f"the child process ended with {process.returncode}"}
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer in {seconds:g} s"}
    except ValueError:
        answer = {"error": "an answer that is not JSON"}
    finally:
        with suppress(ProcessLookupError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if "error" in answer:
        raise WorkspaceError("W&B does not give it", got=redact(str(answer["error"])))
    return answer


class DeadlineWatchdog:
    """Ends the mirror process, with everything it started, when a deadline passes."""

    def __init__(self, status: Path):
        self._status, self._deadline, self._reason = status, None, ""
        threading.Thread(target=self._watch, daemon=True).start()

    def allow(self, seconds: float | None, reason: str) -> None:
        self._deadline, self._reason = None if seconds is None else time.monotonic() + seconds, reason

    def _watch(self) -> None:
        while True:
            time.sleep(0.2)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._status.write_text(self._reason)
                os.killpg(os.getpgrp(), signal.SIGKILL)


def mirror_mode(mirror: str) -> str:
    """One of "off", "offline" and "online": the least of what the caller, our variable and W&B's own ask for.

    Without a key, or once W&B has failed in this process, nobody is asked to wait for it again: offline.
    """
    asked = os.environ.get("ML_FACTORY_WANDB", "").strip().lower() or "auto"
    for where, value in (("mirror", mirror), ("ML_FACTORY_WANDB", asked)):
        if value not in MODES:
            raise SettingsError("Unknown way to mirror", where=where, got=value, next_step=did_you_mean(value, MODES))
    wandb_mode = os.environ.get("WANDB_MODE", "").lower()
    if "off" in (mirror, asked) or wandb_mode == "disabled":
        return "off"
    if "offline" in (mirror, asked) or wandb_mode in ("offline", "dryrun"):
        return "offline"
    return "online" if has_wandb_key() and _DISABLED not in _warned else "offline"


def _wandb_installed() -> bool:
    """Without importing it. A folder called wandb (W&B leaves such ones) is not the package: it has no origin."""
    try:
        spec = importlib.util.find_spec("wandb")
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _mirror_environment(mode: str, home: Path) -> dict[str, str]:
    """What the mirror process sees: W&B silent and at home in the run's local folder, no key where it needs none."""
    env = {name: value for name, value in os.environ.items() if mode == "online" or name != "WANDB_API_KEY"}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    env |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}
    return env | {f"WANDB_{name}_DIR": str(home / "wandb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}


def disable_wandb(text: str) -> None:
    """W&B has failed: say so, and let nobody wait for it again in this process."""
    warn_once(text, SERVICE)
    _warned.add(_DISABLED)


def warn_once(text: str, topic: str = "") -> None:
    """Log a warning, the first of its text or topic in this process only."""
    if (topic or text) not in _warned:
        _warned.add(topic or text)
        _log.warning("%s", redact(text))
