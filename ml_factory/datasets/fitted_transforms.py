"""Transforms fitted for each fold on its training rows: principal components.

Each is fitted on a `TransformFitSample`, stores numbers only, and transforms every row from itself: the same bits
whatever comes after.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from ml_factory.errors import SettingsError

MOST_ROWS = 200_000  # of the training rows, to estimate a few hundred numbers


@dataclass(frozen=True)
class TransformFitSample:
    """Input of a fit: all rows, of which only the training rows may be used.

    x_NF : float32, all rows
    names : its columns
    rows : int64 positions of the training rows, increasing
    """

    x_NF: np.ndarray
    names: tuple[str, ...]
    rows: np.ndarray


@dataclass(frozen=True)
class PcaTransform:
    """The leading principal components instead of the columns; missing values count as the mean.

    center, scale : float64[F]
    loadings : float64 (F, K), the largest of each component positive
    """

    center: np.ndarray
    scale: np.ndarray
    loadings: np.ndarray

    kind = "pca"

    @classmethod
    def fit(cls, sample: TransformFitSample, share: float = 0.95) -> "PcaTransform":
        """Fit as many components as hold `share` of the variance of the standardised columns, at most 1,000."""
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError("Not a share", where="pca share", got=repr(share), wanted="above 0, at most 1")
        spread = np.linspace(0, len(sample.rows) - 1, min(MOST_ROWS, len(sample.rows))).astype(np.int64)
        x = sample.x_NF[sample.rows[spread]].astype(np.float64)
        x[~np.isfinite(x)] = np.nan
        present = ~np.isnan(x).all(axis=0)
        center, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
        center[present], scale[present] = np.nanmean(x[:, present], axis=0), np.nanstd(x[:, present], axis=0)
        scale[~(scale > 1e-12 * np.maximum(1.0, np.abs(center)))] = 1.0
        z = np.nan_to_num((x - center) / scale)
        values, vectors = np.linalg.eigh(z.T @ z / len(z))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        count = 1 + int(np.searchsorted(np.cumsum(values), share * values.sum()))
        loadings = vectors[:, : max(1, min(count, 1000, len(values)))]
        largest = loadings[np.abs(loadings).argmax(axis=0), np.arange(loadings.shape[1])]
        return cls(center, scale, np.ascontiguousarray(loadings * np.where(largest < 0, -1.0, 1.0)))

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return float32 (N, K)."""
        return _project(np.ascontiguousarray(x_NF, np.float32), self.center, self.scale, self.loadings)

    def names_out(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"component_{k + 1}" for k in range(self.loadings.shape[1]))

    def to_dict(self) -> dict:
        return {"kind": self.kind} | {name: getattr(self, name).tolist() for name in ("center", "scale", "loadings")}

    @classmethod
    def from_dict(cls, stored: dict) -> "PcaTransform":
        return cls(*(np.asarray(stored[name], np.float64) for name in ("center", "scale", "loadings")))


@njit(cache=True, nogil=True)
def _project(x_NF, center, scale, loadings):
    """Project row by row in one order of addition, so that a row's bits do not depend on other rows."""
    out = np.empty((len(x_NF), loadings.shape[1]), np.float32)
    total = np.empty(loadings.shape[1])
    for i in range(len(x_NF)):
        total[:] = 0.0
        for f in range(len(center)):
            z = (x_NF[i, f] - center[f]) / scale[f]
            if np.isfinite(z):
                for k in range(len(total)):
                    total[k] += z * loadings[f, k]
        out[i] = total
    return out
