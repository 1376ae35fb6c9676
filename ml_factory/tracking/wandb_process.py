"""Processes that communicate with W&B, from the side of the run: the mirror of its log.

The mirror cannot affect the training: it may be absent, hang, break or outlive this process, and it ends by itself when
its parent is gone. What these processes do is in `wandb_sync`. No package is imported here.
"""

import json
import logging
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from ml_factory.background import start_python_process
from ml_factory.errors import WorkspaceError, check_known
from ml_factory.lazy_module import is_package_installed
from ml_factory.redaction import has_wandb_key, redact_secrets, redact_values
from ml_factory.storage.files import files

MODES = ("auto", "offline", "off")
INIT_SECONDS, FINISH_SECONDS = 45.0, 120.0
READY, NO_ANSWER = "ready", "W&B did not answer"  # status of a mirror that has connected, and before
_log = logging.getLogger("ml_factory")
_warned: set[str] = set()  # texts or topics of the warnings logged so far
SERVICE = "W&B"  # topic: warn once per process when W&B is unreachable
_DISABLED = "W&B has failed"
_CHILD = "import sys; from ml_factory.tracking.wandb_sync import run_task; run_task(sys.argv[1], sys.stdin.read())"


class WandbMirrorProcess:
    """The parent's handle of the mirror process. Every method returns at once, or after the seconds it was given."""

    def __init__(self, process: subprocess.Popen, status: Path, end: Path, mode: str):
        self._process, self._status, self._end, self._mode = process, status, end, mode
        self._ended = False

    @classmethod
    def start(cls, mode: str, folder: Path, name: str, spec: dict) -> "WandbMirrorProcess | None":
        """Start the mirror process on the run that `spec` describes, or warn once why it cannot start.

        Parameters
        ----------
        mode : "online" or "offline".
        folder : of W&B's own files, on the local disk.
        name : of this attempt's files there.
        spec : JSON-able description of the run.
        """
        if not is_package_installed("wandb"):
            warn_wandb_once("W&B is not installed: runs are logged locally only (pip install 'ml_factory[track]')")
            return None
        status, end = (folder / f"mirror-{name}.{what}" for what in ("status", "end"))
        spec = {**spec, "mode": mode, "local": str(folder), "parent": os.getpid()}
        spec |= {"init_seconds": INIT_SECONDS, "finish_seconds": FINISH_SECONDS}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            process = start_wandb_process("mirror", {**spec, "status": str(status), "end": str(end)}, folder, mode)
        except OSError as error:
            warn_wandb_once(f"The W&B mirror cannot be started, the run is logged locally: {error.strerror}")
            return None
        return cls(process, status, end, mode)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return True when the mirror has ended well. Warns once if it broke."""
        try:
            code = self._process.wait(seconds) if seconds > 0 else self._process.poll()
        except subprocess.TimeoutExpired:
            return False
        if code and not self._ended:
            disable_wandb(f"The W&B mirror stopped, the local log is complete: {self.status() or code}")
        self._ended = code is not None
        return code == 0

    def status(self) -> str:
        """Return READY, what the mirror waits for (NO_ANSWER until it has connected), or why it ended; "" before it has
        begun.
        """
        with suppress(OSError):
            return self._status.read_text()
        return ""

    def end(self, record: dict, seconds: float) -> None:
        """Report the run's end: a connected mirror gets `seconds` to finish, then continues alone."""
        with suppress(OSError, WorkspaceError):  # without this file the mirror ends with its parent
            files.write(self._end, json.dumps(redact_values(record)).encode())
        connected = self.status() not in ("", NO_ANSWER)
        self.wait(seconds if connected else 0)
        if not self._ended and self._mode == "online" and not connected:
            warn_wandb_once(
                "W&B has not answered yet; the local log is complete, the mirror keeps trying for a while", SERVICE
            )

    def kill(self) -> None:
        """End the mirror, and delete its files."""
        kill_wandb_process(self._process)
        for file in (self._status, self._end):
            file.unlink(missing_ok=True)


def kill_wandb_process(process: subprocess.Popen) -> None:
    """End a process with what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start_wandb_process(task: str, spec: dict, folder: Path, mode: str) -> subprocess.Popen:
    """Start a child process that reads `spec` as JSON from its standard input: W&B silent, its files in `folder`, no
    key where it needs none.
    """
    env = {name: value for name, value in os.environ.items() if mode == "online" or name != "WANDB_API_KEY"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH")]))
    env |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}
    env |= {f"WANDB_{name}_DIR": str(folder / "wandb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    with tempfile.TemporaryFile() as text:  # not a pipe: neither process waits for the other to read
        text.write(json.dumps(redact_values(spec)).encode())
        text.seek(0)
        return start_python_process(["-P", "-c", _CHILD, task], stdin=text, cwd=folder, env=env)


def wandb_mirror_mode(mirror: str) -> str:
    """Return "off", "offline" or "online": the least that the argument, ML_FACTORY_WANDB and WANDB_MODE allow.

    Offline without a key, or once W&B has failed in this process, so that no run waits for it again.
    """
    requested = os.environ.get("ML_FACTORY_WANDB", "").strip().lower() or "auto"
    for where, value in (("mirror", mirror), ("ML_FACTORY_WANDB", requested)):
        check_known("Unknown mirror mode", where, value, MODES)
    wandb_mode = os.environ.get("WANDB_MODE", "").lower()
    if "off" in (mirror, requested) or wandb_mode == "disabled":
        return "off"
    if "offline" in (mirror, requested) or wandb_mode in ("offline", "dryrun"):
        return "offline"
    return "online" if has_wandb_key() and _DISABLED not in _warned else "offline"


def disable_wandb(text: str) -> None:
    """Warn that W&B has failed, and stop waiting for it in this process."""
    warn_wandb_once(text, SERVICE)
    _warned.add(_DISABLED)


def warn_wandb_once(text: str, topic: str = "") -> None:
    """Log a warning, only the first of its text or topic in this process."""
    if (topic or text) not in _warned:
        _warned.add(topic or text)
        _log.warning("%s", redact_secrets(text))
