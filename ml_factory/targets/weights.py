"""How much each training row counts: rows that share their future share their weight."""

import numpy as np
import pandas as pd

from ml_factory.targets.labels import average_uniqueness

__all__ = ["average_uniqueness", "training_weights"]


def training_weights(rows: pd.DataFrame) -> np.ndarray:
    """float64[n], mean 1: average uniqueness (AFML 4.4) among these rows alone; an ambiguous row weighs 0.

    rows : the training rows of one fold, as `triple_barrier` made them (barrier, entry_bar, exit_bar). Nothing
    outside them enters: what was purged away, validation and test are not seen. Rows that teach nothing (ambiguous)
    crowd nobody. All zero when every row is ambiguous.
    """
    weights = np.zeros(len(rows))
    clear = np.flatnonzero((rows["barrier"] != "ambiguous").to_numpy())
    if not len(clear):
        return weights
    first = rows["entry_bar"].to_numpy(np.int64)[clear] + 1
    last = rows["exit_bar"].to_numpy(np.int64)[clear]
    offset = first.min()
    weights[clear] = average_uniqueness(first - offset, last - offset, int(last.max() - offset) + 1)
    return weights * (len(rows) / weights.sum())
