"""Log of a run: JSON lines in numbered segments, segment-{attempt}-{session}-{number}.jsonl.

An attempt is one process. It only appends, so a process killed anywhere leaves at most one torn last line. An attempt
resumes from a checkpoint: from the first step it logs on, everything that earlier attempts logged is void. Two machines
that share a mount may not see each other's attempts and use the same number: the session keeps their files apart, and
the one that began later is the later attempt.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

# Segments of older versions, without a session, belong to the session "".
_SEGMENT = re.compile(r"segment-(\d{4,})-(?:([0-9a-f]{8})-)?(\d{4,})\.jsonl")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunLogAttempt(NamedTuple):
    """One process that logged: the number of the attempt and its session, 8 hex digits."""

    number: int
    session: str = ""


def log_segment_name(attempt: RunLogAttempt, number: int) -> str:
    """Return the file name of one segment; an attempt's names sort in the order of writing."""
    return f"segment-{attempt.number:04d}-{attempt.session}-{number:04d}.jsonl"


def attempt_of_segment(name: str) -> RunLogAttempt:
    """Return the attempt that wrote the segment with this file name."""
    match = _SEGMENT.fullmatch(name)
    return RunLogAttempt(int(match[1]), match[2] or "")


def list_log_segments(*folders: Path) -> dict[tuple[RunLogAttempt, int], Path]:
    """Return {(attempt, number): path} in order. A segment in several folders is taken from the first that has it."""
    found = {}
    for folder in folders:
        for name in files.names(folder):
            match = _SEGMENT.fullmatch(name)
            if match:
                found.setdefault((attempt_of_segment(name), int(match[3])), folder / name)
    return dict(sorted(found.items()))


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
            raise WorkspaceError(
                "A line of this run's log is damaged",
                where=f"{where}, line {number}",
                got=error,
                next_step="restore the file from a copy, or move it away",
            ) from error
    return records


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
    for (attempt, _), path in list_log_segments(*folders).items():
        attempts.setdefault(attempt, []).extend(parse_log_lines(files.read(path), path))
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
