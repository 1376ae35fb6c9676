"""Reference baselines: class shares counted independently, row by row, on training rows alone."""

from collections.abc import Sequence

import numpy as np

CLASSES = (-1, 0, 1)


def independent_prior_shares(y: np.ndarray) -> np.ndarray:
    """Return the share of each class among these labels, float64 (3,); half a row more of each where one is absent."""
    counts = np.array([np.count_nonzero(y == k) for k in CLASSES], np.float64)
    counts += 0.5 if (counts == 0).any() else 0.0
    return counts / counts.sum()


def independent_last_move_shares(moves_train: np.ndarray, y_train: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return float64 (N, 3): class shares of the training rows whose last move has the same sign.

    They include one row of the prior. A sign without training rows, or a move that is NaN, gets the prior.
    """
    prior = independent_prior_shares(y_train)
    forecast = np.tile(prior, (len(moves), 1))
    for same, wanted in ((moves_train > 0, moves > 0), (moves_train < 0, moves < 0), (moves_train == 0, moves == 0)):
        counts = np.array([np.count_nonzero(y_train[same] == k) for k in CLASSES]) + prior
        forecast[wanted] = counts / counts.sum()
    return forecast


def independent_restrict_to_classes(p_N3: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Return the probabilities of the existing classes, scaled to sum to 1; 0 for others."""
    kept = p_N3 * np.isin(CLASSES, list(classes))
    return kept / kept.sum(axis=1, keepdims=True)


def independent_log_loss(p_N3: np.ndarray, y: np.ndarray, clear: np.ndarray) -> float:
    """Return the mean of -log p of the outcome, over the rows of bool[N] `clear`; nats."""
    p_of_outcome = p_N3[np.arange(len(y)), np.asarray(y, np.int64) + 1][clear]
    return float(-np.log(np.maximum(p_of_outcome, 1e-12)).mean())
