"""The session clock: class shares of the training rows by time of the session, a baseline and the start of models.

N rows in time order, 3 classes in the order short, neutral, long (-1, 0, +1), C cells of the session's time, V
volatility states. A model that starts from the clock's log shares learns what its features add to the time of the
session; one that stops before its first round predicts the clock's shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import FactoryError
from ml_factory.models.rows import CLASSES

PROGRESS_BINS = 48  # half an hour of a 24-hour session
VOLATILITY_STATES = 5
PSEUDO_COUNTS = tuple(float(count) for count in np.geomspace(1, 1e5, 21))
BLOCKS = 10  # cross-validation blocks of the training rows for the choice of pseudo-counts
TIMES = ("clock", "none")


def class_shares(y, w=None) -> np.ndarray:
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


@dataclass(frozen=True)
class SessionTime:
    """Time of the session of N rows.

    progress : float64 (N,), share of the session that has passed at `known_at`, 0 to 1.
    minutes_left : float64 (N,), until the scheduled end of the session; early closes count as announced.
    """

    progress: np.ndarray
    minutes_left: np.ndarray

    def take(self, rows: np.ndarray) -> "SessionTime":
        """Return the time of some rows."""
        return SessionTime(self.progress[rows], self.minutes_left[rows])

    def progress_bin(self) -> np.ndarray:
        """Return the index of each row among PROGRESS_BINS equal parts of the session, int64 (N,)."""
        return np.clip((self.progress * PROGRESS_BINS).astype(np.int64), 0, PROGRESS_BINS - 1)


@dataclass(frozen=True)
class SessionClock:
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
    state_shares_CV3: np.ndarray | None = None

    @classmethod
    def fit(
        cls, time: SessionTime, y: np.ndarray, *, horizon: int, bar_minutes: float,
        volatility: np.ndarray | None = None,
    ) -> "SessionClock":  # fmt: skip
        """Count the training rows.

        Parameters
        ----------
        time, y : session time and labels (-1, 0, 1) of the M training rows, in time order.
        horizon : bars over which a label reaches.
        bar_minutes : usual minutes of a base bar.
        volatility : (M,) trailing volatility of these rows; None: time alone.
        """
        y = np.asarray(y)
        prior = class_shares(y)  # raises without labels
        code, block = y.astype(np.int64) + 1, np.arange(len(y)) * BLOCKS // len(y)
        cell = _cells(time, horizon, bar_minutes)
        cells = PROGRESS_BINS + session_end_cells(horizon)
        counts_BC3 = _counts(block, cell, code, cells)
        pseudo_count = _best_pseudo_count(counts_BC3, _left_out_priors(counts_BC3))
        shares_C3 = _shrunk(counts_BC3.sum(axis=0), prior, pseudo_count)
        if volatility is None:
            return cls(horizon, bar_minutes, pseudo_count, shares_C3)
        usual = _usual(time.progress_bin(), volatility)
        excess = volatility - usual[time.progress_bin()]
        known = np.isfinite(excess)
        levels = np.arange(1, VOLATILITY_STATES) / VOLATILITY_STATES
        edges = np.quantile(excess[known], levels) if known.any() else np.zeros(VOLATILITY_STATES - 1)
        joint = cell * VOLATILITY_STATES + np.searchsorted(edges, excess)
        states = cells * VOLATILITY_STATES
        joint_BJ3 = _counts(block[known], joint[known], code[known], states)
        others_BC3 = _shrunk(_left_out(counts_BC3), _left_out_priors(counts_BC3), pseudo_count)
        state_count = _best_pseudo_count(joint_BJ3, np.repeat(others_BC3, VOLATILITY_STATES, axis=1))
        shares_J3 = _shrunk(joint_BJ3.sum(axis=0), np.repeat(shares_C3, VOLATILITY_STATES, axis=0), state_count)
        state_shares_CV3 = shares_J3.reshape(cells, VOLATILITY_STATES, 3)
        return cls(horizon, bar_minutes, pseudo_count, shares_C3, usual, edges, state_shares_CV3)

    def predict(self, time: SessionTime, volatility: np.ndarray | None = None) -> np.ndarray:
        """Return class shares of the rows' cells, float64 (N, 3); with `volatility` (N,) those of their volatility
        state.

        A row whose volatility is NaN gets its cell's.
        """
        cell = _cells(time, self.horizon, self.bar_minutes)
        if volatility is None:
            return self.shares_C3[cell]
        excess = volatility - self.usual[time.progress_bin()]
        state = np.minimum(np.searchsorted(self.edges, excess), VOLATILITY_STATES - 1)
        return np.where(np.isfinite(excess)[:, None], self.state_shares_CV3[cell, state], self.shares_C3[cell])

    def to_dict(self) -> dict:
        """Return numbers, lists and None; `from_dict` undoes it."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "SessionClock":
        return cls(**{name: np.array(value) if isinstance(value, list) else value for name, value in stored.items()})


def session_end_cells(horizon: int) -> int:
    """Return the number of cells of the bars left: one a bar, at most PROGRESS_BINS."""
    return min(int(horizon), PROGRESS_BINS)


def _cells(time: SessionTime, horizon: int, bar_minutes: float) -> np.ndarray:
    """int64 (N,): the cell of each row, the bars left after the bins of progress."""
    left = np.clip(np.rint(time.minutes_left / bar_minutes), 0, horizon).astype(np.int64)
    ending = PROGRESS_BINS + left * session_end_cells(horizon) // max(horizon, 1)
    return np.where(left < horizon, ending, time.progress_bin())


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


# ---- the offset of a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionClockOffset:
    """The session clock read off a column of a model's inputs that grows evenly through the session.

    The scale of the column does not matter: the session lies between the smallest and the largest value of the training
    rows.

    column : index of the column among the inputs.
    low, high : its range.
    step : its usual change from bar to bar; 0 where it never rises, and then no bars are counted to the session's end.
    clock : counted on the training rows.
    """

    column: int
    low: float
    high: float
    step: float
    clock: SessionClock

    @classmethod
    def fit(
        cls, column_N: np.ndarray, target_N: np.ndarray, weight_N: np.ndarray | None = None, *, column: int, ending: int
    ) -> "SessionClockOffset":
        """Count training rows, each once.

        column_N : the column of these rows.
        target_N : their classes, 0 to 2.
        weight_N : rows of weight 0 are not counted; None: all are.
        ending : bars before the session's end with cells of their own.
        """
        taken = slice(None) if weight_N is None else weight_N > 0
        values, target_N = np.asarray(column_N, dtype=np.float64)[taken], np.asarray(target_N)[taken]
        known = np.unique(values[np.isfinite(values)])
        low, high = (float(known[0]), float(known[-1])) if len(known) else (0.0, 0.0)
        changes = np.diff(values)
        step = float(np.median(changes[changes > 0])) if (changes > 0).any() else 0.0  # usual step upward
        time = _time_of_column(values, low, high, step)
        return cls(column, low, high, step, SessionClock.fit(time, target_N - 1, horizon=ending, bar_minutes=1.0))

    def log_class_shares(self, column_N: np.ndarray) -> np.ndarray:
        """Return the log class shares of the rows' cells, float64 (N, 3)."""
        values = np.asarray(column_N, dtype=np.float64)
        return np.log(self.clock.predict(_time_of_column(values, self.low, self.high, self.step)))

    def to_dict(self) -> dict:
        return {**vars(self), "clock": self.clock.to_dict()}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "SessionClockOffset":
        return cls(**{**stored, "clock": SessionClock.from_dict(stored["clock"])})


def _time_of_column(values: np.ndarray, low: float, high: float, step: float) -> SessionTime:
    """Return the time of the session by a column, with steps for minutes; a missing value is the session's begin."""
    values = np.clip(np.nan_to_num(values, nan=low), low, high)
    left = (high - values) / step if step > 0 else np.full(len(values), np.inf)
    return SessionTime((values - low) / ((high - low) or 1.0), left)
