"""Sample weights by average uniqueness (AFML ch. 4).

Source: Lopez de Prado, *Advances in Financial Machine Learning* (2018), chapter 4, here "AFML 4.x". All weights are
computed from the given rows alone: those of one fold's training part, never from evaluated rows.
"""

import numpy as np
import pandas as pd

from ml_factory.targets.label_table import average_uniqueness


def training_weights(rows: pd.DataFrame) -> np.ndarray:
    """Compute the average uniqueness of each row among these rows alone, float64[n], scaled to mean 1.

    Rows outside do not count: purged, validation and test rows are not used. Ambiguous rows weigh 0 and do not count
    towards concurrency.

    rows : the training rows of one fold, in time order, of `triple_barrier_labels` (barrier, entry_bar, exit_bar)
    """
    weights = np.zeros(len(rows))
    clear, first, last = _label_spans(rows)
    if not len(clear):
        return weights
    first, last = first - first.min(), last - first.min()
    weights[clear] = average_uniqueness(first, last, int(last.max()) + 1)
    return weights * (len(rows) / weights.sum())


def effective_sample_size(rows: pd.DataFrame, weights: np.ndarray | None = None) -> float:
    """Return the number of independent rows with the same information: Kish's effective size, with overlapping labels.

    (sum w)^2 / sum_ij w_i w_j r_ij, with r_ij = shared bars / sqrt(life_i * life_j): the correlation of two labels'
    returns where bars are independent. Rows that never overlap give Kish's (sum w)^2 / sum w^2 (*Survey Sampling*,
    1965); rows of one weight that each begin a bar later and live L bars give about n / L, their summed uniqueness.

    rows : barrier, entry_bar, exit_bar
    weights : float64[n], 0 or more; default: each clear row counts once
    """
    clear, first, last = _label_spans(rows)
    w = np.ones(len(clear)) if weights is None else np.asarray(weights, np.float64)[clear]
    if not w.sum() > 0:
        return 0.0
    first, last = first - first.min(), last - first.min()
    # sum_ij w_i w_j r_ij is the sum over bars of (sum of w / sqrt(life) of the labels alive there) squared.
    part = w / np.sqrt(last - first + 1)
    change = np.bincount(first, part, last.max() + 2) - np.bincount(last + 1, part, last.max() + 2)
    return float(w.sum() ** 2 / np.square(np.cumsum(change[:-1])).sum())


def _label_spans(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int64: positions of the clear rows, and the first and last bar on which each label lives."""
    clear = np.flatnonzero((rows["barrier"] != "ambiguous").to_numpy())
    return clear, rows["entry_bar"].to_numpy(np.int64)[clear] + 1, rows["exit_bar"].to_numpy(np.int64)[clear]
