"""Feature importances of a fitted model: gain while training, and permutation importance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ml_factory.models.base import ModelBase
from ml_factory.models.rows import check_training_rows
from ml_factory.models.tabular import TabularModel
from ml_factory.seeding import seeded_generator

_FLOOR = 1e-15  # floor of probabilities, so that no single row dominates the loss


def permutation_importances(
    model: ModelBase, x, y, weight=None, *, columns: Sequence[int] | None = None, repeats: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Compute permutation importances: the increase of the weighted log loss when a feature is shuffled (Breiman 2001).

    Use validation rows: unseen by training, and no test rows. An increase near 0 means that the model does not use the
    feature, or that other features replace it; a decrease, that using it did harm.

    columns : columns to permute; None: all.

    Returns
    -------
    (mean, spread), each float64 (columns,) in nats a row: over `repeats` permutations, and their standard deviation.
    """
    x = np.array(x, dtype=np.float32)
    target, weight = check_training_rows(len(x), y, weight, where="importance")
    columns = range(x.shape[1]) if columns is None else columns

    def loss() -> float:
        p = np.maximum(model.predict_proba(x)[np.arange(len(x)), target], _FLOOR)
        return float(-(weight @ np.log(p)) / weight.sum())

    whole = loss()
    rise = np.zeros((repeats, len(columns)))
    for place, column in enumerate(columns):
        kept = x[:, column].copy()
        for repeat in range(repeats):
            x[:, column] = kept[seeded_generator("permutation", 0, int(column), repeat).permutation(len(x))]
            rise[repeat, place] = loss() - whole
        x[:, column] = kept
    return rise.mean(axis=0), rise.std(axis=0)


def feature_importance_table(
    model: ModelBase, names: Sequence[str], x, y, weight=None, *, top: int = 20, rows: int = 2_000, repeats: int = 3
) -> pd.DataFrame:
    """Return a row per feature, those of greatest gain: gain (share of training's), permuted (nats a row), spread.

    rows : number of evenly spaced rows to permute, at most. Empty for a network, which has no gains.
    """
    columns = ["gain", "permuted", "spread"]
    if not isinstance(model, TabularModel):
        return pd.DataFrame(columns=columns, index=pd.Index([], name="feature"), dtype=float)
    gain = model.importances()
    best = np.argsort(-gain, kind="stable")[:top]
    some = np.unique(np.linspace(0, len(x) - 1, min(rows, len(x))).astype(np.int64))
    weight = None if weight is None else np.asarray(weight)[some]
    permuted, spread = permutation_importances(
        model, np.asarray(x)[some], np.asarray(y)[some], weight, columns=best, repeats=repeats
    )
    index = pd.Index([names[column] for column in best], name="feature")
    return pd.DataFrame(np.column_stack([gain[best], permuted, spread]), columns=columns, index=index)
