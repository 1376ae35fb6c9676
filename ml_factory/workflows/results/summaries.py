"""Lines of result summaries: QUICK limits, calibration on test rows, the verdict; wrapped at 80 columns."""

import textwrap
from typing import Any

import pandas as pd

from ml_factory.evaluation.verdict import ModelVerdict, format_verdict_bounds


def summary_warning_lines(result: Any) -> list[str]:
    """Return the warnings of a result: limits of QUICK, and a run that was continued on another machine."""
    limits = ", ".join(f"{name} {value}" for name, value in result.limited.items())
    lines = [f"  QUICK limited: {limits}"] if limits else []
    return lines + ([] if result.exact else [f"  continued, not bit-exact: {', '.join(result.inexact_because)}"])


def wrap_summary_line(line: str) -> str:
    """Wrap a line of a summary at 80 columns, indented; words are never cut."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line, 80, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def summary_verdict_lines(verdict: ModelVerdict | None) -> list[str]:
    """Return the last lines of a summary: the verdict in a sentence, and four numbers."""
    if verdict is None:
        return []
    best = format_verdict_bounds(verdict.gain_best, verdict.gain_best_low, verdict.gain_best_high)
    side = format_verdict_bounds(verdict.direction_gain, verdict.direction_low, verdict.direction_high)
    return [
        verdict.sentence,
        f"  gain over the best baseline  {best}  {verdict.best_baseline}",
        *([] if verdict.kind == "meta" else [f"  directional gain             {side}"]),
        f"  rows evaluated               {verdict.rows:,}",
        f"  effective rows               {verdict.effective_rows:,.0f}",
    ]


def summary_calibration_lines(metrics: pd.DataFrame, calibration: pd.DataFrame | None, name: str) -> list[str]:
    """Return calibration error and frequency by class of a forecast of the test rows, predicted and observed.

    metrics : with `split`, `name`, `ece`.
    calibration : as of `dataset_calibration_by_class`; None: no lines.
    """
    if calibration is None:
        return []
    error = metrics.loc[(metrics["split"] == "test") & (metrics["name"] == name), "ece"].iloc[0]
    rows = calibration[calibration["name"] == name]
    pairs = zip(rows["class"], rows["predicted"], rows["observed"], strict=True)
    shares = ", ".join(f"{side} {predicted:.3f}/{observed:.3f}" for side, predicted, observed in pairs)
    return [f"  calibration error            {error:.4f}", f"  predicted/observed  {shares}"]
