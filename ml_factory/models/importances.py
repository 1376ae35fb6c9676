"""What a feature is worth to a fitted model: what it gave while training, and what is lost without it."""

import numpy as np
import pandas as pd

from ml_factory.models.contract import Estimator, check_rows
from ml_factory.seeding import generator

_FLOOR = 1e-15  # a probability of 0 would make one row's loss outweigh all others


def permutation_importances(
    model: Estimator, x, y, weight=None, *, repeats: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """How much the weighted log loss rises when one feature's values are dealt to other rows (Breiman 2001).

    Rows must be unseen by training, and not those that judge: validation rows. A rise near 0 says that the model does
    not use the feature, or that others say the same; a fall, that using it did harm.

    Returns
    -------
    (mean, spread), each float64 (F,) in nats a row: over `repeats` permutations, and their standard deviation.
    """
    x = np.array(x, dtype=np.float32)
    target, weight = check_rows(len(x), y, weight, where="importance")

    def loss() -> float:
        p = np.maximum(model.predict_proba(x)[np.arange(len(x)), target], _FLOOR)
        return float(-(weight @ np.log(p)) / weight.sum())

    whole = loss()
    rise = np.zeros((repeats, x.shape[1]))
    for column in range(x.shape[1]):
        kept = x[:, column].copy()
        for repeat in range(repeats):
            x[:, column] = kept[generator("permutation", seed, column, repeat).permutation(len(x))]
            rise[repeat, column] = loss() - whole
        x[:, column] = kept
    return rise.mean(axis=0), rise.std(axis=0)


def importance_table(model, names, x, y, weight=None, *, repeats: int = 3, seed: int = 0) -> pd.DataFrame:
    """A row a feature, the most useful first: gain (share of training's), permuted (nats a row), spread."""
    permuted, spread = permutation_importances(model, x, y, weight, repeats=repeats, seed=seed)
    table = {"gain": model.importances(), "permuted": permuted, "spread": spread}
    return pd.DataFrame(table, index=pd.Index(list(names), name="feature")).sort_values("permuted", ascending=False)
