"""Bars that repeat themselves: a feed that gives its last price again, and runs without volume."""

from collections.abc import Iterator

import numpy as np

from ml_factory.data.market_scale import rows_of_runs, runs_of, surprise
from ml_factory.data.report import Finding, count_of

STALE_NATS = 60.0  # a run less likely than exp(-60) by this market's habit
NO_VOLUME_NATS = 60.0


def find_repeats(prices: dict[str, np.ndarray], volume: np.ndarray | None, beside: np.ndarray) -> Iterator[Finding]:
    """Findings of this family.

    prices : high, low, close (and open), float64[N].  volume : float64[N] with NaN where unknown, or None.
    beside : bool[N], the bar follows its predecessor within the session.
    """
    first, length, score = stale_runs(prices, beside)
    long = score > STALE_NATS
    if long.any():
        runs = count_of(int(long.sum()), "run")
        message = f"{runs} of bars that repeat one price, the longest of {int(length[long].max())}"
        yield Finding("stale_run", "reported", rows_of_runs(first[long], length[long]), message)
    if volume is None:
        return
    first, length = runs_of(volume == 0)
    long = surprise(first, length, len(volume)) > NO_VOLUME_NATS
    if long.any():
        runs = count_of(int(long.sum()), "run")
        message = f"{runs} of bars without volume, the longest of {int(length[long].max())}"
        yield Finding("zero_volume", "reported", rows_of_runs(first[long], length[long]), message)


def stale_runs(prices: dict[str, np.ndarray], beside: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, length, nats) of the runs of flat bars at the close before them."""
    close = prices["close"]
    flat = (prices["high"] == prices["low"]) & beside
    flat[1:] &= close[1:] == close[:-1]
    first, length = runs_of(flat)
    return first, length, surprise(first, length, len(flat))
