"""Baseline forecasts: class shares of the training rows, overall, by the last move and by the time of the session.

Letters: N rows in time order, 3 classes in the order short, neutral, long (-1, 0, +1), C cells of the session's time, V
volatility states. Everything fitted here is counted on training rows alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.data.sessions import MINUTE_NS, assign_sessions
from ml_factory.errors import FactoryError
from ml_factory.models.rows import CLASSES

BASELINES = ("prior", "last_move", "clock", "clock_volatility")
PROGRESS_BINS = 48  # half an hour of a 24-hour session
VOLATILITY_STATES = 5
PSEUDO_COUNTS = tuple(float(count) for count in np.geomspace(1, 1e5, 21))
BLOCKS = 10  # cross-validation blocks of the training rows for the choice of pseudo-counts


def baseline_class_shares(y, w=None) -> np.ndarray:
    """Return the weighted share of each class, float64 (3,).

    Where a class is absent half a row is added to each (Jeffreys): never seen is not impossible.
    """
    y = np.asarray(y)
    w = np.ones(len(y)) if w is None else np.asarray(w, dtype=np.float64)
    if not len(y) or not w.sum() > 0 or not np.isin(y, CLASSES).all():
        raise FactoryError(
            "No class shares without labels", got=f"{len(y)} rows", wanted="labels -1, 0, 1 of weight > 0"
        )
    counts = np.bincount(y.astype(np.int64) + 1, weights=w * (np.count_nonzero(w) / w.sum()), minlength=3)
    if (counts == 0).any():
        counts = counts + 0.5
    return counts / counts.sum()


def prior_baseline_probabilities(y_train, w, n: int) -> np.ndarray:
    """Return the baseline `prior`: the training rows' class shares for each of n rows, float64 (n, 3)."""
    return np.tile(baseline_class_shares(y_train, w), (n, 1))


def last_move_baseline_probabilities(last_move_train, y_train, last_move) -> np.ndarray:
    """Return the baseline `last_move`: class shares given the sign of the last base bar's return, from training rows.

    Parameters
    ----------
    last_move_train, y_train : (M,) the training rows' last returns and labels.
    last_move : (N,) last returns of the rows to predict; NaN where there is none.

    Returns
    -------
    float64 (N, 3). Each sign's counts are joined by one row with the class shares, so a rare sign is shrunk to the
    prior, and an unseen one (or NaN) gets the prior itself.
    """
    moves, last_move = np.sign(np.asarray(last_move_train, dtype=np.float64)), np.sign(np.asarray(last_move, float))
    code, prior = np.asarray(y_train).astype(np.int64) + 1, baseline_class_shares(y_train)
    p_N3 = np.tile(prior, (len(last_move), 1))
    for sign in (-1.0, 0.0, 1.0):
        counts = np.bincount(code[moves == sign], minlength=3) + prior
        p_N3[last_move == sign] = counts / counts.sum()
    return p_N3


# ---- the time of the session -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaselineSessionClock:
    """Session time of N rows.

    progress : float64 (N,), share of the session that has passed at `known_at`, 0 to 1.
    minutes_left : float64 (N,), until the scheduled end of the session; early closes count as announced.
    """

    progress: np.ndarray
    minutes_left: np.ndarray

    def take(self, rows: np.ndarray) -> "BaselineSessionClock":
        """Return the clock of some rows."""
        return BaselineSessionClock(self.progress[rows], self.minutes_left[rows])

    def progress_bin(self) -> np.ndarray:
        """Return the index of each row among PROGRESS_BINS equal parts of the session, int64 (N,)."""
        return np.clip((self.progress * PROGRESS_BINS).astype(np.int64), 0, PROGRESS_BINS - 1)


def baseline_session_clock(known_at_ns: np.ndarray, calendar: str) -> BaselineSessionClock:
    """Return the session clock of moments (int64 ns, UTC) at which bars are complete; a bar is in the session it ends
    in.
    """
    edges = assign_sessions(np.asarray(known_at_ns, np.int64) - 1, calendar)
    length = edges.close_ns - edges.open_ns
    return BaselineSessionClock((known_at_ns - edges.open_ns) / length, (edges.close_ns - known_at_ns) / MINUTE_NS)


def baseline_trailing_volatility(close: np.ndarray, segment: np.ndarray, span: int) -> np.ndarray:
    """Return the logarithm of the root mean square of the last `span` one-bar log returns, float64 (N,).

    Returns across a change of `segment` (a night, a gap, a roll) are ignored; NaN where fewer than half of the `span`
    are left.

    Parameters
    ----------
    close, segment : (N,) of consecutive base bars.
    span : bars, 2 or more.
    """
    moves = np.diff(np.log(close), prepend=np.nan)
    moves[np.diff(segment, prepend=segment[0]) != 0] = np.nan
    known = np.isfinite(moves)
    squares = np.concatenate([[0.0], np.cumsum(np.where(known, moves, 0.0) ** 2)])
    counts = np.concatenate([[0], np.cumsum(known)])
    last = np.arange(1, len(close) + 1)
    first = np.maximum(last - span, 0)
    count = counts[last] - counts[first]
    square = (squares[last] - squares[first]) / np.maximum(count, 1)
    return np.where(count >= span / 2, 0.5 * np.log(np.maximum(square, 1e-24)), np.nan)


@dataclass(frozen=True)
class ClockBaseline:
    """Class shares of the training rows by time of the session, and by the volatility state in it.

    A row with at least `horizon` bars left until its session ends is in one of PROGRESS_BINS cells of the session's
    progress; one with fewer in a cell of the bars left, because the session's end cuts its label short. A cell's shares
    are (counts + pseudo_count * prior) / (rows + pseudo_count); those of a volatility state in a cell are shrunk to the
    cell's in the same way. Both pseudo-counts are those of PSEUDO_COUNTS with the smallest log loss on BLOCKS
    contiguous blocks of the training rows, each forecast from the others.

    horizon : bars over which a label reaches.
    bar_minutes : usual minutes of a base bar.
    shares_C3, state_shares_CV3 : float64.
    usual : (PROGRESS_BINS,) mean trailing volatility of the training rows.
    edges : (V - 1,) quantiles of trailing volatility less its usual value. The last three are None without volatility.
    """

    horizon: int
    bar_minutes: float
    pseudo_count: float
    shares_C3: np.ndarray
    usual: np.ndarray | None = None
    edges: np.ndarray | None = None
    state_pseudo_count: float = 0.0
    state_shares_CV3: np.ndarray | None = None

    @classmethod
    def fit(
        cls, clock: BaselineSessionClock, y: np.ndarray, *, horizon: int, bar_minutes: float,
        volatility: np.ndarray | None = None,
    ) -> "ClockBaseline":  # fmt: skip
        """Count the training rows.

        Parameters
        ----------
        clock, y : session clock and labels (-1, 0, 1) of the M training rows, in time order.
        horizon : bars over which a label reaches.
        bar_minutes : usual minutes of a base bar.
        volatility : (M,) `baseline_trailing_volatility` of these rows; None: time alone.
        """
        y = np.asarray(y)
        baseline_class_shares(y)  # raises without labels
        code, block = y.astype(np.int64) + 1, np.arange(len(y)) * BLOCKS // len(y)
        cell = _cells(clock, horizon, bar_minutes)
        cells = PROGRESS_BINS + _end_cells(horizon)
        counts_BC3 = _counts(block, cell, code, cells)
        pseudo_count = _best_pseudo_count(counts_BC3, _left_out_priors(counts_BC3))
        shares_C3 = _shrunk(counts_BC3.sum(axis=0), baseline_class_shares(y), pseudo_count)
        if volatility is None:
            return cls(horizon, bar_minutes, pseudo_count, shares_C3)
        usual = _usual(clock.progress_bin(), volatility)
        excess = volatility - usual[clock.progress_bin()]
        known = np.isfinite(excess)
        levels = np.arange(1, VOLATILITY_STATES) / VOLATILITY_STATES
        edges = np.quantile(excess[known], levels) if known.any() else np.zeros(VOLATILITY_STATES - 1)
        joint = cell * VOLATILITY_STATES + np.searchsorted(edges, excess)
        states = cells * VOLATILITY_STATES
        joint_BJ3 = _counts(block[known], joint[known], code[known], states)
        others_BC3 = _shrunk(_left_out(counts_BC3), _left_out_priors(counts_BC3), pseudo_count)
        state_count = _best_pseudo_count(joint_BJ3, np.repeat(others_BC3, VOLATILITY_STATES, axis=1))
        shares_J3 = _shrunk(joint_BJ3.sum(axis=0), np.repeat(shares_C3, VOLATILITY_STATES, axis=0), state_count)
        return cls(
            horizon, bar_minutes, pseudo_count, shares_C3, usual, edges, state_count,
            shares_J3.reshape(cells, VOLATILITY_STATES, 3),
        )  # fmt: skip

    def predict(self, clock: BaselineSessionClock, volatility: np.ndarray | None = None) -> np.ndarray:
        """Return class shares of the rows' cells, float64 (N, 3); with `volatility` (N,) those of their volatility
        state.

        A row whose volatility is NaN gets its cell's.
        """
        cell = _cells(clock, self.horizon, self.bar_minutes)
        if volatility is None:
            return self.shares_C3[cell]
        excess = volatility - self.usual[clock.progress_bin()]
        state = np.minimum(np.searchsorted(self.edges, excess), VOLATILITY_STATES - 1)
        return np.where(np.isfinite(excess)[:, None], self.state_shares_CV3[cell, state], self.shares_C3[cell])

    def to_dict(self) -> dict:
        """Numbers, lists and None; `from_dict` undoes it."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "ClockBaseline":
        return cls(**{name: np.array(value) if isinstance(value, list) else value for name, value in stored.items()})


def _end_cells(horizon: int) -> int:
    """Cells of the bars left: one a bar, at most PROGRESS_BINS."""
    return min(int(horizon), PROGRESS_BINS)


def _cells(clock: BaselineSessionClock, horizon: int, bar_minutes: float) -> np.ndarray:
    """int64 (N,): the cell of each row, the bars left after the bins of progress."""
    left = np.maximum(np.rint(clock.minutes_left / bar_minutes), 0).astype(np.int64)
    ending = PROGRESS_BINS + np.minimum(left, horizon - 1) * _end_cells(horizon) // horizon
    return np.where(left < horizon, ending, clock.progress_bin())


def _usual(bins: np.ndarray, volatility: np.ndarray) -> np.ndarray:
    """Return the mean volatility of each bin's rows, (PROGRESS_BINS,), shrunk to the overall mean by ten rows."""
    known = np.isfinite(volatility)
    overall = volatility[known].mean() if known.any() else 0.0
    total = np.bincount(bins[known], weights=volatility[known], minlength=PROGRESS_BINS)
    return (total + 10 * overall) / (np.bincount(bins[known], minlength=PROGRESS_BINS) + 10)


def _counts(block: np.ndarray, cell: np.ndarray, code: np.ndarray, cells: int) -> np.ndarray:
    """Count rows by block, cell and class, float64 (BLOCKS, cells, 3)."""
    place = (block * cells + cell) * 3 + code
    return np.bincount(place, minlength=BLOCKS * cells * 3).reshape(BLOCKS, cells, 3).astype(np.float64)


def _left_out(counts_BC3: np.ndarray) -> np.ndarray:
    """Return the counts of all other blocks, per block."""
    return counts_BC3.sum(axis=0) - counts_BC3


def _left_out_priors(counts_BC3: np.ndarray) -> np.ndarray:
    """Return class shares of all other blocks, (BLOCKS, 1, 3), with half a row added to each class."""
    total = _left_out(counts_BC3).sum(axis=1, keepdims=True) + 0.5
    return total / total.sum(axis=2, keepdims=True)


def _shrunk(counts: np.ndarray, towards: np.ndarray, pseudo_count: float) -> np.ndarray:
    """Return shares (..., 3) of counts with `pseudo_count` added rows of the shares `towards`."""
    return (counts + pseudo_count * towards) / (counts.sum(axis=-1, keepdims=True) + pseudo_count)


def _best_pseudo_count(counts_BC3: np.ndarray, towards: np.ndarray) -> float:
    """Return the pseudo-count with the smallest log loss of every block under the shares of all other blocks."""
    others = _left_out(counts_BC3)
    losses = [-(counts_BC3 * np.log(_shrunk(others, towards, count))).sum() for count in PSEUDO_COUNTS]
    return PSEUDO_COUNTS[int(np.argmin(losses))]
