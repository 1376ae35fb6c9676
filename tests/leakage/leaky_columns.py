"""Columns that look ahead, each beside its honest twin."""

import numpy as np
import pandas as pd
from scipy import signal

from ml_factory.data.sessions import DAY_NS, MINUTE_NS
from tests.leakage.catalogue import Seen, feature_leak


def own_move(seen: Seen) -> np.ndarray:
    return seen.moves


def rolling(values: np.ndarray, **how) -> np.ndarray:
    return pd.Series(values).rolling(11, min_periods=1, **how).mean().to_numpy()


def by_session(seen: Seen, values: np.ndarray, what: str) -> np.ndarray:
    return pd.Series(values).groupby(seen.base.session).transform(what).to_numpy()


def typical(seen: Seen) -> np.ndarray:
    return np.log((seen.base.high + seen.base.low + seen.base.close) / 3)


@feature_leak("negative shift", own_move)
def next_move(seen):
    return np.append(seen.moves[1:], 0.0)


@feature_leak("negative shift", own_move)
def move_of_a_month_later(seen):
    return np.append(seen.moves[4_000:], np.zeros(min(4_000, len(seen.moves))))


@feature_leak("negative shift", own_move, kind="tiny")
def trace_of_the_next_move(seen):
    return seen.moves + 1e-6 * np.append(seen.moves[1:], 0.0)


@feature_leak("centred window", lambda seen: rolling(seen.moves))
def centred_mean(seen):
    return rolling(seen.moves, center=True)


@feature_leak("zero-phase filter", lambda seen: signal.lfilter(*signal.butter(2, 0.1), seen.moves))
def filtered_both_ways(seen):
    return signal.filtfilt(*signal.butter(2, 0.1), seen.moves, padlen=0)


@feature_leak("FFT convolution", lambda seen: np.convolve(seen.moves, np.ones(7))[: len(seen.moves)], kind="tiny")
def convolved_by_fft(seen):
    """Looks back only, yet its rounding depends on every later bar."""
    return signal.fftconvolve(seen.moves, np.ones(7))[: len(seen.moves)]


@feature_leak("smoothed regime", own_move)
def smoothed_state(seen):
    forward = pd.Series(seen.moves**2).ewm(span=20).mean()
    backward = pd.Series(seen.moves[::-1] ** 2).ewm(span=20).mean()[::-1].to_numpy()
    return forward.to_numpy() + backward


@feature_leak("whole-day VWAP", own_move)
def day_vwap(seen):
    volume = seen.base.volume if seen.base.volume is not None else np.ones(len(seen.base))
    total = by_session(seen, typical(seen) * volume, "sum")
    return seen.log_close - total / by_session(seen, volume, "sum")


@feature_leak("whole-day high", own_move)
def day_high(seen):
    return np.log(by_session(seen, seen.base.high, "max")) - seen.log_close


@feature_leak("day frame joined on its date", own_move)
def close_of_the_day(seen):
    return np.log(by_session(seen, seen.base.close, "last")) - seen.log_close


@feature_leak("left-labelled join", own_move)
def hour_by_its_start(seen):
    hours = seen.hours
    rows = np.searchsorted(hours.start, seen.base.known_at, side="right") - 1
    return np.where(rows >= 0, np.log(hours.close[rows]), np.nan) - seen.log_close


@feature_leak("interpolation over a gap", lambda seen: seen.log_close - rolling(seen.log_close), kind="sparse")
def filled_over_long_holes(seen):
    """Before a hole of over half an hour inside a session, the middle of the last price and the next one."""
    hole = np.diff(seen.base.start, append=seen.base.start[-1:]) > 30 * MINUTE_NS
    same = np.append(np.diff(seen.base.session) == 0, False)
    following = np.append(seen.log_close[1:], seen.log_close[-1:])
    filled = np.where(hole & same, (seen.log_close + following) / 2, seen.log_close)
    return filled - rolling(seen.log_close)


@feature_leak("backfill", lambda seen: week_ends(seen)[0], kind="sparse")
def backfilled_weekend(seen):
    """Unknown in the last row of a week, then filled from the next one."""
    return pd.Series(week_ends(seen)[1]).bfill().fillna(0.0).to_numpy()


def week_ends(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """A slow column, whole and with its last row before each weekend unknown."""
    value = pd.Series(seen.moves).ewm(span=50).mean().to_numpy()
    last = np.append(np.diff(seen.base.known_at) > 40 * 60 * MINUTE_NS, False)
    return value, np.where(last, np.nan, value)


@feature_leak("spike repair with the next bar", lambda seen: seen.log_close - rolling(seen.log_close), kind="sparse")
def repaired_spike(seen):
    """A jump of over 1 % that the next bar takes back is taken out, before that is known."""
    repaired, jump = seen.log_close.copy(), np.abs(seen.moves) > 0.01
    spike = np.flatnonzero(jump & (np.append(seen.moves[1:], 0.0) * seen.moves < 0))
    repaired[spike] = repaired[spike - 1]
    return repaired - rolling(seen.log_close)


@feature_leak("scale of the full sample", own_move)
def z_of_the_whole_file(seen):
    return (seen.moves - seen.moves.mean()) / seen.moves.std()


@feature_leak("scale of the full sample", own_move, kind="tiny")
def centred_by_a_trace_of_the_mean(seen):
    return seen.moves - 1e-3 * seen.moves.mean()


@feature_leak("quantile of the full sample", own_move)
def above_the_ninth_decile(seen):
    return (seen.moves > np.quantile(seen.moves, 0.9)).astype(float)


@feature_leak("rank over the full file", own_move)
def rank_in_the_file(seen):
    return pd.Series(seen.moves).rank(pct=True).to_numpy()


@feature_leak("divided by the file's maximum", own_move)
def share_of_the_highest(seen):
    return seen.base.close / seen.base.high.max()


@feature_leak("PCA fitted on all rows", own_move)
def first_component(seen):
    lags = np.column_stack([np.roll(seen.moves, k) for k in range(5)])
    lags[:5] = 0.0
    _, vectors = np.linalg.eigh(np.cov(lags.T))
    return lags @ vectors[:, -1]


@feature_leak("target encoding over all rows", own_move)
def usual_outcome_of_the_hour(seen):
    hour = (seen.base.known_at % DAY_NS) // (60 * MINUTE_NS)
    following = pd.Series(np.append(seen.moves[1:], 0.0))
    return following.groupby(hour).transform("mean").to_numpy()


@feature_leak("volume of the future", own_move)
def next_volume(seen):
    volume = seen.base.volume if seen.base.volume is not None else seen.base.high - seen.base.low
    return np.log1p(np.append(volume[1:], 0.0))


@feature_leak("join shifted by daylight saving", lambda seen: hours_by(seen, seen.base.known_at))
def hour_by_a_fixed_offset(seen):
    """Wall-clock times turned back with the winter offset: an hour ahead as soon as the clocks have changed."""
    return hours_by(seen, seen.base.known_at + summer(seen.base.known_at) * 60 * MINUTE_NS)


@feature_leak("join shifted by daylight saving", lambda seen: hours_by(seen, seen.base.known_at), kind="sparse")
def hour_ahead_in_the_first_minutes_of_summer(seen):
    """The same, put right after the first twenty minutes."""
    now, change = seen.base.known_at, np.flatnonzero(np.diff(summer(seen.base.known_at)) == 1) + 1
    first = np.zeros(len(now), np.int64)
    for row in change:
        first[row : row + 4] = 1
    return hours_by(seen, now + first * 60 * MINUTE_NS)


def summer(known_at: np.ndarray) -> np.ndarray:
    utc = pd.DatetimeIndex(known_at.astype("M8[ns]"), tz="UTC")
    offset = utc.tz_convert("America/Chicago").tz_localize(None).as_unit("ns").asi8 - known_at
    return (offset == -5 * 60 * MINUTE_NS).astype(np.int64)


def hours_by(seen: Seen, moment: np.ndarray) -> np.ndarray:
    hours = seen.hours
    rows = np.searchsorted(hours.known_at, moment, side="right") - 1
    return np.where(rows >= 0, np.log(hours.close[rows]), np.nan) - seen.log_close


@feature_leak("known by the session's end", own_move, kind="sparse")
def next_open_in_the_last_row_of_friday(seen):
    weekend = np.append(np.diff(seen.base.known_at) > 40 * 60 * MINUTE_NS, False)
    return np.where(weekend, np.append(np.log(seen.base.open[1:]), 0.0) - seen.log_close, seen.moves)
