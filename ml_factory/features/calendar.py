"""Calendar features: position in the exchange's day and week, and the session so far.

Only what the exchange publishes beforehand (open, close, early closes) and bars already seen are used. Markets that
never close have no overnight gap, so that column exists for the others alone.
"""

import math
from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.data.sessions import assign_sessions
from ml_factory.features.engine import HISTORY, Block, Column
from ml_factory.features.windows import window_place


def calendar(b: Block) -> Iterator[Column]:
    """Yield the columns, none where `coarse`: the base frame knows them fresher; see the module."""
    if b.coarse:
        return
    progress = elapsed_session_share(b.start, b.known_at, b.calendar)
    week = (b.session + 3) % 7 / 7  # day 0 was a Thursday; Monday is 0
    yield "session_progress", progress - 0.5
    for name, turn in (("session", progress), ("week", week)):  # hands of a clock
        yield f"{name}_sine", np.sin(2.0 * math.pi * turn)
        yield f"{name}_cosine", np.cos(2.0 * math.pi * turn)
    so_far = _session_so_far(b.open, b.high, b.low, b.close, b.session, HISTORY, b.memory("session", *[math.nan] * 7))
    opened, top, bottom, bars, high_at, low_at, gap = so_far
    usual = b.atr * np.sqrt(bars)  # what as many bars would move
    yield "session_move", (b.close - opened) / usual
    yield "session_place", window_place(b.close, bottom, top)
    yield "session_range", np.log((top - bottom) / usual + 0.01)
    yield "bars_since_session_high", (bars - high_at) / bars  # shares of the session's bars; the latest of equals
    yield "bars_since_session_low", (bars - low_at) / bars
    if b.calendar != "24h":
        yield "overnight_gap", gap / b.atr


def elapsed_session_share(start: np.ndarray, known_at: np.ndarray, calendar: str) -> np.ndarray:
    """Return the elapsed share of the session at `known_at`, 0 to 1; early closes count as announced."""
    edges = assign_sessions(start, calendar)
    return (known_at - edges.open_ns) / (edges.close_ns - edges.open_ns)


@njit(cache=True, nogil=True, error_model="numpy")
def _session_so_far(opens, highs, lows, closes, session, first, state):
    """The session's open, high, low, number of bars, the bars of its high and low, and the gap before it.

    float64[7, M], of the rows from `first` on. Nothing is known of the gap before the file's first session.
    """
    out = np.full((7, len(opens)), np.nan)
    for i in range(first, len(opens)):
        if session[i] != session[i - 1]:
            state[0], state[1], state[2], state[3] = opens[i], highs[i], lows[i], 0.0
            state[6] = opens[i] - closes[i - 1]
        state[3] += 1.0
        if highs[i] >= state[1]:
            state[1], state[4] = highs[i], state[3]
        if lows[i] <= state[2]:
            state[2], state[5] = lows[i], state[3]
        for k in range(7):
            out[k, i] = state[k]
    return out
