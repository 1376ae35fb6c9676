"""Checks that labels and their split suffice for training, before anything is written.

A class without training rows cannot be learnt, rows of a single class cannot evaluate a model, and with a horizon that
no session holds every label ends at the session's end.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.data.sessions import DAY_NS, scheduled_session_days
from ml_factory.errors import FactoryError


def longest_session_bars(start_ns: np.ndarray, calendar: str, base_minutes: int) -> int:
    """Return the base bars of the longest scheduled session around these bars' starts (int64 ns, UTC)."""
    first, last = int(start_ns[0] // DAY_NS) - 7, int(start_ns[-1] // DAY_NS) + 7
    return int(scheduled_session_days(calendar, first, last)[1].max()) // base_minutes


def check_horizon_fits_session(horizon: int, session_end: str, longest: int) -> None:
    """Refuse a horizon that no session holds, unless labels span sessions.

    Parameters
    ----------
    horizon : bars of the base frame
    session_end : as in `LabelSpec`
    longest : bars of the longest session

    Raises
    ------
    FactoryError : the horizon is too long
    """
    if horizon >= longest and session_end != "span":
        raise FactoryError(
            "The horizon is longer than a session", where=f"horizon {horizon}",
            got=f"{horizon} bars, while the longest session has {longest}",
            wanted=f"at most {longest - 1} bars, so that a label can reach its horizon",
            next_step="use a smaller horizon, or labels that continue into the next session: "
            "LabelSpec(session_end='span')",
        )  # fmt: skip


def check_class_sufficiency(labels: pd.DataFrame, splits: Mapping[str, np.ndarray], classes: Mapping[str, int]) -> None:
    """Refuse a split whose training rows lack a class, or whose validation or test rows are of a single class.

    Parameters
    ----------
    labels : columns label and barrier; ambiguous rows are ignored
    splits : name -> positions
    classes : name -> label

    Raises
    ------
    FactoryError : a part lacks a class
    """
    clear = (labels["barrier"] != "ambiguous").to_numpy()
    for part, rows in splits.items():
        y = labels["label"].to_numpy()[rows[clear[rows]]]
        counts = {name: int((y == label).sum()) for name, label in classes.items()}
        present = [name for name, count in counts.items() if count]
        if (part == "train" and len(present) < len(classes)) or len(present) < 2:
            wanted = "every class" if part == "train" else "at least two classes"
            raise FactoryError(
                f"The {part} rows lack a class", where=f"{len(rows):,} {part} rows",
                got=", ".join(f"{name} {count:,}" for name, count in counts.items()), wanted=wanted,
                next_step="give more bars, nearer or farther barriers (k_up, k_down), or another horizon",
            )  # fmt: skip
