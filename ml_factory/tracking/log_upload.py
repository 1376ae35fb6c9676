"""Upload of a run's closed log segments and its JSON files from the local disk to the workspace.

On a mount a child process does the upload: one that hangs keeps its child, never the training. Segments that did not
arrive are on the local disk and are uploaded with the next segment, or by the next session on this machine.

    parent -> child   {"attempt": […], "open_number": n, "texts": {"run.json": "…"}}
    child -> parent   {"names": […]} or {"error": "…"}
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ml_factory.background_thread import BackgroundThread
from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import disk_errors, files
from ml_factory.storage.worker_process import WorkerParentConnection, WorkerProcess, WorkerUnavailableError
from ml_factory.tracking.log_merge import merge_log_segments
from ml_factory.tracking.run_log import RunLogAttempt, list_log_files, read_log_attempts, sort_log_attempts

SUMMARY = "summary.json"
PATIENCE, DEADLINE = 0.5, 60.0  # seconds that the training waits for a mount; seconds after which a child is killed


def _upload_segments(
    local: Path, folder: Path, attempt: RunLogAttempt, open_number: int, texts: Mapping[str, str]
) -> list[str]:
    """Copy every closed local segment that the folder lacks or has incomplete, and write the texts; return the names
    there. Segments that have become many are merged, here and there.

    Parameters
    ----------
    local, folder : the run's log on the local disk and in the workspace.
    attempt : the present attempt: its summary does not overwrite that of a later one.
    open_number : the first segment of this attempt that is not closed.
    texts : file name -> content.

    Raises WorkspaceError.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if folder != local:
        _copy_missing_segments(local, folder, attempt, open_number)
    for name, text in texts.items():
        if not (name == SUMMARY and _has_later_attempt(folder, attempt)):
            files.write(folder / name, text.encode())
    for place in dict.fromkeys((local, folder)):
        if not files.is_remote(place) or (open_number == 0 and not texts):  # a mount is slow: only when a run begins
            with suppress(WorkspaceError):  # the log is whole in any case, and the next call tries again
                merge_log_segments(place, attempt, open_number)
    return sorted(file.path.name for file in list_log_files(folder))


def _copy_missing_segments(local: Path, folder: Path, attempt: RunLogAttempt, open_number: int) -> None:
    """Copy the local files of which the folder lacks a segment, or has a shorter one."""
    sizes: dict[tuple[RunLogAttempt, int], float] = {}
    for file in list_log_files(folder):
        size = math.inf if file.is_merged else files.size(file.path)  # a merged file is written whole
        for number in range(file.first, file.last + 1):
            sizes[file.attempt, number] = max(size, sizes.get((file.attempt, number), 0))
    for file in list_log_files(local):
        if file.attempt == attempt and file.last >= open_number:
            continue
        there = min(sizes.get((file.attempt, number), -1) for number in range(file.first, file.last + 1))
        if there == math.inf or (not file.is_merged and there >= files.size(file.path)):
            continue
        if file.is_merged and all(
            sizes.get((file.attempt, number), -1) >= len(lines) for number, lines in file.read_segments().items()
        ):
            continue
        if data := files.read(file.path):
            files.write(folder / file.path.name, data)


def is_log_complete(folder: Path) -> bool:
    """Return True for the log of a finished run. Raises UnresponsiveMountError where a mount does not answer."""
    summary = files.read_json_or_none(folder / SUMMARY)  # a damaged one is written again
    return isinstance(summary, dict) and summary.get("status") == "finished"


def _has_later_attempt(folder: Path, attempt: RunLogAttempt) -> bool:
    """Return True when a later attempt has logged to the folder."""
    try:
        order = sort_log_attempts({attempt: [], **read_log_attempts(folder)})
    except WorkspaceError:  # damaged: the order of attempts is unknown
        return False
    return order[-1] != attempt


class LogUploader:
    """Uploader of one attempt's log.

    Raises WorkspaceError if the disk refuses the write. An unresponsive mount raises after `patience` seconds; the
    upload continues in the child.
    """

    def __init__(self, local: Path, folder: Path):
        self.local, self.folder, self._answer = local, folder, {}
        remote = files.is_remote(folder)
        self._worker = WorkerProcess(__name__, [local, folder], str(folder), DEADLINE) if remote else None
        self._thread = BackgroundThread("log upload")

    def upload(
        self, attempt: RunLogAttempt, open_number: int, texts: Mapping[str, str], patience: float = PATIENCE
    ) -> list[str]:
        """Upload, as `_upload_segments`. Raises WorkspaceError when the folder refuses, or does not answer within
        `patience` seconds: then the child continues, and new content is uploaded by the next call.
        """
        if self._worker is None:
            return _upload_segments(self.local, self.folder, attempt, open_number, texts)
        ends = time.monotonic() + patience
        if self._thread.wait(patience):  # no earlier request is under way
            self._answer = {}
            request = {"attempt": list(attempt), "open_number": open_number, "texts": dict(texts)}
            self._thread.submit(lambda: self._send(request))
            self._thread.wait(max(0.0, ends - time.monotonic()))
            if "names" in self._answer:
                return self._answer["names"]
        raise WorkspaceError(
            "This folder does not answer, or refuses the log", where=self.folder,
            got=self._answer.get("error", "no answer yet")
        )  # fmt: skip

    def close(self) -> None:
        """End the child; one that hangs is killed and never waited for."""
        if self._worker is not None:
            self._thread.wait(PATIENCE)
            self._worker.close()
            self._thread.close()

    def _send(self, request: dict) -> None:
        try:
            self._answer, _ = self._worker.call(request)
        except WorkerUnavailableError as error:
            self._answer = {"error": str(error)}


def serve(channel: str, parent: str, local: str, folder: str) -> None:
    """Run the parent's requests, in the child, until the parent is gone."""
    link = WorkerParentConnection(channel, parent)
    files.run_in_process(link.alive)

    def handle(request: dict) -> tuple[dict, bytes]:
        attempt = RunLogAttempt(*request["attempt"])
        try:
            names = _upload_segments(Path(local), Path(folder), attempt, request["open_number"], request["texts"])
        except WorkspaceError as error:
            return {"error": str(error)}, b""
        return {"names": names}, b""

    link.answer_requests(handle)
