"""Columns that look ahead: those of the contract in many rows, and here in the few where only a cut of its kind is."""

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from tests.contract.test_leaks import LEAKS, moves
from tests.leakage.catalogue import leaky_column

AT_RANDOM = ("one row of a thousand", "only after a still bar", "backfill")  # for the live feed, not for cuts
HOUR = 60 * MINUTE_NS


def slow(values: np.ndarray) -> np.ndarray:
    return values - pd.Series(values).rolling(11, min_periods=1).mean().to_numpy()


def before_a_weekend(b) -> np.ndarray:
    return np.append(np.diff(b.known_at) > 40 * HOUR, False)


def filled_over_long_holes(b):
    """Before a hole of over half an hour inside a session, the middle of the last price and the next one."""
    price, hole = np.log(b.close), np.diff(b.start, append=b.start[-1:]) > 30 * MINUTE_NS
    same = np.append(np.diff(b.session) == 0, False)
    return slow(np.where(hole & same, (price + np.append(price[1:], price[-1:])) / 2, price))


def backfilled_weekend(b):
    """Unknown in the last row of a week, then filled from the next one."""
    value = pd.Series(moves(b)).ewm(span=50).mean()
    return value.where(~before_a_weekend(b)).bfill().fillna(0.0).to_numpy()


def repaired_spike(b):
    """A jump of over 1 % that the next bar takes back is taken out, before that is known."""
    price, move = np.log(b.close), moves(b)
    spike = np.flatnonzero((np.abs(move) > 0.01) & (np.append(move[1:], 0.0) * move < 0))
    price[spike] = price[spike - 1]
    return slow(price)


def next_open_in_the_last_row_of_friday(b):
    return np.where(before_a_weekend(b), np.append(np.log(b.open[1:]), 0.0) - np.log(b.close), moves(b))


def close_ahead_in_the_first_minutes_of_summer(b):
    """Wall-clock times turned back with the winter offset, put right after the first twenty minutes."""
    utc = pd.DatetimeIndex(b.known_at.astype("M8[ns]"), tz="UTC")
    offset = utc.tz_convert("America/Chicago").tz_localize(None).as_unit("ns").asi8 - b.known_at
    later = np.zeros(len(b), np.int64)
    for row in np.flatnonzero(np.diff(offset) > 0) + 1:
        later[row : row + 4] = HOUR
    rows = np.searchsorted(b.known_at, b.known_at + later, side="right") - 1
    return np.log(b.close[rows] / b.close)


FEW = (filled_over_long_holes, backfilled_weekend, repaired_spike, next_open_in_the_last_row_of_friday,
       close_ahead_in_the_first_minutes_of_summer)  # fmt: skip
for name, column in LEAKS.items():
    if name not in AT_RANDOM:
        leaky_column(name, column)
for column in FEW:
    leaky_column(column.__name__, column)
