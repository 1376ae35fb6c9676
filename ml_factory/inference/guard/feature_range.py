"""Check of feature values against the range of training: of the rows of a request, and of those of a feed."""

from collections.abc import Sequence

import numpy as np

from ml_factory.inference.guard.alarms import Event
from ml_factory.inference.guard.histograms import BINS
from ml_factory.inference.guard.reference import GuardReference


class FeatureRange:
    """Range of each feature on training rows; a value is outside where it is further away than the range is wide.

    names : of the features
    """

    def __init__(self, names: Sequence[str], reference: GuardReference):
        self._names, self._low, self._high = list(names), reference.low, reference.high
        self._margin = reference.high - reference.low
        self._never_absent = reference.rows.bins.shares[: len(self._names), BINS] == 0

    def messages(self, values: np.ndarray) -> list[str]:
        """Return what is wrong with rows, float (N, F): values outside, NaN where training never has it."""
        return [text for text in (self._absent(values), self._outside(values)) if text]

    def events(self, values: np.ndarray, bars: np.ndarray) -> list[Event]:
        """Return the events of the next feature rows, float (N, F); `bars`: the newest bar known at each."""
        wrong = (self._distance(values) > 0).any(axis=1) | (np.isnan(values) & self._never_absent).any(axis=1)
        return [
            Event(int(bars[row]), "range", "; ".join(self.messages(values[row : row + 1])))
            for row in np.flatnonzero(wrong).tolist()
        ]  # fmt: skip

    def _distance(self, values: np.ndarray) -> np.ndarray:
        """Return how far each value is outside, float64 (N, F); NaN where it is absent."""
        values = np.asarray(values, np.float64)
        return np.maximum(self._low - self._margin - values, values - self._high - self._margin)

    def _absent(self, values: np.ndarray) -> str:
        absent = np.isnan(values).any(axis=0) & self._never_absent
        if not absent.any():
            return ""
        names = ", ".join(np.array(self._names)[absent][:5])
        return f"{int(absent.sum())} features are NaN that never are in training ({names}), numbers wanted"

    def _outside(self, values: np.ndarray) -> str:
        distance = self._distance(values)
        outside = (distance > 0).any(axis=0)
        if not outside.any():
            return ""
        place = int(np.argmax(outside))
        value, low, high = values[int(np.nanargmax(distance[:, place])), place], self._low[place], self._high[place]
        message = f"{int(outside.sum())} features are outside the range of training: {self._names[place]} is "
        return message + f"{value:.4g}, between {low:.4g} and {high:.4g} wanted"
