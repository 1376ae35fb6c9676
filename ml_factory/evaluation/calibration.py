"""Calibration of class probabilities: temperature and class biases with shrinkage, and calibration tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.intervals import ConfidenceInterval, gain_interval
from ml_factory.evaluation.metrics import CLASS_NAMES, check_metric_rows
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import softmax
from ml_factory.models.rows import CLASSES

# Only a fit reads them.
optimize, special = LazyModule("scipy.optimize"), LazyModule("scipy.special")
threadpoolctl = LazyModule("threadpoolctl")
SMALLEST = 1e-12  # floor of probabilities, so that their logarithm is finite
BINS = 10  # of a reliability diagram
ABSENT = -1e5  # log-probability of an impossible class: 0 at every allowed temperature


def floored_log_probabilities(p_N3) -> np.ndarray:
    """Return log p, float64 (N, 3), with p floored at 1e-12."""
    return np.log(np.clip(np.asarray(p_N3, dtype=np.float64), SMALLEST, 1.0))


@dataclass(frozen=True)
class Calibration:
    """Calibration p ∝ exp(log p / T + b): temperature and class biases (Alexandari et al. 2020).

    Fit it on validation rows alone: on training rows it corrects for the model's overfit, on test rows it looks ahead.

    temperature : T; above 1 softens, below 1 sharpens (Guo et al. 2017, §4.2).
    bias : b of the classes short, neutral, long, summing to 0.
    """

    temperature: float = 1.0
    bias: tuple[float, float, float] = (0.0, 0.0, 0.0)

    LOWEST, HIGHEST = 0.2, 20.0  # sharper is a broken model, and not invertible above the floor of 1e-12
    # Standard deviations of the priors of each bias and of log T, both centred at no change. Chosen on validation rows
    # of eight files: fitted on one part of them, evaluated on the part after it (docs/log.md).
    BIAS_SPREAD, LOG_TEMPERATURE_SPREAD = 0.2, 0.5

    @classmethod
    def fit(cls, logp_N3, y, *, horizon: int = 1) -> "Calibration":
        """Fit the maximum a posteriori temperature and biases on these rows.

        The log likelihood counts as many rows as `independent_rows` finds, the prior is normal around no calibration:
        few or dependent rows leave the probabilities almost unchanged.

        Parameters
        ----------
        logp_N3 : log-probabilities (or logits) of the validation rows, in time order.
        y : their labels.
        horizon : rows over which one label reaches.
        """
        logp_N3 = np.array(logp_N3, dtype=np.float64)
        # A class that the labels do not have has no probability; calibration must not give it any.
        logp_N3[:, (logp_N3 <= np.log(SMALLEST)).all(axis=0)] = ABSENT
        p_N3 = softmax(logp_N3)
        code, _ = check_metric_rows(y, p_N3)
        rows = independent_row_count(y, p_N3, horizon=horizon)
        hit = np.eye(len(CLASSES))[code]
        precision = np.r_[cls.LOG_TEMPERATURE_SPREAD**-2, np.full(len(CLASSES), cls.BIAS_SPREAD**-2)] / max(rows, 1e-9)

        def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
            scaled = np.exp(-theta[0]) * logp_N3
            q_N3 = special.log_softmax(scaled + theta[1:], axis=1)
            residual = (np.exp(q_N3) - hit) / len(code)
            slope = np.r_[-(residual * scaled).sum(), residual.sum(axis=0)]
            loss = -float(q_N3[np.arange(len(code)), code].mean())
            return loss + 0.5 * float(precision @ theta**2), slope + precision * theta

        bounds = [(np.log(cls.LOWEST), np.log(cls.HIGHEST)), *[(None, None)] * len(CLASSES)]
        options = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 500}
        with threadpoolctl.threadpool_limits(1):  # threads that share matrices of a few numbers wait for each other
            found = optimize.minimize(
                objective, np.zeros(1 + len(CLASSES)), jac=True, method="L-BFGS-B", bounds=bounds, options=options
            )
        bias = found.x[1:] - found.x[1:].mean()
        return cls(float(np.exp(found.x[0])), tuple(bias.tolist()))

    def apply(self, p_N3) -> np.ndarray:
        """Return calibrated probabilities, float64 (N, 3)."""
        if self == Calibration():
            return np.asarray(p_N3, dtype=np.float64)
        return softmax(floored_log_probabilities(p_N3) / self.temperature + np.array(self.bias))

    def invert(self, p_N3) -> np.ndarray:
        """Return the uncalibrated probabilities of calibrated ones, float64 (N, 3)."""
        if self == Calibration():
            return np.asarray(p_N3, dtype=np.float64)
        return softmax((floored_log_probabilities(p_N3) - np.array(self.bias)) * self.temperature)

    def to_dict(self) -> dict:
        return {"temperature": self.temperature, "bias": list(self.bias)}

    @classmethod
    def from_dict(cls, facts: Mapping) -> "Calibration":
        """Read the values of `to_dict`."""
        return cls(facts["temperature"], tuple(facts["bias"]))


def independent_row_count(y, p_N3, *, horizon: int = 1) -> float:
    """Return the number of independent rows that would estimate the class shares as precisely as these dependent ones.

    The variance that independent outcomes would have, over the variance of the mean difference p_k - 1[y = k] that
    `_calibration_interval_of_class` measures (overlapping labels, slow forecasts and a class mix that changes slowly
    all widen it), summed over the classes; at most the number of rows.
    """
    code, p_N3 = check_metric_rows(y, p_N3)
    errors = [
        _calibration_interval_of_class(code, p_N3, k, horizon=horizon).standard_error for k in range(len(CLASSES))
    ]
    spread = float((p_N3 * (1 - p_N3)).sum() / len(code))
    variance, most = float(np.square(errors).sum()), float(len(code))
    if not np.isfinite(variance):  # too few rows to measure it: correct for overlap alone
        return most / max(1, horizon)
    return min(most, spread / variance) if variance > 0 else most


def _calibration_interval_of_class(code, p_N3, k: int, *, horizon: int, times_N=None) -> ConfidenceInterval:
    """Return the 95 % interval of the mean of p_k - 1[y = k], by `gain_interval`.

    The difference under each outcome is p_k or p_k - 1, so its memory is that of the forecasts: where they drift slowly
    and the outcomes do not follow, the difference drifts as slowly beneath the noise of the outcomes.

    code : class codes 0..2 of the rows, in time order.
    k : 0, 1 or 2.
    horizon, times_N : as of `gain_interval`.
    """
    by_outcome_N3 = p_N3[:, [k]] - np.eye(len(CLASSES))[k]
    difference = by_outcome_N3[np.arange(len(code)), code]
    return gain_interval(difference, horizon=horizon, times_N=times_N, by_outcome_NK=by_outcome_N3)


def calibration_by_class(
    y, p_N3, *, horizon: int = 1, times_N=None, classes: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """Return mean predicted probability and observed frequency of each class ("calibration in the large", Van Calster
    2019).

    y, p_N3 : labels and probabilities of rows in time order.
    horizon, times_N : rows over which one label reaches, and when each row is known; as of `gain_interval`.
    classes : name -> label of the classes; None: short, neutral and long.

    Returns
    -------
    DataFrame with a row per class: class (its name), predicted, observed, difference (predicted minus observed), low
    and high (95 %, by `_calibration_interval_of_class`), rows.
    """
    code, p_N3 = check_metric_rows(y, p_N3)
    table = []
    classes = dict(zip(CLASS_NAMES, CLASSES, strict=True)) if classes is None else classes
    for name, label in classes.items():
        k = CLASSES.index(label)
        predicted, observed = float(p_N3[:, k].mean()), float((code == k).mean())
        off = _calibration_interval_of_class(code, p_N3, k, horizon=horizon, times_N=times_N)
        row = {"class": name, "predicted": predicted, "observed": observed, "difference": off.mean}
        row |= {"low": off.low, "high": off.high, "rows": off.rows}
        table.append(row)
    return pd.DataFrame(table)


def reliability_table(y, p_N3, *, horizon: int = 1) -> pd.DataFrame:
    """Return the observed frequency by predicted probability, per class and bin of equally many rows.

    Parameters
    ----------
    horizon : rows over which one label reaches. Overlapping labels are not independent, so the standard error counts
        one row in `horizon`, which is cautious.

    Returns
    -------
    DataFrame with a row per class and non-empty bin: class (-1, 0, 1), low, high (the bin's edges), probability (mean
    predicted), frequency (share observed), error (binomial standard error), rows.
    """
    code, p_N3 = check_metric_rows(y, p_N3)
    pieces = []
    for k, name in enumerate(CLASSES):
        predicted_N, edges = p_N3[:, k], np.unique(np.quantile(p_N3[:, k], np.linspace(0, 1, BINS + 1)))
        which = np.searchsorted(edges[1:-1], predicted_N)
        inside = np.unique(which)
        rows = np.bincount(which)[inside]
        share = np.bincount(which, weights=code == k)[inside] / rows
        independent = rows / max(1, horizon)
        # Two hits and two misses are added (Agresti and Coull 1998): a bin without a hit is not certain.
        guarded = (share * independent + 2) / (independent + 4)
        pieces.append(
            pd.DataFrame(
                {
                    "class": name,
                    "low": edges[inside],
                    "high": edges[np.minimum(inside + 1, len(edges) - 1)],
                    "probability": np.bincount(which, weights=predicted_N)[inside] / rows,
                    "frequency": share,
                    "error": np.sqrt(guarded * (1 - guarded) / (independent + 4)),
                    "rows": rows,
                }
            )
        )
    return pd.concat(pieces, ignore_index=True)


def condition_on_classes(p_N3, classes: Iterable[int] = CLASSES) -> np.ndarray:
    """Return probabilities given that the outcome is one of `classes`: 0 for the others, rows summing to 1."""
    p_N3 = np.asarray(p_N3, dtype=np.float64)
    if set(classes) == set(CLASSES):
        return p_N3
    restricted = np.where(np.isin(CLASSES, list(classes)), p_N3, 0.0)
    return restricted / restricted.sum(axis=1, keepdims=True)
