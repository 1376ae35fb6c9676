"""Prices between ticks, and sessions that change between on and off the tick."""

from collections.abc import Iterator

import numpy as np

from ml_factory.data.report import Finding

TICK_ERROR = 1e-3  # of a tick
ON_SHARE, OFF_SHARE = 0.05, 0.5  # of a session's bars: below it is on the tick, above it is off
REGIMES = 20  # more changes than this are no change of adjustment
OFF_SESSIONS = 3


def find_off_tick(
    prices: dict[str, np.ndarray], unit: np.ndarray, day: np.ndarray, tick: float | None
) -> Iterator[Finding]:
    """Rows off the tick, and the first rows of sessions where another adjustment begins.

    prices : float64[N].  unit : int64[N], the power of ten by which a bar is off (`levels`).  day : int[N].
    """
    if tick is None:
        return
    factor = 10.0**-unit
    off = np.zeros(len(day), bool)
    for values in prices.values():
        steps = values * factor / tick
        off |= np.abs(steps - np.round(steps)) > TICK_ERROR
    if not off.any():
        return
    rows = np.flatnonzero(off)
    message = f"{len(rows):,} bars ({off.mean():.2%}) hold prices off the tick of {tick:g}"
    message += ", as ratio back-adjusted series do" if off.mean() > 0.9 else ""
    yield Finding("off_tick", "reported", rows, message)
    _, first, count = np.unique(day, return_index=True, return_counts=True)
    share = np.add.reduceat(off.astype(float), first) / count
    kind = np.where(share < ON_SHARE, 0, np.where(share > OFF_SHARE, 1, -1))
    clear = np.flatnonzero(kind >= 0)
    turn = clear[1:][np.diff(kind[clear]) != 0]
    if len(turn) and len(turn) <= REGIMES and (kind[clear] == 1).sum() >= OFF_SESSIONS:
        message = f"sessions change between on and off the tick {len(turn)} times: prices are adjusted in another way"
        yield Finding("adjustment", "reported", first[turn], message + " from there on")
