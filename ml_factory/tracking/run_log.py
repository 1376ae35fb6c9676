"""Log of a run: JSON lines, one append-only file for each attempt, log/{attempt}-{session}.jsonl.

An attempt is one process. It only appends, so a process killed anywhere leaves at most one torn last line. An attempt
resumes from a checkpoint: from the first step it logs on, everything that earlier attempts logged is void. Two machines
that share a workspace may not see each other's attempts and use the same number: the session keeps their files apart,
and the one that began later is the later attempt.
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

SUMMARY = "summary.json"
_FILE = re.compile(r"(\d{4,})-([0-9a-f]{8})\.jsonl")


class RunLogAttempt(NamedTuple):
    """One process that logged: the number of the attempt and its session, 8 hex digits."""

    number: int
    session: str

    @property
    def file_name(self) -> str:
        return f"{self.number:04d}-{self.session}.jsonl"


def list_log_attempts(folder: Path) -> list[RunLogAttempt]:
    """List the attempts that have logged to the folder, by their number."""
    found = filter(None, map(_FILE.fullmatch, files.names(folder)))
    return sorted(RunLogAttempt(int(match[1]), match[2]) for match in found)


def format_log_line(step: int, time: float, metrics: dict) -> str:
    """Return one line of the log, in which NaN and infinities are Python's. Raises TypeError for a metric
    that JSON cannot hold.
    """
    numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return json.dumps({"step": step, "time": time, "metrics": numbers}) + "\n"


def parse_log_lines(data: bytes, where: object) -> list[dict]:
    """Parse the records in `data`; a last line without its end was torn by a kill and is skipped.

    Raises WorkspaceError naming the line when any other line is damaged.
    """
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = parse_json(line, finite=False)
            records.append(
                {"step": int(record["step"]), "time": float(record["time"]), "metrics": dict(record["metrics"])}
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkspaceError(
                "A line of this run's log is damaged", where=f"{where}, line {number}", got=error,
                next_step="restore the file from a copy, or move it away",
            ) from error  # fmt: skip
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


def read_log_attempts(folder: Path) -> dict[RunLogAttempt, list[dict]]:
    """Read the records of each attempt that has logged to the folder, in order of writing."""
    paths = {attempt: folder / attempt.file_name for attempt in list_log_attempts(folder)}
    return {attempt: parse_log_lines(files.read(path), path) for attempt, path in paths.items()}


def read_log_steps(folder: Path, before: RunLogAttempt | None = None) -> list[dict]:
    """Return the merged steps of a run's log; only those of attempts before `before`, if given."""
    attempts = read_log_attempts(folder)
    if before is not None:
        order = sort_log_attempts({before: [], **attempts})
        attempts = {attempt: attempts[attempt] for attempt in order[: order.index(before)]}
    return merge_log_attempts(attempts)


def count_run_log_steps(steps: Sequence[int], folder: Path) -> int:
    """Return the number of leading steps that the log has without a gap; 0 for a damaged log, so that all steps are
    logged again.
    """
    try:
        recorded = {row["step"] for row in read_log_steps(folder)}
    except WorkspaceError:
        recorded = set()
    return next((position for position, step in enumerate(steps) if step not in recorded), len(steps))


def is_log_complete(folder: Path) -> bool:
    """Return True for the log of a finished run."""
    summary = files.read_json_or_none(folder / SUMMARY)  # a damaged one is written again
    return isinstance(summary, dict) and summary.get("status") == "finished"
