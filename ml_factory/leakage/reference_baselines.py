"""Reference baselines: class shares counted independently, row by row, on training rows alone."""

from collections.abc import Sequence

import numpy as np

CLASSES = (-1, 0, 1)


def prior_shares(y: np.ndarray) -> np.ndarray:
    """float64 (3,): how often each class came among these labels; half a row more of each where one is absent."""
    counts = np.array([np.count_nonzero(y == k) for k in CLASSES], np.float64)
    counts += 0.5 if (counts == 0).any() else 0.0
    return counts / counts.sum()


def last_move_shares(moves_train: np.ndarray, y_train: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """float64 (N, 3): class shares of the training rows whose last move has the same sign, and one row of the prior.

    A sign that never came, or a move that is NaN, has the prior.
    """
    prior = prior_shares(y_train)
    forecast = np.tile(prior, (len(moves), 1))
    for same, wanted in ((moves_train > 0, moves > 0), (moves_train < 0, moves < 0), (moves_train == 0, moves == 0)):
        counts = np.array([np.count_nonzero(y_train[same] == k) for k in CLASSES]) + prior
        forecast[wanted] = counts / counts.sum()
    return forecast


def among_classes(p_N3: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """The probabilities of the classes there are, scaled to sum to 1; 0 for others."""
    kept = p_N3 * np.isin(CLASSES, list(classes))
    return kept / kept.sum(axis=1, keepdims=True)


def mean_log_loss(p_N3: np.ndarray, y: np.ndarray, clear: np.ndarray) -> float:
    """Mean of -log p of what came, over the rows of bool[N] `clear`; nats."""
    of_what_came = p_N3[np.arange(len(y)), np.asarray(y, np.int64) + 1][clear]
    return float(-np.log(np.maximum(of_what_came, 1e-12)).mean())
