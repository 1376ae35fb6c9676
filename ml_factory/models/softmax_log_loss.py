"""Softmax and log loss of class scores."""

import numpy as np


def softmax(z_N3: np.ndarray) -> np.ndarray:
    """Return the softmax of each row, float64 (N, 3)."""
    e_N3 = np.exp(z_N3 - z_N3.max(axis=1, keepdims=True), dtype=np.float64)
    return e_N3 / e_N3.sum(axis=1, keepdims=True)


def mean_log_loss(scores_N3: np.ndarray, target_N: np.ndarray, weight_N: np.ndarray) -> float:
    """Return the weighted mean log loss of the softmax of these scores."""
    top = scores_N3.max(axis=1)
    log_N = np.log(np.exp(scores_N3 - top[:, None]).sum(axis=1)) + top
    return float(weight_N @ (log_N - scores_N3[np.arange(len(scores_N3)), target_N]) / weight_N.sum())
