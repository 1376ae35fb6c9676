"""Prices far from their neighbours: prints that come straight back, flash moves, and feeds that are no market."""

from collections.abc import Iterator

import numpy as np

from ml_factory.data.market_scale import stays, usual_move
from ml_factory.data.report import Finding, count_of

SPIKE_TIMES = 25.0  # an extreme this many usual moves beyond both neighbours
FLASH_TIMES = 40.0  # a move this many usual moves away from the bar before; NQ has 4 in 700,000, on news days
VIOLENT_RETURN = 0.10  # within one bar
VIOLENT_DAYS = 0.07  # of the days have one that stays: 0.03 in the wild year of 2013, 0.2 on a test network


def spike_scores(log: dict[str, np.ndarray], beside: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """float64[N]: how far each bar's high or low stands beyond both neighbours, in usual moves.

    A missing neighbour (the session's first or last bar, a silence) is replaced by the bar's own open or close.
    """
    follows = np.append(beside[1:], False)
    high, low = log["high"], log["low"]
    above, below = np.zeros(len(high)), np.zeros(len(high))
    for values, out, worst, sign in ((high, above, np.maximum, 1.0), (low, below, np.minimum, -1.0)):
        before = np.where(beside, np.roll(values, 1), log["open"])
        after = np.where(follows, np.roll(values, -1), log["close"])
        out[:] = sign * (values - worst(before, after))
    return np.maximum(np.maximum(above, below), 0.0) / usual


def find_spikes(
    log: dict[str, np.ndarray], beside: np.ndarray, edge: np.ndarray, day: np.ndarray, minutes: int
) -> Iterator[Finding]:
    """Findings of this family.

    log : log prices, float64[N], in one unit.  beside : bool[N], False also where the level changes by itself.
    edge : bool[N], the first bar of a session.  day : int[N], the exchange day.
    """
    close = log["close"]
    move = np.diff(close, prepend=close[:1])
    usual = usual_move(move, beside, edge)
    spike = spike_scores(log, beside, usual) > SPIKE_TIMES
    if spike.any():
        rows = np.flatnonzero(spike)
        message = (
            f"{count_of(len(rows), 'bar')} with a price more than {SPIKE_TIMES:.0f} usual moves beyond both neighbours"
        )
        yield Finding("spike", "reported", rows, message)
    sound = close[np.maximum.accumulate(np.where(spike, 0, np.arange(len(close))))]  # the last close of no spike
    before = np.concatenate([sound[:1], sound[:-1]])
    reach = np.where(beside & ~spike, np.maximum(log["high"] - before, before - log["low"]), 0.0)
    flash = np.flatnonzero(reach > FLASH_TIMES * usual)
    if len(flash):
        message = f"{count_of(len(flash), 'bar')} with a move of more than {FLASH_TIMES:.0f} usual ones that does not "
        yield Finding(
            "flash_move", "reported", flash, message + f"come straight back (up to {np.expm1(reach.max()):.1%})"
        )
    yield from _not_a_market(close, np.where(beside & ~spike, close - before, 0.0), day, minutes)


def violent_moves(close: np.ndarray, move: np.ndarray) -> np.ndarray:
    """int64: rows whose close is more than VIOLENT_RETURN away from the one before, and stays there.

    close, move : float64[N], log close and its move, 0 where it is no move of one bar.
    """
    rows = np.flatnonzero(np.abs(move) > VIOLENT_RETURN)
    return rows[stays(close, rows, move[rows])]


def violent_days(violent: np.ndarray, day: np.ndarray) -> float:
    """Share of the days that hold one of these rows."""
    return len(np.unique(day[violent])) / len(np.unique(day))


def _not_a_market(close: np.ndarray, move: np.ndarray, day: np.ndarray, minutes: int) -> Iterator[Finding]:
    violent = violent_moves(close, move)
    share = violent_days(violent, day)
    if minutes <= 5 and len(violent) > 10 and share > VIOLENT_DAYS:
        message = f"on {share:.0%} of the days a bar closes more than {VIOLENT_RETURN:.0%} away from the one before "
        message += f"and the price stays there ({len(violent)} bars): a test network or a broken feed makes such prices"
        yield Finding("not_a_market", "reported", violent, message)
