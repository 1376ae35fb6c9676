"""Tables of requests and answers: JSON values to frames, and back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.guard import ACTIONS, Finding

Columns = dict[str, list]


def check_symbol_column(columns: Mapping[str, Sequence], symbol: str, where: object) -> None:
    """Raise BarsError for bars that name another symbol in a column of theirs."""
    for name, column in columns.items():
        if str(name).strip().lower() == "symbol":
            others = [str(one) for one in dict.fromkeys(column) if one is not None and str(one) != symbol]
            if others:
                raise BarsError("These are bars of another symbol", where=where, got=", ".join(others[:3]),
                                wanted=symbol, next_step=f"give bars of {symbol} alone")  # fmt: skip


def to_columns(bars: Sequence[Mapping] | Mapping[str, Sequence]) -> Columns:
    """Return the bars of a request as a list for each column. Raises BarsError for columns of unequal lengths."""
    if isinstance(bars, Mapping):
        columns = {name: list(column) for name, column in bars.items()}
    else:
        names = list(dict.fromkeys(name for bar in bars for name in bar))
        columns = {name: [bar.get(name) for bar in bars] for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BarsError("The columns have unequal lengths", where="bars", got=lengths, wanted="one value of each a bar")
    return columns


def to_frame(columns: Columns) -> pd.DataFrame:
    """Return the bars of a request as a table. Raises BarsError."""
    with refuse_damaged_content(BarsError, "These bars cannot be read", where="bars", next_step="send a table of bars"):
        return pd.DataFrame(columns)


def frame_to_answers(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the answers for a frame with the columns of a prediction, guard and reason; NaN becomes null."""
    columns = [name for name in (*PROBABILITIES, "split", "side", "guard", "reason") if name in frame]
    lists = [frame[name].tolist() for name in columns]
    numbers = [name in (*PROBABILITIES, "side") for name in columns]
    answers = []
    for moment, *values in zip(frame.index, *lists, strict=True):
        answer: dict[str, Any] = {"known_at": moment.isoformat()}
        for name, number, value in zip(columns, numbers, values, strict=True):
            answer[name] = None if number and not math.isfinite(value) else value
        answers.append(answer)
    return answers


def apply_findings(frame: pd.DataFrame, findings: Sequence[Finding]) -> pd.DataFrame:
    """Return the predictions of a request with `guard` and `reason`; without probabilities where the guard abstains.

    Raises BarsError where it refuses.
    """
    for finding in findings:
        if finding.action == "refuse":
            raise BarsError(f"The guard refuses these bars ({finding.kind})", where="bars", got=finding.message,
                            next_step="correct the feed")  # fmt: skip
    action = max((finding.action for finding in findings), key=ACTIONS.index, default="ok")
    frame = frame.assign(guard=action, reason="; ".join(finding.message for finding in findings))
    if action == "abstain":
        frame[PROBABILITIES] = np.nan
    return frame
