"""Baseline forecasts: class shares of the training rows, overall and by the last move; the session clock's inputs.

N rows in time order, 3 classes in the order short, neutral, long (-1, 0, +1). Everything fitted here, and the clocks of
`models.session_clock`, is counted on training rows alone.
"""

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS, assign_sessions
from ml_factory.models.session_clock import SessionTime, class_shares

BASELINES = ("prior", "last_move", "clock", "clock_volatility")


def prior_baseline_probabilities(y_train, w, n: int) -> np.ndarray:
    """Return the baseline `prior`: the training rows' class shares for each of n rows, float64 (n, 3)."""
    return np.tile(class_shares(y_train, w), (n, 1))


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
    code, prior = np.asarray(y_train).astype(np.int64) + 1, class_shares(y_train)
    p_N3 = np.tile(prior, (len(last_move), 1))
    for sign in (-1.0, 0.0, 1.0):
        counts = np.bincount(code[moves == sign], minlength=3) + prior
        p_N3[last_move == sign] = counts / counts.sum()
    return p_N3


# ---- the time of the session -----------------------------------------------------------------------------------


def session_time(known_at_ns: np.ndarray, calendar: str) -> SessionTime:
    """Return the session's time at moments (int64 ns, UTC) at which bars are complete; a bar is in the session it ends
    in.
    """
    edges = assign_sessions(np.asarray(known_at_ns, np.int64) - 1, calendar)
    length = edges.close_ns - edges.open_ns
    return SessionTime((known_at_ns - edges.open_ns) / length, (edges.close_ns - known_at_ns) / MINUTE_NS)


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
    square = pd.Series(moves**2).rolling(span, min_periods=-(-span // 2)).mean().to_numpy()
    return 0.5 * np.log(np.maximum(square, 1e-24))
