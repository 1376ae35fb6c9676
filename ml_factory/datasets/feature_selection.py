"""Feature selection from the training rows of a fold alone.

Sources: Lopez de Prado, Advances in Financial Machine Learning (2018), chapter 8, for MDI and MDA; Machine Learning for
Asset Managers (2020), chapter 4, for clusters of columns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.seeding import derive_seed, seeded_generator
from ml_factory.targets.splits import purged_kfold
from ml_factory.targets.weights import training_weights

CORRELATION_ROWS = 50_000
TREE_ROWS = 20_000


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


def select_by_mdi(
    sample: TransformFitSample, share: float = 0.5, trees: int = 100, depth: int = 6, seed: int = 0
) -> FeatureSelection:
    """Select the `share` of the columns with the greatest mean decrease of impurity.

    The trees choose from one random column a split. Zeros of trees that could not choose a column are left out of its
    mean (AFML 8.3.1).
    """
    x_RF, y, weights, _ = _training_sample(sample)
    forest = _forest(trees, depth, seed).fit(x_RF, y, weights)
    shares = np.array([tree.feature_importances_ for tree in forest.estimators_])
    counts = np.maximum((shares > 0).sum(axis=0), 1)
    scores = shares.sum(axis=0) / counts
    scores /= max(scores.sum(), 1e-300)
    count = max(1, round(share * len(scores)))
    return _select("mdi", np.argsort(-scores, kind="stable")[:count], scores)


def select_by_mda(
    sample: TransformFitSample, folds: int = 3, embargo: int = 64, trees: int = 100, depth: int = 6, seed: int = 0
) -> FeatureSelection:
    """Select columns whose shuffling raises the log loss of forests in the evaluated rows, over purged folds.

    The folds lie inside the training rows (AFML 8.3.2). The score is the mean rise over the shuffled log loss; where no
    column has one, the best is selected.
    """
    metrics = import_module_or_explain("sklearn.metrics")
    x_RF, y, weights, targets = _training_sample(sample)
    rises = []
    for number, (train, test) in enumerate(purged_kfold(targets, folds, embargo)):
        forest = _forest(trees, depth, derive_seed(seed, "mda", number)).fit(x_RF[train], y[train], weights[train])
        test = test[np.isin(y[test], forest.classes_)]

        def loss(p: np.ndarray, forest=forest, test=test) -> float:
            return metrics.log_loss(y[test], p, sample_weight=weights[test], labels=forest.classes_)

        unshuffled = loss(forest.predict_proba(x_RF[test]))
        worse = []
        for column in range(x_RF.shape[1]):
            shuffled = x_RF[test]
            shuffled[:, column] = seeded_generator("mda", number, column, seed).permutation(shuffled[:, column])
            worse.append(loss(forest.predict_proba(shuffled)))
        rises.append((np.array(worse) - unshuffled) / worse)
    scores = np.mean(rises, axis=0)
    kept = np.flatnonzero(scores > 0)
    return _select("mda", kept if len(kept) else [scores.argmax()], scores)


SELECTIONS: dict[str, Callable[..., FeatureSelection]] = {
    "variance": select_by_variance, "clusters": select_by_clusters, "mdi": select_by_mdi, "mda": select_by_mda,
}  # fmt: skip


def _select(kind: str, columns, scores: np.ndarray) -> FeatureSelection:
    columns = np.sort(np.asarray(columns, np.int64))
    if not len(columns):
        raise SettingsError("No column is left", where=kind, got=f"{len(scores)} columns", next_step="lower its limit")
    return FeatureSelection(kind, columns, np.asarray(scores, np.float64))


def _training_sample(sample: TransformFitSample):
    """Return x_RF, y, weights and targets of at most TREE_ROWS weighted training rows; missing values are 0."""
    if sample.targets is None:
        raise SettingsError("This needs the labels of the training rows", where="MDI or MDA", got="none")
    some = sample.subsample(TREE_ROWS)
    targets = sample.targets.iloc[some]
    weights = training_weights(targets)
    some, targets, weights = some[weights > 0], targets[weights > 0], weights[weights > 0]
    if targets["label"].nunique() < 2:
        raise SettingsError("Trees need rows of two classes", where="MDI or MDA", got=len(targets))
    x_RF = np.nan_to_num(sample.x_NF[sample.rows[some]], nan=0.0, posinf=0.0, neginf=0.0)
    return x_RF, targets["label"].to_numpy(), weights, targets


def _forest(trees: int, depth: int, seed: int):
    ensemble = import_module_or_explain("sklearn.ensemble")
    return ensemble.RandomForestClassifier(
        trees, criterion="entropy", max_features=1, max_depth=depth, class_weight="balanced_subsample",
        random_state=derive_seed(seed, "forest"), n_jobs=1,
    )  # fmt: skip
