"""Feature selection from the training rows of a fold alone.

Clusters of columns: Lopez de Prado, Machine Learning for Asset Managers (2020), chapter 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import import_module_or_explain

CORRELATION_ROWS = 50_000


@dataclass(frozen=True)
class FeatureSelection:
    """Selected columns, in their order.

    kind : method of selection
    kept : positions
    scores : float64[F], the criterion for each column
    """

    kind: str
    kept: np.ndarray
    scores: np.ndarray

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return the selected columns, float32 (N, K)."""
        return np.ascontiguousarray(x_NF[:, self.kept], np.float32)

    def names_out(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names[column] for column in self.kept)

    def to_dict(self) -> dict:
        return {"kind": self.kind, "kept": self.kept.tolist(), "scores": self.scores.tolist()}

    @classmethod
    def from_dict(cls, stored: dict) -> "FeatureSelection":
        return cls(stored["kind"], np.asarray(stored["kept"], np.int64), np.asarray(stored["scores"], np.float64))


def select_by_variance(sample: TransformFitSample, least: float = 1e-8) -> FeatureSelection:
    """Select columns whose variance over the training rows exceeds `least`; the score is the variance."""
    x = sample.x_NF[sample.rows[sample.subsample()]].astype(np.float64)
    x[~np.isfinite(x)] = np.nan
    present = ~np.isnan(x).all(axis=0)
    scores = np.zeros(x.shape[1])
    scores[present] = np.nanvar(x[:, present], axis=0)
    return _select("variance", np.flatnonzero(scores > least), scores)


def select_by_clusters(sample: TransformFitSample, most: float = 0.9) -> FeatureSelection:
    """Select one column of each cluster, in which every pair has |rank correlation| of at least `most`.

    Complete linkage over 1 - |rho|; the column nearest to all others of its cluster is selected, then the first. The
    score is the cluster's number.
    """
    if not 0 < most < 1:
        raise SettingsError("Not a correlation", where="clusters most", got=most, wanted="between 0 and 1")
    stats, hierarchy = (import_module_or_explain(f"scipy.{name}") for name in ("stats", "cluster.hierarchy"))
    x = sample.x_NF[sample.rows[sample.subsample(CORRELATION_ROWS)]].astype(np.float64)
    x[~np.isfinite(x)] = np.nan
    ranks = stats.rankdata(x, axis=0, nan_policy="omit")
    centred = np.nan_to_num(ranks - np.nanmean(np.where(np.isnan(ranks).all(axis=0), 0.0, ranks), axis=0))
    norms = np.sqrt((centred**2).sum(axis=0))
    rho = np.abs(centred.T @ centred) / np.maximum(np.outer(norms, norms), 1e-300)
    count = len(rho)
    if count < 2:
        return _select("clusters", np.arange(count), np.ones(count))
    apart = np.clip(1.0 - rho[np.triu_indices(count, 1)], 0.0, 1.0)
    cluster = hierarchy.fcluster(hierarchy.linkage(apart, "complete"), 1.0 - most, "distance")
    near = (rho * (cluster[:, None] == cluster)).sum(axis=0).round(9)
    members = (np.flatnonzero(cluster == number) for number in np.unique(cluster))
    return _select("clusters", [some[near[some].argmax()] for some in members], cluster.astype(np.float64))


SELECTIONS: dict[str, Callable[..., FeatureSelection]] = {
    "variance": select_by_variance, "clusters": select_by_clusters,
}  # fmt: skip


def _select(kind: str, columns, scores: np.ndarray) -> FeatureSelection:
    columns = np.sort(np.asarray(columns, np.int64))
    if not len(columns):
        raise SettingsError("No column is left", where=kind, got=f"{len(scores)} columns", next_step="lower its limit")
    return FeatureSelection(kind, columns, np.asarray(scores, np.float64))
