"""What a market usually does, so that a detector compares bars with their own market and with no constant of it."""

import numpy as np

MOVE_WINDOW = 240  # bars on each side: most of a session, so that one strange bar does not hide itself
FEW_MOVES = 60  # of its own session: where a bar has fewer, those on both sides say what is usual
OUTLIER_TIMES = 10.0
STAYS_SHARE = 0.6
RUN_WINDOW = 720
RUN_CAP = 30  # a single run counts at most this much in the habit the others are measured with


def usual_move(move: np.ndarray, known: np.ndarray, edge: np.ndarray) -> np.ndarray:
    """float64[N]: the mean absolute `move` of the known bars around each, outliers left out; never 0.

    move : float64[N], log close to close.  known : bool[N], where it is a move of one bar.  edge : bool[N], the first
    bar of a session. The larger of two means stands: of bars of its own session, which a day that is lost beside it
    does not change, and of the bars on both sides, which know that a quiet evening follows a wild afternoon.
    """
    size = np.where(known, np.abs(move), 0.0)
    moved = size[size > 0]
    if not len(moved):
        return np.full(len(move), np.inf)
    typical = float(np.median(moved))
    usual = np.zeros(len(move))
    for around in _windows(known, edge):
        first = _mean_around(np.minimum(size, 20 * typical), known, around)
        kept = known & (size <= OUTLIER_TIMES * np.maximum(first, 0.02 * typical))
        usual = np.maximum(usual, _mean_around(size, kept, around))
    return np.maximum(usual, 0.02 * typical)


def surprise(position: np.ndarray, length: np.ndarray, bars: int, strange: np.ndarray | bool = False) -> np.ndarray:
    """float64[R], nats: how unlikely runs of this length are in this market, here and in the whole file.

    position : int64[R], where each run stands among `bars`, increasing.  length : its bars.
    strange : bool[R], runs that are nobody's habit.
    A run of L bars has the probability f^L when one bar in 1/f belongs to a run by habit; f is the larger of the
    share around it (without itself) and that of the file, so quiet nights and thin markets excuse long runs.
    """
    if not len(position):
        return np.empty(0)
    counted = np.where(strange, 0.0, np.minimum(length, RUN_CAP))
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


Windows = tuple[np.ndarray, np.ndarray]  # int64[N] each: the first bar of a window, and the bar after its last one


def _windows(known: np.ndarray, edge: np.ndarray) -> tuple[Windows, Windows]:
    """The windows around every bar: in its own session, as wide near its edges, and whatever the session."""
    bars, at, wide = len(known), np.arange(len(known)), 2 * MOVE_WINDOW + 1
    begins = np.flatnonzero(np.append(True, edge[1:]))
    session = np.cumsum(np.append(0, edge[1:]))
    begin, end = begins[session], np.append(begins[1:], bars)[session]
    low = np.maximum(np.minimum(at - MOVE_WINDOW, end - wide), begin)
    own = low, np.minimum(low + wide, end)
    around = np.maximum(at - MOVE_WINDOW, 0), np.minimum(at + MOVE_WINDOW + 1, bars)
    few = _sum_of(known.astype(float), own) < FEW_MOVES
    return (np.where(few, around[0], own[0]), np.where(few, around[1], own[1])), around


def _mean_around(values: np.ndarray, counted: np.ndarray, around: Windows) -> np.ndarray:
    total = _sum_of(np.where(counted, values, 0.0), around)
    return total / np.maximum(_sum_of(counted.astype(float), around), 1)


def _sum_of(values: np.ndarray, around: Windows) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[around[1]] - total[around[0]]
