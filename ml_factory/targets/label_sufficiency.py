"""Whether labels and their split can answer the question that is asked: what is refused before anything is written.

A class that no training row has cannot be learnt, rows of a single class cannot judge, and a horizon that no session
holds asks of every row how it stands at the session's end.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.data.sessions import DAY_NS, session_days
from ml_factory.errors import FactoryError


def longest_session(start_ns: np.ndarray, calendar: str, base_minutes: int) -> int:
    """Base bars of the longest scheduled session around these bars' starts (int64 ns, UTC); a week on either side."""
    first, last = int(start_ns[0] // DAY_NS) - 7, int(start_ns[-1] // DAY_NS) + 7
    return int(session_days(calendar, first, last)[1].max()) // base_minutes


def check_horizon_fits(horizon: int, session_end: str, longest: int) -> None:
    """Refuse a horizon that no session holds; labels that go on into the next session may have any.

    Parameters
    ----------
    horizon : bars of the base frame.  session_end : as of `LabelSpec`.  longest : bars of the longest session.

    Raises FactoryError.
    """
    if horizon >= longest and session_end != "span":
        raise FactoryError(
            "The horizon is longer than a session", where=f"horizon {horizon}",
            got=f"{horizon} bars, while the longest session has {longest}",
            wanted=f"at most {longest - 1} bars, so that a label can reach its horizon",
            next_step="use a smaller horizon, or labels that go on into the next session: "
            "LabelSpec(session_end='span')",
        )  # fmt: skip


def check_classes(labels: pd.DataFrame, splits: Mapping[str, np.ndarray], classes: Mapping[str, int]) -> None:
    """Refuse a split whose training rows lack a class, or whose validation or test rows are of a single class.

    labels : columns label and barrier; ambiguous rows count for nothing.  splits : name -> positions.
    classes : name -> label.

    Raises FactoryError.
    """
    clear = (labels["barrier"] != "ambiguous").to_numpy()
    for part, rows in splits.items():
        y = labels["label"].to_numpy()[rows[clear[rows]]]
        counts = {name: int((y == label).sum()) for name, label in classes.items()}
        there = [name for name, count in counts.items() if count]
        if (part == "train" and len(there) < len(classes)) or len(there) < 2:
            wanted = "every class" if part == "train" else "at least two classes"
            raise FactoryError(
                f"The {part} rows cannot answer the question: they lack a class", where=f"{len(rows):,} {part} rows",
                got=", ".join(f"{name} {count:,}" for name, count in counts.items()), wanted=wanted,
                next_step="bring more bars, or ask what happens more often: barriers nearer or farther (k_up, k_down), "
                "another horizon",
            )  # fmt: skip
