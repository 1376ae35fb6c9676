"""The session clock as an offset: log class shares by time of the session, from which a model starts.

A model that is fitted with an offset learns what its features add to the time of the session; one that stops before its
first round predicts the clock's shares. N rows, C cells, 3 classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.models.rows import CLASSES

PROGRESS_CELLS = 48  # equal parts of the session, as in the clock baseline
PSEUDO_COUNT = 20.0  # rows with the overall class shares, added to each cell
TIMES = ("clock", "none")


@dataclass(frozen=True)
class SessionClockOffset:
    """Log class shares of the training rows by a column that grows evenly through the session.

    The scale of the column does not matter: cells lie between the smallest and the largest value of the training rows.
    Rows of the last `ending` steps have a cell per step, since the session's end cuts their labels short.

    column : index of the column among the model's inputs.
    low, high : its range.
    step : its usual change from bar to bar.
    ending : number of steps before the end with cells of their own.
    log_shares_C3 : float64 (PROGRESS_CELLS + ending, 3).
    """

    column: int
    low: float
    high: float
    step: float
    ending: int
    log_shares_C3: np.ndarray

    @classmethod
    def fit(
        cls, column_N: np.ndarray, target_N: np.ndarray, weight_N: np.ndarray | None = None, *, column: int, ending: int
    ) -> "SessionClockOffset":
        """Count training rows, each once.

        column_N : the column of these rows.
        target_N : their classes, 0 to 2.
        weight_N : rows of weight 0 are not counted; None: all are.
        """
        taken = slice(None) if weight_N is None else weight_N > 0
        values, target_N = np.asarray(column_N, dtype=np.float64)[taken], np.asarray(target_N)[taken]
        known = np.unique(values[np.isfinite(values)])
        low, high = (float(known[0]), float(known[-1])) if len(known) else (0.0, 0.0)
        changes = np.diff(values)
        step = float(np.median(changes[changes > 0])) if (changes > 0).any() else 0.0  # usual step upward
        empty = cls(column, low, high, step, ending, np.zeros((PROGRESS_CELLS + ending, 3)))
        counts = np.zeros_like(empty.log_shares_C3)
        np.add.at(counts, (empty._cells(values), target_N), 1.0)
        prior = counts.sum(axis=0) + 0.5
        shares = (counts + PSEUDO_COUNT * prior / prior.sum()) / (counts.sum(axis=1, keepdims=True) + PSEUDO_COUNT)
        return cls(column, low, high, step, ending, np.log(shares))

    def log_class_shares(self, column_N: np.ndarray) -> np.ndarray:
        """Return log class shares of the rows' cells, float64 (N, 3)."""
        return self.log_shares_C3[self._cells(np.asarray(column_N, dtype=np.float64))]

    def _cells(self, values: np.ndarray) -> np.ndarray:
        """Return the cell of each row, int64 (N,); a missing value counts as the session's begin."""
        values = np.clip(np.nan_to_num(values, nan=self.low), self.low, self.high)
        share = (values - self.low) / ((self.high - self.low) or 1.0)
        progress = np.minimum((share * PROGRESS_CELLS).astype(np.int64), PROGRESS_CELLS - 1)
        if not self.step > 0:
            return progress
        left = np.rint(np.minimum((self.high - values) / self.step, self.ending)).astype(np.int64)
        return np.where(left < self.ending, PROGRESS_CELLS + left, progress)

    def to_dict(self) -> dict:
        return {**vars(self)}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "SessionClockOffset":
        numbers = {name: float(stored[name]) for name in ("low", "high", "step")}
        column, ending, shares = int(stored["column"]), int(stored["ending"]), np.array(stored["log_shares_C3"])
        if shares.shape != (PROGRESS_CELLS + ending, len(CLASSES)):
            raise ValueError(f"shares of the shape {shares.shape}")
        return cls(column, **numbers, ending=ending, log_shares_C3=shares)
