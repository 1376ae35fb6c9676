"""What a run logged, as lines of JSON in numbered segments: segment-{attempt}-{number}.jsonl.

An attempt is one process. It only appends, so a process killed anywhere leaves at most one torn last line. An attempt
resumes from a checkpoint: from the first step it logs on, everything that earlier attempts said is void.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ml_factory.errors import WorkspaceError
from ml_factory.runs.storage import disk_errors

_SEGMENT = re.compile(r"segment-(\d{4,})-(\d{4,})\.jsonl")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def segment_name(attempt: int, number: int) -> str:
    """File name; names of one run sort in the order of writing."""
    return f"segment-{attempt:04d}-{number:04d}.jsonl"


def segments(*folders: Path) -> dict[tuple[int, int], Path]:
    """{(attempt, number): path} in order. A segment in several folders is taken from the first that has it."""
    found = {}
    for folder in folders:
        for path in folder.glob("segment-*.jsonl"):
            match = _SEGMENT.fullmatch(path.name)
            if match:
                found.setdefault((int(match[1]), int(match[2])), path)
    return dict(sorted(found.items()))


def record_line(step: int, time: float, metrics: dict) -> str:
    """One line. JSON has no NaN and no infinity: they are written as the texts NaN, Infinity, -Infinity."""
    return json.dumps({"step": step, "time": time, "metrics": {name: _tell(v) for name, v in metrics.items()}}) + "\n"


def parse_lines(data: bytes, where: object) -> list[dict]:
    """The records in `data`; a last line without its end was torn by a kill and is left out.

    Raises WorkspaceError naming the line when any other is damaged.
    """
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            metrics = {name: _hear(value) for name, value in record["metrics"].items()}
            records.append({"step": int(record["step"]), "time": float(record["time"]), "metrics": metrics})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkspaceError(
                "A line of this run's log is damaged",
                where=f"{where}, line {number}",
                got=error,
                next_step="restore the file from a copy, or move it away",
            ) from error
    return records


def merge(attempts: Iterable[tuple[int, list[dict]]]) -> list[dict]:
    """Each step once, in order: {"step", "time", "attempt", "metrics"}.

    attempts : (number, its records in order of writing). What two records of one attempt say about one step is put
    together, the later winning.
    """
    rows: dict[int, dict] = {}
    for attempt, records in sorted(attempts, key=lambda item: item[0]):
        if records:
            first = records[0]["step"]
            rows = {step: row for step, row in rows.items() if step < first}
        for record in records:
            row = rows.setdefault(record["step"], {"step": record["step"], "metrics": {}})
            row.update(time=record["time"], attempt=attempt, metrics={**row["metrics"], **record["metrics"]})
    return [rows[step] for step in sorted(rows)]


def read_rows(*folders: Path, before_attempt: int | None = None) -> list[dict]:
    """The merged rows of a run's segments in these folders."""
    attempts: dict[int, list[dict]] = {}
    for (attempt, _), path in segments(*folders).items():
        if before_attempt is None or attempt < before_attempt:
            with disk_errors(path):
                attempts.setdefault(attempt, []).extend(parse_lines(path.read_bytes(), path))
    return merge(attempts.items())


def read_log(folder: str | os.PathLike) -> pd.DataFrame:
    """What a run logged, each step once and in order, however often it was killed and resumed.

    Columns: step (int), time (UTC), attempt (int), then one for each metric, missing ones NaN. An empty frame where
    nothing was logged. Raises WorkspaceError when a segment is damaged.
    """
    rows = read_rows(Path(folder))
    frame = pd.DataFrame([{key: row[key] for key in ("step", "time", "attempt")} for row in rows])
    if not rows:
        frame = pd.DataFrame({"step": [], "time": [], "attempt": []})
    frame = frame.astype({"step": "int64", "time": "float64", "attempt": "int64"})
    frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True)
    return frame.join(pd.DataFrame([row["metrics"] for row in rows], index=frame.index))


def _tell(value: object) -> object:
    """A metric as JSON can hold it. Raises TypeError for what is neither a number nor a text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")


def _hear(value: object) -> object:
    """The metric that `_tell` wrote."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
