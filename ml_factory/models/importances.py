"""Feature importances of a fitted model: gain while training, and permutation importance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ml_factory.lazy_module import LazyModule
from ml_factory.models.rows import CLASSES
from ml_factory.models.tabular import TabularModel

inspection, metrics = LazyModule("sklearn.inspection"), LazyModule("sklearn.metrics")  # only a training reads them


def feature_importance_table(
    model: TabularModel, names: Sequence[str], x, y, weight=None, *, top: int = 20, rows: int = 2_000, repeats: int = 3
) -> pd.DataFrame:
    """Return a row per feature, those of greatest gain: gain (share of training's), permuted (nats a row), spread.

    permuted : increase of the weighted log loss when the feature is shuffled (Breiman 2001), mean of the repeats;
        spread is their deviation. Near 0 the model does not use the feature, or others replace it; below, it did harm.
    x, y, weight : validation rows: unseen by training, and no test rows.
    rows : number of evenly spaced rows to permute, at most.
    """
    columns = ["gain", "permuted", "spread"]
    gain = model.importances()
    best = np.argsort(-gain, kind="stable")[:top]
    some = np.unique(np.linspace(0, len(x) - 1, min(rows, len(x))).astype(np.int64))
    x, y, weight = np.array(x)[some], np.asarray(y)[some], None if weight is None else np.asarray(weight)[some]

    def score(model: TabularModel, permuted: np.ndarray, y: np.ndarray, sample_weight=None) -> float:
        x[:, best] = permuted
        return -metrics.log_loss(y, model.predict_proba(x), sample_weight=sample_weight, labels=CLASSES)

    found = inspection.permutation_importance(
        model, x[:, best], y, scoring=score, n_repeats=repeats, random_state=0, sample_weight=weight
    )
    values = np.column_stack([gain[best], found.importances_mean, found.importances_std])
    return pd.DataFrame(values, columns=columns, index=pd.Index([names[column] for column in best], name="feature"))
