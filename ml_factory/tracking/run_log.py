"""Log of a run: JSON lines in numbered segments, segment-{attempt}-{session}-{number}.jsonl.

An attempt is one process. It only appends, so a process killed anywhere leaves at most one torn last line. An attempt
resumes from a checkpoint: from the first step it logs on, everything that earlier attempts logged is void. Two machines
that share a mount may not see each other's attempts and use the same number: the session keeps their files apart, and
the one that began later is the later attempt.

Segments of one attempt are merged into segment-{attempt}-{session}-{first}-{last}.jsonl (`log_merge`): before the lines
of each segment stands its number and their size. So a reader knows what it reads twice, in whatever files it is, and
takes it once.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_factory.errors import FileError, WorkspaceError
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

# Segments of older versions, without a session, belong to the session "".
_FILE = re.compile(r"segment-(\d{4,})-(?:([0-9a-f]{8})-)?(\d{4,})(?:-(\d{4,}))?\.jsonl")
_READS = 5  # listings, while another process merges segments between listing and reading
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLogAttempt(NamedTuple):
    """One process that logged: the number of the attempt and its session, 8 hex digits."""

    number: int
    session: str = ""


class RunLogFile(NamedTuple):
    """One file of the log: a segment, or several merged ones.

    first, last : numbers of its segments.
    """

    attempt: RunLogAttempt
    first: int
    last: int
    path: Path

    @property
    def is_merged(self) -> bool:
        return self.first != self.last

    def read_segments(self) -> dict[int, bytes]:
        """Return {number: complete lines} of its segments. Raises FileError where the file is gone, WorkspaceError
        where it is damaged.
        """
        data = files.read(self.path)
        if not self.is_merged:
            return {self.first: data[: data.rfind(b"\n") + 1]}
        found, rest = {}, data
        while rest:
            header, _, rest = rest.partition(b"\n")
            try:
                described = parse_json(header)
                number, size = described["segment"], described["bytes"]
                if type(number) is not int or type(size) is not int or not 0 <= size <= len(rest):
                    raise ValueError("it is cut off")
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged_log_error(self.path, error) from error
            found[number], rest = rest[:size], rest[size:]
        if sorted(found) != list(range(self.first, self.last + 1)):
            raise _damaged_log_error(self.path, f"segments {sorted(found)[:10]}")
        return found


def log_segment_name(attempt: RunLogAttempt, first: int, last: int | None = None) -> str:
    """Return the file name of one segment, or of several merged ones; an attempt's names sort in the order of
    writing.
    """
    session = f"{attempt.session}-" if attempt.session else ""
    numbers = f"{first:04d}" if last in (None, first) else f"{first:04d}-{last:04d}"
    return f"segment-{attempt.number:04d}-{session}{numbers}.jsonl"


def parse_log_file_name(path: Path) -> RunLogFile | None:
    """Return the description of a file of the log; None for another file."""
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    return RunLogFile(RunLogAttempt(int(match[1]), match[2] or ""), int(match[3]), int(match[4] or match[3]), path)


def list_log_files(folder: Path) -> list[RunLogFile]:
    """List the files of the log: by attempt, and in the order of their first segments; the longer of two before the
    shorter.
    """
    found = [file for name in files.names(folder) if (file := parse_log_file_name(folder / name))]
    return sorted(found, key=lambda file: (file.attempt, file.first, -file.last))


def read_log_segments(
    *folders: Path, attempt: RunLogAttempt | None = None, since: int = 0
) -> dict[tuple[RunLogAttempt, int], bytes]:
    """Read {(attempt, number): complete lines} of every segment in these folders, in order.

    A segment in several folders is taken from the first that has it; of two copies in one folder the longer.

    attempt, since : only this attempt, and its segments from this number on.

    Raises WorkspaceError where a disk refuses, or a merged file is damaged whose segments are in no other file.
    """
    for left in range(_READS, 0, -1):
        try:
            return dict(sorted(_read_listed_segments(folders, attempt, since).items()))
        except FileError:  # another process may have merged the file since it was listed
            if left == 1:
                raise
    raise AssertionError("unreachable")


def _read_listed_segments(
    folders: Sequence[Path], attempt: RunLogAttempt | None, since: int
) -> dict[tuple[RunLogAttempt, int], bytes]:
    """Read the segments in the files that are listed now. Raises FileError where one is gone."""
    found: dict[tuple[RunLogAttempt, int], bytes] = {}
    for folder in folders:
        here: dict[tuple[RunLogAttempt, int], bytes] = {}
        damaged: list[tuple[RunLogFile, WorkspaceError]] = []
        for file in list_log_files(folder):
            wanted = attempt in (None, file.attempt) and file.last >= since
            if not wanted or all((file.attempt, number) in found for number in range(file.first, file.last + 1)):
                continue
            try:
                segments = file.read_segments()
            except FileError:
                raise
            except WorkspaceError as error:
                damaged.append((file, error))
                continue
            for number, lines in segments.items():
                if number >= since and len(lines) >= len(here.get((file.attempt, number), b"")):
                    here[file.attempt, number] = lines
        found = here | found
        for file, error in damaged:
            if any((file.attempt, number) not in found for number in range(max(since, file.first), file.last + 1)):
                raise error
    return found


def format_log_line(step: int, time: float, metrics: dict) -> str:
    """Return one line of the log. NaN and infinity, which JSON lacks, are written as texts: NaN, Infinity,
    -Infinity.
    """
    return (
        json.dumps({"step": step, "time": time, "metrics": {name: _encode_metric(v) for name, v in metrics.items()}})
        + "\n"
    )


def parse_log_lines(data: bytes, where: object) -> list[dict]:
    """Parse the records in `data`; a last line without its end was torn by a kill and is skipped.

    Raises WorkspaceError naming the line when any other line is damaged.
    """
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = parse_json(line)
            metrics = {name: _decode_metric(value) for name, value in record["metrics"].items()}
            records.append({"step": int(record["step"]), "time": float(record["time"]), "metrics": metrics})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged_log_error(f"{where}, line {number}", error) from error
    return records


def _damaged_log_error(where: object, got: object) -> WorkspaceError:
    return WorkspaceError(
        "A line of this run's log is damaged", where=where, got=got,
        next_step="restore the file from a copy, or move it away",
    )  # fmt: skip


def sort_log_attempts(attempts: Mapping[RunLogAttempt, list[dict]]) -> list[RunLogAttempt]:
    """Sort attempts from the first to the last: by number; equal numbers by the time of their first record."""

    def began(attempt: RunLogAttempt) -> tuple:
        records = attempts[attempt]
        return attempt.number, records[0]["time"] if records else math.inf, attempt.session

    return sorted(attempts, key=began)


def merge_log_attempts(attempts: Mapping[RunLogAttempt, list[dict]]) -> list[dict]:
    """Return each step once, in order: {"step", "time", "attempt", "metrics"}.

    attempts : attempt -> its records in order of writing. Records of one attempt about one step are merged, the later
        winning.
    """
    rows: dict[int, dict] = {}
    for attempt in sort_log_attempts(attempts):
        records = attempts[attempt]
        if records:
            first = records[0]["step"]
            rows = {step: row for step, row in rows.items() if step < first}
        for record in records:
            row = rows.setdefault(record["step"], {"step": record["step"], "metrics": {}})
            row.update(time=record["time"], attempt=attempt.number, metrics={**row["metrics"], **record["metrics"]})
    return [rows[step] for step in sorted(rows)]


def read_log_attempts(*folders: Path) -> dict[RunLogAttempt, list[dict]]:
    """Read the records of each attempt that these folders have segments of, in order of writing."""
    attempts: dict[RunLogAttempt, list[dict]] = {}
    for (attempt, number), lines in read_log_segments(*folders).items():
        where = Path(folders[0]) / log_segment_name(attempt, number)
        attempts.setdefault(attempt, []).extend(parse_log_lines(lines, where))
    return attempts


def read_log_steps(*folders: Path, before: RunLogAttempt | None = None) -> list[dict]:
    """Return the merged steps of a run's segments in these folders; only those of attempts before `before`, if
    given.
    """
    attempts = read_log_attempts(*folders)
    if before is not None:
        order = sort_log_attempts({before: [], **attempts})
        attempts = {attempt: attempts[attempt] for attempt in order[: order.index(before)] if attempt in attempts}
    return merge_log_attempts(attempts)


def count_run_log_steps(steps: Sequence[int], *folders: Path) -> int:
    """Return the number of leading steps that the log in the folders has without a gap; 0 for a damaged log, so that
    all steps are logged again.
    """
    try:
        recorded = {row["step"] for row in read_log_steps(*folders)}
    except WorkspaceError:
        recorded = set()
    return next((position for position, step in enumerate(steps) if step not in recorded), len(steps))


def _encode_metric(value: object) -> object:
    """Return a metric as JSON can hold it. Raises TypeError for a value that is neither a number nor a text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")


def _decode_metric(value: object) -> object:
    """Return the metric that `_encode_metric` wrote."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
