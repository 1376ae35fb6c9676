"""A run's log as a table, for comparisons in tests."""

import os
from pathlib import Path

import pandas as pd

from ml_factory.tracking.run_log import read_log_steps


def read_log(folder: str | os.PathLike) -> pd.DataFrame:
    """Read a run's log, each step once and in order, however often the run was killed and resumed.

    Columns: step (int), time (UTC), attempt (int), then one for each metric, missing values NaN. An empty frame where
    nothing was logged. Raises WorkspaceError when a segment is damaged.
    """
    rows = read_log_steps(Path(folder))
    frame = pd.DataFrame([{key: row[key] for key in ("step", "time", "attempt")} for row in rows])
    if not rows:
        frame = pd.DataFrame({"step": [], "time": [], "attempt": []})
    frame = frame.astype({"step": "int64", "time": "float64", "attempt": "int64"})
    frame["time"] = pd.to_datetime(frame["time"], unit="s", utc=True)
    return frame.join(pd.DataFrame([row["metrics"] for row in rows], index=frame.index))
