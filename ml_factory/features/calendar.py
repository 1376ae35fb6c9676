"""Calendar features: position in the exchange's day and week, and the session so far.

Only what the exchange publishes beforehand (open, close, early closes) and bars already seen are used. Markets that
never close have no overnight gap, so that column exists for the others alone.
"""

import math

from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import HISTORY, safe_ratio

BASE = (
    "session_progress", "session_sine", "session_cosine", "week_sine", "week_cosine", "session_move", "session_place",
    "session_range", "bars_since_session_high", "bars_since_session_low",
)  # fmt: skip
WEEK_DAYS = 7


def _names(market, coarse):
    """None where `coarse`: the base frame knows it fresher."""
    if coarse:
        return ()
    return BASE if market.calendar == "24h" else (*BASE, "overnight_gap")


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    if coarse:
        return
    _session_clock_features(b, out[0], out[1], out[2], out[3], out[4])
    _session_so_far_features(b, state, out[5], out[6], out[7], out[8], out[9])
    if len(out) > len(BASE):
        _overnight_gap_feature(b, state[2], out[len(BASE)])


FAMILY = FeatureFamily(names=_names, kernel=_kernel, recursions=3, clock=True)


@njit(cache=True, nogil=True, error_model="numpy")
def _session_clock_features(b, out_progress, out_sine, out_cosine, out_week_sine, out_week_cosine):
    """The session's progress less 1/2, and the hands of a clock that turns once a session and of one a week."""
    week_sine = week_cosine = 0.0
    for i in range(HISTORY, len(b.close)):
        progress, row = b.progress[i], i - HISTORY
        if row == 0 or b.session[i] != b.session[i - 1]:
            week = 2.0 * math.pi * ((b.session[i] + 3) % WEEK_DAYS) / WEEK_DAYS  # day 0 was a Thursday; Monday is 0
            week_sine, week_cosine = math.sin(week), math.cos(week)
        out_progress[row] = progress - 0.5
        out_sine[row] = math.sin(2.0 * math.pi * progress)
        out_cosine[row] = math.cos(2.0 * math.pi * progress)
        out_week_sine[row] = week_sine
        out_week_cosine[row] = week_cosine


@njit(cache=True, nogil=True, error_model="numpy")
def _session_so_far_features(b, state, out_move, out_place, out_range, out_high, out_low):
    """The session so far: move from its open and range, both in ATRs of as many bars; place in the range less 1/2.

    And how long ago its high and its low stood, as a share of its bars; the latest of equals.
    """
    opened, top, bottom, bars = state[0]
    high_at, low_at = state[1, 0], state[1, 1]
    for i in range(HISTORY, len(b.close)):
        if b.session[i] != b.session[i - 1]:
            opened, top, bottom, bars = b.open[i], b.high[i], b.low[i], 0.0
            high_at, low_at = 0.0, 0.0
        if b.high[i] >= top:
            top, high_at = b.high[i], bars
        if b.low[i] <= bottom:
            bottom, low_at = b.low[i], bars
        bars += 1.0
        row, usual = i - HISTORY, b.atr[i] * math.sqrt(bars)
        out_move[row] = (b.close[i] - opened) / usual
        out_place[row] = safe_ratio(b.close[i] - bottom, top - bottom, 0.5) - 0.5
        out_range[row] = math.log((top - bottom) / usual + 0.01)
        out_high[row] = (bars - 1.0 - high_at) / bars
        out_low[row] = (bars - 1.0 - low_at) / bars
    state[0, 0], state[0, 1], state[0, 2], state[0, 3] = opened, top, bottom, bars
    state[1, 0], state[1, 1] = high_at, low_at


@njit(cache=True, nogil=True, error_model="numpy")
def _overnight_gap_feature(b, state, out):
    """The session's first open less the close before it, in ATRs; nothing is known in the file's first session."""
    gap = state[0] if b.t0 > 0 else math.nan
    for i in range(HISTORY, len(b.close)):
        if b.session[i] != b.session[i - 1]:
            gap = b.open[i] - b.close[i - 1]
        out[i - HISTORY] = gap / b.atr[i]
    state[0] = gap
