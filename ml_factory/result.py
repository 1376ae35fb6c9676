"""What a verb returns: its facts as attributes, a summary to read, a figure, JSON values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from ml_factory.evaluation.verdict import ModelVerdict, format_verdict_bounds
from ml_factory.storage.json_values import to_json_value


class Result:
    """Facts of a verb as attributes; the verb's docstring lists them.

    lines : of the summary.
    figure : makes the figure of `.plot()`; None without one.
    also : attributes that are no facts of `.to_dict()`, such as long tables.
    facts : the other attributes.
    """

    def __init__(
        self, lines: Sequence[str], *, figure: Callable[[], Any] | None = None, also: Mapping[str, Any] | None = None,
        **facts: Any,
    ):  # fmt: skip
        self._lines, self._figure, self._facts = tuple(lines), figure, facts
        vars(self).update({**(also or {}), **facts})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"This result has no {name}; it has {', '.join(one for one in vars(self) if one[0] != '_')}"
        )

    def summary(self) -> str:
        """Return the result as lines of text."""
        return "\n".join(self._lines)

    __str__ = summary

    def plot(self) -> Any:
        """Return the matplotlib Figure of the result; None where it has none."""
        return self._figure() if self._figure else None

    def to_dict(self) -> dict:
        """Return the facts as JSON values (`--json`); a table as its records, with the index where it has a name."""
        return {name: _json_fact(value) for name, value in self._facts.items()}


def _json_fact(value: Any) -> Any:
    if isinstance(value, pd.DataFrame):
        table = value.reset_index() if value.index.name or value.index.nlevels > 1 else value
        return to_json_value(table.to_dict("records"))
    if isinstance(value, dict):
        return {str(name): _json_fact(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_json_fact(one) for one in value]
    return to_json_value(value.to_dict() if hasattr(value, "to_dict") else value)


def origin_table(facts: Mapping[str, Any]) -> pd.DataFrame:
    """Describe the origin of a run's result: what was found, where it resumed, and whether it is bit-exact.

    facts : found, reused, resumed_from, reached, exact and inexact_because of the result.
    """
    resumed = facts["reached"] or ("the beginning" if facts["resumed_from"] is None else str(facts["resumed_from"]))
    shown = {
        "found": facts["found"],
        "resumed from": "the end: it was finished before" if facts["reused"] else resumed,
        "bits": "as uninterrupted" if facts["exact"] else "continued, not bit-exact",
        "because": ", ".join(facts["inexact_because"]),
    }
    return pd.DataFrame({"value": {name: text for name, text in shown.items() if text}}).rename_axis("this run")


def limits_lines(limited: Mapping[str, Any], inexact: Sequence[str]) -> list[str]:
    """Return the warnings of a summary: limits of QUICK, and a run that was continued on another machine."""
    limits = ", ".join(f"{name} {value}" for name, value in limited.items())
    lines = [f"  QUICK limited: {limits}"] if limits else []
    return lines + ([f"  continued, not bit-exact: {', '.join(inexact)}"] if inexact else [])


def verdict_lines(verdict: ModelVerdict) -> list[str]:
    """Return the last lines of a summary: the verdict in a sentence, and four numbers."""
    best = format_verdict_bounds(verdict.gain_best, verdict.gain_best_low, verdict.gain_best_high)
    side = format_verdict_bounds(verdict.direction_gain, verdict.direction_low, verdict.direction_high)
    return [
        verdict.sentence,
        f"  gain over the best baseline  {best}  {verdict.best_baseline}",
        *([] if verdict.kind == "meta" else [f"  directional gain             {side}"]),
        f"  rows evaluated               {verdict.rows:,}",
        f"  effective rows               {verdict.effective_rows:,.0f}",
    ]


def calibration_lines(metrics: pd.DataFrame, calibration: pd.DataFrame, name: str) -> list[str]:
    """Return calibration error and frequency by class of a forecast of the test rows, predicted and observed.

    metrics : with `split`, `name`, `ece`. calibration : as of `dataset_calibration_by_class`.
    """
    error = metrics.loc[(metrics["split"] == "test") & (metrics["name"] == name), "ece"].iloc[0]
    rows = calibration[calibration["name"] == name]
    pairs = zip(rows["class"], rows["predicted"], rows["observed"], strict=True)
    shares = ", ".join(f"{side} {predicted:.3f}/{observed:.3f}" for side, predicted, observed in pairs)
    return [f"  calibration error            {error:.4f}", f"  predicted/observed  {shares}"]
