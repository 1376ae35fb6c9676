"""Calendar and session position: where in the exchange's day and week a row stands, and what the session did so far.

Only what the exchange publishes beforehand (open, close, early closes) and bars already seen are used. Markets that
never close have no overnight gap, so that column exists for the others alone.
"""

import numpy as np

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec, sessions_of
from ml_factory.features import rolling
from ml_factory.features.rolling import lag, ratio

WEEK_DAYS = 7


def calendar(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; none where `coarse`: the base frame knows it fresher."""
    if coarse:
        return {}
    close, session = bars.close, bars.session
    atr = rolling.average_true_range(bars.high, bars.low, close)
    progress = session_progress(bars, market)
    week = (session.astype(np.int64) + 3) % WEEK_DAYS  # day 0 was a Thursday; Monday is 0
    top = rolling.session_max(bars.high, session)
    bottom = -rolling.session_max(-bars.low, session)
    opened = rolling.session_first(bars.open, session)
    columns = {"session_progress": progress - 0.5}
    columns["session_sine"], columns["session_cosine"] = rolling.circle(progress)
    columns["week_sine"], columns["week_cosine"] = rolling.circle(week / WEEK_DAYS)
    columns["session_move"] = (close - opened) / (atr * np.sqrt(rolling.session_sum(np.ones(len(bars)), session)))
    columns["session_place"] = ratio(close - bottom, top - bottom, empty=0.5) - 0.5
    if market.calendar != "24h":
        columns["overnight_gap"] = rolling.session_first(bars.open - lag(close, 1), session) / atr
    return columns


def session_progress(bars: Frame, market: MarketSpec) -> np.ndarray:
    """Share of the session that has passed at `known_at`, 0 to 1; early closes count as the exchange announced them."""
    edges = sessions_of(bars.start, market.calendar)
    return (bars.known_at - edges.open_ns) / (edges.close_ns - edges.open_ns)
