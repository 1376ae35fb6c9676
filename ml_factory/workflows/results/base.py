"""Base of all results, of runs, and of runs that make a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.evaluation.findings import Finding, finding_lines
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.progress import ProgressPhase
from ml_factory.storage.json_values import to_json_value
from ml_factory.workflows.results.summaries import (
    summary_calibration_lines,
    summary_verdict_lines,
    wrap_summary_line,
)


def _facts(value: Any) -> Any:
    """Convert a field to JSON values; a table to its records, with the index where it has a name."""
    if isinstance(value, ModelVerdict | Finding | Result):
        return to_json_value(value.to_dict())
    if isinstance(value, tuple) and value and isinstance(value[0], Finding):
        return [_facts(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _facts(one) for name, one in value.items()}
    if not isinstance(value, pd.DataFrame):
        return to_json_value(value)
    table = value.reset_index() if value.index.name or value.index.nlevels > 1 else value
    return to_json_value(table.to_dict("records"))


def result_phase_table(phases: Sequence[ProgressPhase]) -> pd.DataFrame:
    """Return a row per phase: rows, seconds, rows a second, and the seconds of compiling kernels, once per machine."""
    rows = [(one.name, one.done, one.seconds, one.rate, one.compiled) for one in phases]
    table = pd.DataFrame(rows, columns=["phase", "rows", "seconds", "rows_per_second", "compiling"])
    return table.set_index("phase").round({"seconds": 3, "rows_per_second": 0, "compiling": 3})


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of all results. `draw` makes the figure of `.plot()`."""

    seconds: float
    draw: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    def summary(self) -> str:
        """Return the result as lines of text."""
        raise NotImplementedError(f"{type(self).__name__}.summary")

    def to_dict(self) -> dict:
        """Return the facts of the summary as JSON values (`--json`)."""
        hidden = {"draw", "frame", "history", "curves"}
        return {item.name: _facts(getattr(self, item.name)) for item in fields(self) if item.name not in hidden}

    def __str__(self) -> str:
        """Return the summary wrapped at 80 columns; a longer path stays whole."""
        return "\n".join(wrap_summary_line(line) for line in self.summary().splitlines())

    def plot(self) -> Any:
        """Return the matplotlib Figure of the result."""
        return self.draw() if self.draw else None


@dataclass(frozen=True, kw_only=True)
class RunResult(Result):
    """Result of a run that may have been resumed.

    found : status of the run when it was opened, in a sentence.
    resumed_from : epochs, blocks, folds or parts of an interrupted run; None where there are none, or where the
        run was finished before.
    reached : progress at which it was resumed, in words; "" from the beginning.
    exact : True where the bits are those of an uninterrupted run; else `inexact_because` lists the reasons.
    limited : limits of QUICK.
    """

    symbol: str
    horizon: int
    run_id: str
    resumed_from: int | None
    exact: bool
    inexact_because: list[str]
    reused: bool = False
    limited: dict = field(default_factory=dict)
    found: str = ""
    reached: str = ""

    def origin(self) -> pd.DataFrame:
        """Describe the origin of this result: what was found, where it resumed, and whether it is bit-exact."""
        resumed = self.reached or ("the beginning" if self.resumed_from is None else str(self.resumed_from))
        facts = {
            "found": self.found,
            "resumed from": "the end: it was finished before" if self.reused else resumed,
            "bits": "as uninterrupted" if self.exact else "continued, not bit-exact",
            "because": ", ".join(self.inexact_because),
        }
        return pd.DataFrame({"value": {name: text for name, text in facts.items() if text}}).rename_axis("this run")


@dataclass(frozen=True, kw_only=True)
class ModelResult(RunResult):
    """Result of a run that makes a model: its files, and its evaluation on test rows.

    metrics : a row per split (validation, test) and forecast, the baselines among them.
    verdict : on the test rows, over every baseline.
    calibration : predicted and observed frequency by class on test rows, `dataset_calibration_by_class`.
    findings : on the model, the most severe first.
    """

    metrics: pd.DataFrame
    artifact: Path
    predictions_path: Path
    predictions_hash: str
    report_path: Path
    verdict: ModelVerdict | None = None
    calibration: pd.DataFrame | None = None
    findings: tuple[Finding, ...] = ()

    def _lines_after(self, first: list[str], name: str) -> str:
        """Return the summary: these lines, the files, calibration and verdict of the forecast `name`."""
        files = {"model": self.artifact, "predictions": self.predictions_path, "report": self.report_path}
        written = [f"  {what} {path}" for what, path in files.items()]
        calibration = summary_calibration_lines(self.metrics, self.calibration, name)
        return "\n".join(
            [*first, *written, *calibration, *summary_verdict_lines(self.verdict), *finding_lines(self.findings)]
        )
