"""Coarse bars, each with the moment it became known."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Frame:
    """Bars of one length as columns; every array has N entries in time order.

    start, known_at : int64 nanoseconds, UTC. `known_at` is when the bar is complete.
    open, high, low, close : float64. volume : float64, or None where the market has none.
    session : int32, the exchange day as days since 1970-01-01 (never a count from the file's start).
    segment : int32, changes at each session edge and at each hole; labels and windows stay inside one.
    """

    minutes: int
    start: np.ndarray
    known_at: np.ndarray
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray | None
    session: np.ndarray
    segment: np.ndarray

    def __len__(self) -> int:
        return len(self.start)
