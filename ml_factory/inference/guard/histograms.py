"""Distances of a moving window from reference quantiles: population stability index and Kolmogorov-Smirnov.

Values are counted in the bins of the reference's quantiles, absent values in a bin of their own. Counts are whole
numbers, so distances do not depend on how the rows were pushed.
"""

from collections.abc import Mapping

import numpy as np

BINS = 20
_LEAST_SHARE = 0.5  # of an observation, in an empty bin


class ReferenceBins:
    """Bins between quantiles of C columns of training.

    edges : float64 [C, BINS - 1], rising; +inf where a column has fewer bins. A value equal to an edge is above it
    shares : float64 [C, BINS + 1], share of training rows in each bin; the last bin is that of absent values
    """

    def __init__(self, edges: np.ndarray, shares: np.ndarray):
        self.edges, self.shares = np.asarray(edges, np.float64), np.asarray(shares, np.float64)

    @classmethod
    def fit(cls, values: np.ndarray) -> "ReferenceBins":
        """Return the bins of training rows, float (N, C)."""
        edges = np.full((values.shape[1], BINS - 1), np.inf)
        for column in range(values.shape[1]):
            finite = values[:, column][np.isfinite(values[:, column])]
            if len(finite):
                found = np.unique(np.quantile(finite, np.arange(1, BINS) / BINS))
                edges[column, : len(found)] = found
        codes = cls(edges, np.empty((len(edges), BINS + 1))).codes(values)
        shares = np.stack([np.bincount(codes[:, column], minlength=BINS + 1) for column in range(len(edges))])
        return cls(edges, shares / max(len(values), 1))

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Return the bin of each value, uint8 (N, C)."""
        out = np.empty(values.shape, np.uint8)
        for column, edges in enumerate(self.edges):
            out[:, column] = np.searchsorted(edges, values[:, column], side="right")
        out[~np.isfinite(values)] = BINS
        return out

    def distances(self, counts: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (PSI, KS), float64 [..., C], of windows with these counts [..., C, BINS + 1]."""
        least = _LEAST_SHARE / window
        expected, observed = np.maximum(self.shares, least), np.maximum(counts / window, least)
        terms = (observed - expected) * np.log(observed / expected)
        steps = counts / window - self.shares
        psi, ahead, ks = np.zeros(counts.shape[:-1]), np.zeros(counts.shape[:-1]), np.zeros(counts.shape[:-1])
        for place in range(BINS + 1):  # in this order whatever the shape: the same bits for one window and many
            psi += terms[..., place]
            ahead += steps[..., place]
            ks = np.maximum(ks, np.abs(ahead))
        return psi, ks

    def middle_ranks(self) -> np.ndarray:
        """Return the mid-p value of each bin minus 1/2, float64 [C, BINS + 1]: their mean over training is 0."""
        return np.cumsum(self.shares, axis=1) - self.shares / 2 - 0.5


class MovingCounts:
    """Counts of the last `window` rows in bins, taken at every `step`-th row."""

    def __init__(self, columns: int, window: int, step: int):
        self._window, self._step, self._rows = window, step, 0
        self._codes = np.zeros((0, columns), np.uint8)

    def push(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, counts): places in `codes` after which a whole window was counted, and its counts
        int64 [E, C, BINS + 1].
        """
        joined = np.concatenate([self._codes, codes])
        total = self._rows + np.arange(1, len(codes) + 1)
        rows = np.flatnonzero((total % self._step == 0) & (total >= self._window))
        ends = rows + len(self._codes) + 1
        counts = np.zeros((len(rows), codes.shape[1], BINS + 1), np.int64)
        if len(rows):
            first = int(ends[0]) - self._window
            for place in range(BINS + 1):
                summed = np.cumsum(joined[first:] == place, axis=0, dtype=np.int64)
                summed = np.concatenate([np.zeros((1, codes.shape[1]), np.int64), summed])
                counts[:, :, place] = summed[ends - first] - summed[ends - first - self._window]
        self._rows += len(codes)
        self._codes = joined[len(joined) - min(self._window - 1, len(joined)) :].copy()
        return rows, counts

    def get_state(self) -> dict:
        return {"rows": self._rows, "codes": self._codes.copy()}

    def load_state(self, state: Mapping) -> None:
        self._rows, self._codes = int(state["rows"]), np.array(state["codes"], np.uint8)
