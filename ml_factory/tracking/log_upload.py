"""Upload of a run's closed log segments and its JSON files from the local disk to the workspace.

Segments that did not arrive are on the local disk and are uploaded with the next segment, or by the next session on
this machine.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import disk_errors, files
from ml_factory.tracking.log_merge import merge_log_segments
from ml_factory.tracking.run_log import RunLogAttempt, list_log_files, read_log_attempts, sort_log_attempts

SUMMARY = "summary.json"


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
    """Return True for the log of a finished run."""
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
    """Uploader of one attempt's log. Raises WorkspaceError if the disk refuses the write."""

    def __init__(self, local: Path, folder: Path):
        self.local, self.folder = local, folder

    def upload(self, attempt: RunLogAttempt, open_number: int, texts: Mapping[str, str]) -> list[str]:
        """Upload, as `_upload_segments`."""
        return _upload_segments(self.local, self.folder, attempt, open_number, texts)
