"""Processes that communicate with W&B, from the side of the run: the mirror of its log, and queries with a deadline.

The mirror cannot affect the training: it may be absent, hang, break or outlive this process, and it ends by itself when
its parent is gone. What these processes do is in `wandb_sync`.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ml_factory.background import start_python_process
from ml_factory.errors import SettingsError, WorkspaceError, did_you_mean
from ml_factory.lazy_module import missing_package_error
from ml_factory.redaction import has_wandb_key, redact_secrets, redact_values
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

MODES = ("auto", "offline", "off")
INIT_SECONDS, FINISH_SECONDS = 45.0, 120.0
_log = logging.getLogger("ml_factory")
_warned: set[str] = set()  # texts or topics of the warnings logged so far
SERVICE = "W&B"  # topic: warn once per process when W&B is unreachable
_DISABLED = "W&B has failed"
_CHILD = "import sys; from ml_factory.tracking.wandb_sync import run_task; run_task(sys.argv[1], sys.stdin.read())"


class WandbMirrorProcess:
    """The parent's handle of the mirror process. Every method returns at once, or after the seconds it was given."""

    def __init__(self, process: subprocess.Popen, status: Path, end: Path, mode: str):
        self._process, self._status, self._end, self._mode = process, status, end, mode
        self._checked = time.monotonic()
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
        if not _wandb_installed():
            warn_wandb_once("W&B is not installed: runs are logged locally only (pip install 'ml_factory[track]')")
            return None
        status, end = (folder / f"mirror-{name}.{what}" for what in ("status", "end"))
        spec = {**spec, "mode": mode, "local": str(folder), "parent": os.getpid()}
        spec |= {"init_seconds": INIT_SECONDS, "finish_seconds": FINISH_SECONDS}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            process = _start("mirror", {**spec, "status": str(status), "end": str(end)}, folder, mode)
        except OSError as error:
            warn_wandb_once(f"The W&B mirror cannot be started, the run is logged locally: {error.strerror}")
            return None
        return cls(process, status, end, mode)

    def check(self) -> None:
        """Warn once if the mirror broke; looks at most once a second."""
        if not self._ended and time.monotonic() - self._checked > 1:
            self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return True when the mirror has ended well."""
        self._checked = time.monotonic()
        try:
            code = self._process.wait(seconds) if seconds > 0 else self._process.poll()
        except subprocess.TimeoutExpired:
            return False
        if code and not self._ended:
            with suppress(OSError):
                code = self._status.read_text()
            disable_wandb(f"The W&B mirror stopped, the local log is complete: {code}")
        self._ended = code is not None
        return code == 0

    def end(self, record: dict, seconds: float) -> None:
        """Report the run's end: a connected mirror gets `seconds` to finish, then continues alone."""
        with suppress(OSError, WorkspaceError):  # without this file the mirror ends with its parent
            files.write(self._end, json.dumps(redact_values(record)).encode())
        self.wait(seconds if self._status.exists() else 0)
        if not self._ended and self._mode == "online" and not self._status.exists():
            warn_wandb_once(
                "W&B has not answered yet; the local log is complete, the mirror keeps trying for a while", SERVICE
            )


def run_wandb_query(task: str, spec: dict, folder: Path, seconds: float, mode: str) -> dict:
    """Run a child process that queries W&B and return its answer; it is killed after `seconds`.

    Parameters
    ----------
    task : as of `wandb_sync.run_task`.
    spec : its JSON-able arguments.
    folder : an existing folder.
    seconds : deadline.
    mode : "online" or "offline".

    Raises WorkspaceError with the reason when there is no answer.
    """
    if not _wandb_installed():
        raise missing_package_error("wandb")
    process = _start(task, spec, folder, mode, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=seconds)
        answer = parse_json(output.splitlines()[-1], finite=False)
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer in {seconds:g} s"}
    except (IndexError, ValueError):
        answer = {"error": f"the child process ended with {process.returncode}"}
    finally:
        with suppress(ProcessLookupError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if "error" in answer:
        raise WorkspaceError("W&B did not answer the query", got=redact_secrets(str(answer["error"])))
    return answer


def _start(task: str, spec: dict, folder: Path, mode: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
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
        return start_python_process(["-P", "-c", _CHILD, task], stdin=text, stdout=stdout, cwd=folder, env=env)


def wandb_mirror_mode(mirror: str) -> str:
    """Return "off", "offline" or "online": the least that the argument, ML_FACTORY_WANDB and WANDB_MODE allow.

    Offline without a key, or once W&B has failed in this process, so that no run waits for it again.
    """
    requested = os.environ.get("ML_FACTORY_WANDB", "").strip().lower() or "auto"
    for where, value in (("mirror", mirror), ("ML_FACTORY_WANDB", requested)):
        if value not in MODES:
            raise SettingsError("Unknown mirror mode", where=where, got=value, next_step=did_you_mean(value, MODES))
    wandb_mode = os.environ.get("WANDB_MODE", "").lower()
    if "off" in (mirror, requested) or wandb_mode == "disabled":
        return "off"
    if "offline" in (mirror, requested) or wandb_mode in ("offline", "dryrun"):
        return "offline"
    return "online" if has_wandb_key() and _DISABLED not in _warned else "offline"


def _wandb_installed() -> bool:
    """Return True when wandb can be imported, without importing it. A folder called wandb (W&B leaves such ones) is
    not the package: it has no origin.
    """
    try:
        spec = importlib.util.find_spec("wandb")
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def disable_wandb(text: str) -> None:
    """Warn that W&B has failed, and stop waiting for it in this process."""
    warn_wandb_once(text, SERVICE)
    _warned.add(_DISABLED)


def warn_wandb_once(text: str, topic: str = "") -> None:
    """Log a warning, only the first of its text or topic in this process."""
    if (topic or text) not in _warned:
        _warned.add(topic or text)
        _log.warning("%s", redact_secrets(text))
