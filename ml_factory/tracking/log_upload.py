"""Upload of a run's closed log segments and its JSON files from the local disk to the workspace.

On a mount a child process does the upload: one that hangs keeps its child, never the training. Segments that did not
arrive are on the local disk and are uploaded with the next segment, or by the next session on this machine.

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
_CHILD_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from ml_factory.tracking.log_upload import serve; serve(*sys.argv[2:])"
)
SUMMARY = "summary.json"
PATIENCE, DEADLINE = 0.5, 60.0  # seconds that the training waits for a mount; seconds after which a child is killed


def upload_segments(local: Path, folder: Path, attempt: Attempt, writing: str, texts: Mapping[str, str]) -> list[str]:
    """Copy every closed local segment that the folder lacks or has incomplete, and write the texts; return the names
    there.

    Parameters
    ----------
    local, folder : the run's log on the local disk and in the workspace.
    attempt : writer of the texts: its summary does not overwrite that of a later attempt.
    writing : name of the segment that is still open, or "".
    texts : file name -> content.

    Raises WorkspaceError.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if folder != local:
            for path in segments(local).values():
                target = folder / path.name
                if path.name == writing or (target.exists() and target.stat().st_size >= path.stat().st_size):
                    continue
                if data := path.read_bytes():
                    write_bytes_atomic(target, data)
        for name, text in texts.items():
            if not (name == SUMMARY and _has_later_attempt(folder, attempt)):
                write_bytes_atomic(folder / name, text.encode())
        return sorted(path.name for path in segments(folder).values())


def is_log_complete(folder: Path) -> bool:
    """Return True for the log of a finished run. Raises UnresponsiveMountError where a mount does not answer."""
    try:
        summary = read_json(folder / SUMMARY) if is_file(folder / SUMMARY) else {}
    except UnresponsiveMountError:
        raise
    except WorkspaceError:  # damaged: it is written again
        return False
    return isinstance(summary, dict) and summary.get("status") == "finished"


def _has_later_attempt(folder: Path, attempt: Attempt) -> bool:
    """Return True when a later attempt has logged to the folder."""
    try:
        order = sort_attempts({attempt: [], **read_attempts(folder)})
    except WorkspaceError:  # damaged: the order of attempts is unknown
        return False
    return order[-1] != attempt


class LogUploader:
    """Uploader of one attempt's log.

    Raises WorkspaceError if the disk refuses the write. An unresponsive mount raises after `patience` seconds; the
    upload continues in the child.
    """

    def __init__(self, local: Path, folder: Path):
        self.local, self.folder, self._remote = local, folder, on_mount(folder)
        self._process: subprocess.Popen | None = None
        self._sent_at = 0.0  # time of the request that the child has not answered yet; 0: it is idle

    def upload(self, attempt: Attempt, writing: str, texts: Mapping[str, str], patience: float = PATIENCE) -> list[str]:
        """Upload, as `upload_segments`. Raises WorkspaceError when the folder refuses, or does not answer within
        `patience` seconds: then the child continues, and new content is uploaded by the next call.
        """
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
        """End the child; one that hangs is killed and never waited for."""
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
        answer = json.loads(line)
        if "error" in answer:
            raise WorkspaceError(answer["error"])
        return answer["names"]

    def _start(self) -> None:
        words = [sys.executable, "-c", _CHILD_CODE, str(_ROOT), str(self.local), str(self.folder), str(os.getpid())]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def _unresponsive(self, reason: str) -> WorkspaceError:
        return WorkspaceError("This folder does not answer", where=self.folder, got=reason)


def serve(local: str, folder: str, parent: str) -> None:
    """Run the parent's requests, in the child, until the parent is gone."""
    run_in_process()
    for line in sys.stdin.buffer:
        if os.getppid() != int(parent):
            return  # another process may own the run already
        request = json.loads(line)
        try:
            names = upload_segments(
                Path(local), Path(folder), Attempt(*request["attempt"]), request["writing"], request["texts"]
            )
            answer = {"names": names}
        except WorkspaceError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
