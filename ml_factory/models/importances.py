"""Feature importances of a fitted model: gain while training, and permutation importance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ml_factory.lazy_module import LazyModule
from ml_factory.models.rows import labels_to_class_index
from ml_factory.models.tabular import TabularModel

inspection = LazyModule("sklearn.inspection")  # only a training reads it


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
    x, weight = np.array(x)[some], None if weight is None else np.asarray(weight)[some]
    cells = np.arange(len(some)), labels_to_class_index(np.asarray(y)[some])

    def score(model: TabularModel, permuted: np.ndarray, _, sample_weight=None) -> float:
        x[:, best] = permuted
        happened = np.asarray(model.predict_proba(x), np.float64)[cells]
        return float(np.average(np.log(np.maximum(happened, np.finfo(np.float64).eps)), weights=sample_weight))

    found = inspection.permutation_importance(
        model, x[:, best], cells[1], scoring=score, n_repeats=repeats, random_state=0, sample_weight=weight
    )
    values = np.column_stack([gain[best], found.importances_mean, found.importances_std])
    return pd.DataFrame(values, columns=columns, index=pd.Index([names[column] for column in best], name="feature"))
