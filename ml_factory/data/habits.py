"""What a market usually does, so that a detector compares bars with their own market and with no constant of it."""

import numpy as np

MOVE_WINDOW = 240  # bars on each side: most of a session, so that one strange bar does not hide itself
OUTLIER_TIMES = 10.0
STAYS_SHARE = 0.6
RUN_WINDOW = 720
RUN_CAP = 30  # a single run counts at most this much in the habit the others are measured with


def usual_move(move: np.ndarray, known: np.ndarray) -> np.ndarray:
    """float64[N]: the mean absolute `move` of the known bars around each, outliers left out; never 0.

    move : float64[N], log close to close.  known : bool[N], where it is a move of one bar.
    """
    size = np.where(known, np.abs(move), 0.0)
    moved = size[size > 0]
    if not len(moved):
        return np.full(len(move), np.inf)
    typical = float(np.median(moved))
    first = _mean_around(np.minimum(size, 20 * typical), known)
    usual = _mean_around(size, known & (size <= OUTLIER_TIMES * np.maximum(first, 0.02 * typical)))
    return np.maximum(usual, 0.02 * typical)


def surprise(position: np.ndarray, length: np.ndarray, bars: int) -> np.ndarray:
    """float64[R], nats: how unlikely runs of this length are in this market, here and in the whole file.

    position : int64[R], where each run stands among `bars`, increasing.  length : its bars.
    A run of L bars has the probability f^L when one bar in 1/f belongs to a run by habit; f is the larger of the
    share around it (without itself) and that of the file, so quiet nights and thin markets excuse long runs.
    """
    if not len(position):
        return np.empty(0)
    counted = np.minimum(length, RUN_CAP).astype(float)
    total = np.concatenate([[0.0], np.cumsum(counted)])
    first = np.searchsorted(position, position - RUN_WINDOW)
    after = np.searchsorted(position, position + RUN_WINDOW, side="right")
    others = total[after] - total[first] - counted
    near = np.minimum(position + RUN_WINDOW, bars) - np.maximum(position - RUN_WINDOW, 0)
    here = (others + 1) / (near + others + 2)
    whole = (total[-1] - counted + 1) / (bars + total[-1] - counted + 2)
    return -length * np.log(np.maximum(here, whole))


def stays(close: np.ndarray, rows: np.ndarray, move: np.ndarray) -> np.ndarray:
    """bool[R]: most of each move is left in the middle of the five closes from its row on, against the five before."""
    ahead = close[np.minimum(rows[:, None] + np.arange(5), len(close) - 1)]
    behind = close[np.maximum(rows[:, None] - 1 - np.arange(5), 0)]
    left = np.median(ahead, axis=1) - np.median(behind, axis=1)
    return left * np.sign(move) > STAYS_SHARE * np.abs(move)


def runs_of(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, length) of each run of True."""
    edge = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    first = np.flatnonzero(edge == 1)
    return first, np.flatnonzero(edge == -1) - first


def rows_of_runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int64: every row of these runs."""
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(first, length) + within


def _mean_around(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    total = _around(np.where(counted, values, 0.0), MOVE_WINDOW)
    return total / np.maximum(_around(counted.astype(float), MOVE_WINDOW), 1)


def _around(values: np.ndarray, reach: int) -> np.ndarray:
    """The sum of `values` from `reach` before each to `reach` after it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    return total[np.minimum(at + reach + 1, len(values))] - total[np.maximum(at - reach, 0)]
