"""Closed segments of a run's record, and what is said of the run, brought from the local disk to the workspace.

On a mount a child process does it: one that hangs keeps its child, never the training. What did not arrive lies on the
local disk and is brought with the next segment, or by the next session on this machine.

    parent -> child   {"writing": "segment-…", "texts": {"run.json": "…"}}
    child -> parent   {"names": […]} or {"error": "…"}
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.atomic_files import disk_errors, is_file, read_json, write_bytes_atomic
from ml_factory.storage.file_access import UnresponsiveMountError, run_in_process
from ml_factory.storage.mount_table import on_mount
from ml_factory.storage.worker_process import readable
from ml_factory.tracking.run_log import Attempt, read_attempts, segments, sort_attempts

_ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from ml_factory.tracking.log_upload import serve; serve(*sys.argv[2:])"
)
SUMMARY = "summary.json"
PATIENCE, DEADLINE = 0.5, 60.0  # seconds the training waits for a mount; seconds after which a child is given up


def upload_segments(local: Path, folder: Path, attempt: Attempt, writing: str, texts: Mapping[str, str]) -> list[str]:
    """Copy every closed local segment that the folder does not have whole, and write the texts; the names there.

    attempt : whose texts they are: a summary is not written over that of a later attempt.  writing : the name of the
    segment that is still open, or "". Raises WorkspaceError.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if folder != local:
            for path in segments(local).values():
                there = folder / path.name
                if path.name == writing or (there.exists() and there.stat().st_size >= path.stat().st_size):
                    continue
                if data := path.read_bytes():
                    write_bytes_atomic(there, data)
        for name, text in texts.items():
            if not (name == SUMMARY and _has_later_attempt(folder, attempt)):
                write_bytes_atomic(folder / name, text.encode())
        return sorted(path.name for path in segments(folder).values())


def is_log_complete(folder: Path) -> bool:
    """Whether a run's log says that it was finished. Raises UnresponsiveMountError where a mount does not answer."""
    try:
        told = read_json(folder / SUMMARY) if is_file(folder / SUMMARY) else {}
    except UnresponsiveMountError:
        raise
    except WorkspaceError:  # damaged: told again
        return False
    return isinstance(told, dict) and told.get("status") == "finished"


def _has_later_attempt(folder: Path, attempt: Attempt) -> bool:
    """Whether a later attempt has logged there."""
    try:
        order = sort_attempts({attempt: [], **read_attempts(folder)})
    except WorkspaceError:  # damaged: nobody can tell
        return False
    return order[-1] != attempt


class LogUploader:
    """Where one attempt's record goes.

    Raises nothing of a mount that hangs later than its patience; WorkspaceError of a disk that refuses.
    """

    def __init__(self, local: Path, folder: Path):
        self.local, self.folder, self._remote = local, folder, on_mount(folder)
        self._process: subprocess.Popen | None = None
        self._sent_at = 0.0  # when the child got what it has not answered yet; 0: it is idle

    def upload(self, attempt: Attempt, writing: str, texts: Mapping[str, str], patience: float = PATIENCE) -> list[str]:
        """As `deliver`. Raises WorkspaceError when the folder refuses, or does not answer for so many seconds: then
        the child goes on, and what is new is brought by the next call."""
        if not self._remote:
            return upload_segments(self.local, self.folder, attempt, writing, texts)
        ends = time.monotonic() + patience
        if self._sent_at:
            self._receive(ends)
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = json.dumps({"attempt": list(attempt), "writing": writing, "texts": dict(texts)})
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise self._unresponsive("the child process died") from error
        self._sent_at = time.monotonic()
        return self._receive(ends)

    def close(self) -> None:
        """Let the child go; one that hangs is killed and never waited for."""
        process, self._process, self._sent_at = self._process, None, 0.0
        if process is None:
            return
        with suppress(OSError):
            process.stdin.close()  # an idle child ends by itself now
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        process.stdout.close()
        process.returncode = process.returncode if process.returncode is not None else -9

    def _receive(self, ends: float) -> list[str]:
        if not readable(self._process.stdout.fileno(), ends - time.monotonic()):
            if time.monotonic() - self._sent_at > DEADLINE:
                self.close()
            raise self._unresponsive("no answer yet")
        line = self._process.stdout.readline()
        self._sent_at = 0.0
        if not line:
            self.close()
            raise self._unresponsive("the child process died")
        told = json.loads(line)
        if "error" in told:
            raise WorkspaceError(told["error"])
        return told["names"]

    def _start(self) -> None:
        words = [sys.executable, "-c", _START, str(_ROOT), str(self.local), str(self.folder), str(os.getpid())]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def _unresponsive(self, why: str) -> WorkspaceError:
        return WorkspaceError("This folder does not answer", where=self.folder, got=why)


def serve(local: str, folder: str, parent: str) -> None:
    """The child: do what the parent asks until it is gone."""
    run_in_process()
    for line in sys.stdin.buffer:
        if os.getppid() != int(parent):
            return  # another process may own the run already
        asked = json.loads(line)
        try:
            names = upload_segments(
                Path(local), Path(folder), Attempt(*asked["attempt"]), asked["writing"], asked["texts"]
            )
            answer = {"names": names}
        except WorkspaceError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
