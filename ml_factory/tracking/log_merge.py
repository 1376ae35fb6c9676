"""Merging of a run's closed log segments, so that the log of a thousand checkpoints is in few files.

A merged file is written whole, next to the segments that it holds, and these are removed only where it is found to hold
their every byte. A process killed in between leaves both, which every reader counts once (`run_log`). A mount may show
another machine the removal before the new file: there, segments are removed by a later call.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from ml_factory.errors import FileError
from ml_factory.storage.files import files
from ml_factory.tracking.run_log import RunLogAttempt, RunLogFile, list_log_files, log_segment_name

FAN_IN = 16  # files of one size that are merged into one
SECONDS = 5.0  # after which a call leaves the rest to the next one


def merge_log_segments(folder: Path, attempt: RunLogAttempt, open_number: int) -> None:
    """Merge closed segments in a folder; no record is lost or doubled at any moment, for any reader.

    Parameters
    ----------
    folder : of the log.
    attempt : the present one: its segments are merged as they become many, those of each ended attempt at once.
    open_number : the first segment of this attempt that is not closed.

    Raises WorkspaceError where the disk refuses; the log is whole then too.
    """
    until = time.monotonic() + SECONDS
    _remove_merged(listed := list_log_files(folder), until)
    groups = list(_groups_to_merge(listed, attempt, open_number))
    for group in groups:
        if time.monotonic() < until:
            _write_merged(folder, group)
    if groups:
        _remove_merged(list_log_files(folder), until)


def _groups_to_merge(listed: list[RunLogFile], attempt: RunLogAttempt, open_number: int) -> Iterator[list[RunLogFile]]:
    """Yield lists of files to merge, each of segments of one attempt that follow one another without a gap."""
    run: list[RunLogFile] = []
    for file in [*_outermost(listed), None]:
        if file is not None and file.attempt == attempt and file.last >= open_number:
            continue
        follows = run and file is not None and file.attempt == run[-1].attempt and file.first == run[-1].last + 1
        same_size = follows and (file.attempt != attempt or _size_class(file) == _size_class(run[-1]))
        if not same_size:
            if len(run) > 1 and run[0].attempt != attempt:
                yield run
            run = []
        if file is not None:
            run.append(file)
        if len(run) == FAN_IN and run[0].attempt == attempt:
            yield run
            run = []


def _outermost(listed: list[RunLogFile]) -> Iterator[RunLogFile]:
    """Yield the files without those whose segments the one before has too."""
    before: RunLogFile | None = None
    for file in listed:
        if before is None or file.attempt != before.attempt or file.last > before.last:
            before = file
            yield file


def _size_class(file: RunLogFile) -> int:
    """Return how often segments were merged to make this file."""
    count, size_class = file.last - file.first + 1, 0
    while count >= FAN_IN:
        count, size_class = count // FAN_IN, size_class + 1
    return size_class


def _write_merged(folder: Path, group: list[RunLogFile]) -> None:
    pieces = []
    for file in group:
        for number, lines in sorted(file.read_segments().items()):
            pieces += [json.dumps({"segment": number, "bytes": len(lines)}).encode(), b"\n", lines]
    files.write(folder / log_segment_name(group[0].attempt, group[0].first, group[-1].last), b"".join(pieces))


def _remove_merged(listed: list[RunLogFile], until: float) -> None:
    """Remove the files of which a merged file holds every byte."""
    for merged in [file for file in listed if file.is_merged]:
        inner = [file for file in listed if file != merged and _covers(merged, file)]
        held = merged.read_segments() if inner else {}
        for file in inner:
            if time.monotonic() > until:
                return
            try:
                if all(held[number] == lines for number, lines in file.read_segments().items()):
                    files.remove(file.path)
            except FileError:  # another process removed it
                continue


def _covers(merged: RunLogFile, file: RunLogFile) -> bool:
    return file.attempt == merged.attempt and merged.first <= file.first <= file.last <= merged.last
