"""Sample weights by average uniqueness and time decay (AFML ch. 4).

Source: Lopez de Prado, *Advances in Financial Machine Learning* (2018), chapter 4, here "AFML 4.x". All weights are
computed from the given rows alone: those of one fold's training part, never from evaluated rows.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_field_types
from ml_factory.errors import wrong_field_error
from ml_factory.targets.label_table import average_uniqueness


@dataclass(frozen=True)
class WeightSpec:
    """Settings of sample weights.

    uniqueness : a bar is shared among the labels that live on it (AFML 4.4); False: each label has all of it
    decay : weight of the oldest row relative to the newest (AFML 4.11), linear in cumulative uniqueness. 1: none; 0:
        down to zero; below 0: the oldest share of that size has weight zero
    """

    uniqueness: bool = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_field_types(self)
        if not -1 < self.decay <= 1:
            raise wrong_field_error(
                self, "decay", "Rows cannot be weighed like this", wanted="a number above -1, at most 1",
                next_step="use 1 for no decay, or for example 0.5",
            )  # fmt: skip


def training_weights(rows: pd.DataFrame, spec: WeightSpec | None = None) -> np.ndarray:
    """Compute the weight of each row among these rows alone, float64[n], mean 1; an ambiguous row weighs 0.

    Rows outside do not count: purged, validation and test rows are not used. Ambiguous rows do not count towards
    concurrency. All weights are zero when every row is ambiguous.

    Parameters
    ----------
    rows : the training rows of one fold, in time order, of `triple_barrier_labels` (barrier, entry_bar, exit_bar)
    spec : the default is average uniqueness (AFML 4.4), nothing else
    """
    spec = spec or WeightSpec()
    weights = np.zeros(len(rows))
    clear, first, last = _label_spans(rows)
    if not len(clear):
        return weights
    offset, bars = int(first.min()), int(last.max() - first.min()) + 1
    first, last = first - offset, last - offset
    uniqueness = average_uniqueness(first, last, bars)
    weights[clear] = uniqueness if spec.uniqueness else 1.0
    if spec.decay != 1:
        weights[clear] *= time_decay_weights(uniqueness, spec.decay)
    total = weights.sum()
    return weights * (len(rows) / total) if total > 0 else weights


def time_decay_weights(uniqueness: np.ndarray, oldest: float) -> np.ndarray:
    """Return float64[n], a factor for each row, 1 for the newest, linear in cumulative uniqueness (AFML 4.11).

    A new row ages the others only by the uniqueness it adds, so redundant rows do not make the past decay faster.

    uniqueness : float64[n], oldest row first
    oldest : `WeightSpec.decay`
    """
    age = np.cumsum(uniqueness)
    slope = (1.0 - oldest) / age[-1] if oldest >= 0 else 1.0 / ((oldest + 1.0) * age[-1])
    return np.maximum(1.0 - slope * (age[-1] - age), 0.0)


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
