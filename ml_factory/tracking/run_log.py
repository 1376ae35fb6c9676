"""Log of a run: JSON lines, one append-only file for each attempt, log/{attempt}-{begin}-{session}.jsonl.

An attempt is one process. It only appends, so a process killed anywhere leaves at most one torn last line. An attempt
resumes from a checkpoint: from the first step it logs on, everything that earlier attempts logged is void. Two machines
that share a workspace may not see each other's attempts and use the same number: the one that began later is the later
attempt, so that the order of the names is that of the attempts.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

SUMMARY = "summary.json"
_FILE = re.compile(r"\d{4,}-\d+-[0-9a-f]+\.jsonl")


def list_log_attempts(folder: Path) -> list[str]:
    """List the names of the attempts' files in a log's folder, from the first to the last."""
    return [name for name in files.names(folder) if _FILE.fullmatch(name)]


def next_log_attempt(folder: Path, session: str) -> str:
    """Return the name of a new attempt's file. session : hex digits that no other process has."""
    names = list_log_attempts(folder)
    return f"{attempt_number(names[-1]) + 1 if names else 1:04d}-{time.time_ns():020d}-{session}.jsonl"


def attempt_number(name: str) -> int:
    """Return the number of the attempt with this file, from 1."""
    return int(name.partition("-")[0])


def format_log_line(step: int, metrics: dict) -> str:
    """Return one line of the log, in which NaN and infinities are Python's. Raises TypeError for a metric
    that JSON cannot hold.
    """
    numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return json.dumps({"step": step, "time": time.time(), "metrics": numbers}) + "\n"


def _parse_log_lines(data: bytes, where: object) -> list[dict]:
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


def merge_log_attempts(attempts: Iterable[tuple[int, list[dict]]]) -> list[dict]:
    """Return each step once, in order: {"step", "time", "attempt", "metrics"}.

    attempts : (number, records in order of writing) from the first to the last. Records of one attempt about one step
        are merged, the later winning.
    """
    rows: dict[int, dict] = {}
    for number, records in attempts:
        rows = {step: row for step, row in rows.items() if not records or step < records[0]["step"]}
        for record in records:
            row = rows.setdefault(record["step"], {"step": record["step"], "metrics": {}})
            row.update(time=record["time"], attempt=number, metrics={**row["metrics"], **record["metrics"]})
    return [rows[step] for step in sorted(rows)]


def read_log_steps(folder: Path, through: str = "~") -> list[dict]:
    """Return the merged steps of a run's log, of the attempts up to the one with the file `through`; by default of
    all.
    """
    names = [name for name in list_log_attempts(folder) if name <= through]
    return merge_log_attempts(
        (attempt_number(name), _parse_log_lines(files.read(folder / name), folder / name)) for name in names
    )


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
