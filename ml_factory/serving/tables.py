"""Tables of requests and answers: JSON values to frames, and back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ml_factory.errors import BarsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES


def bars_to_frame(bars: Sequence[Mapping] | Mapping[str, Sequence], largest: int, where: str = "bars") -> pd.DataFrame:
    """Return the bars of a request as a table. Raises BarsError for columns of unequal lengths, or too many bars."""
    if isinstance(bars, Mapping):
        lengths = {name: len(column) for name, column in bars.items()}
        if len(set(lengths.values())) > 1:
            raise BarsError(
                "The columns have unequal lengths", where=where, got=lengths, wanted="one value of each a bar"
            )
        count = next(iter(lengths.values()))
    else:
        count = len(bars)
    if count > largest:
        raise BarsError("Too many bars at once", where=where, got=count, wanted=f"at most {largest}",
                        next_step="send the newest bars alone, or open a stream")  # fmt: skip
    with refuse_damaged_content(BarsError, "These bars cannot be read", where=where, next_step="send a table of bars"):
        return pd.DataFrame(bars)


def frame_to_answers(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the answers for a frame with the columns of a prediction, guard and reason; NaN becomes null."""
    columns = [name for name in (*PROBABILITIES, "split", "side", "guard", "reason") if name in frame]
    lists = [frame[name].tolist() for name in columns]
    numbers = [name in (*PROBABILITIES, "side") for name in columns]
    answers = []
    for moment, *values in zip(frame.index, *lists, strict=True):
        answer: dict[str, Any] = {"known_at": None if moment is pd.NaT else moment.isoformat()}
        for name, number, value in zip(columns, numbers, values, strict=True):
            answer[name] = None if number and not math.isfinite(value) else value
        answers.append(answer)
    return answers
