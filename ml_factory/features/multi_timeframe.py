"""Coarse frames: names of their columns, and the staleness of bars joined on `known_at`."""

import numpy as np

from ml_factory.data.sessions import MINUTE_NS

CHUNK = 65_536
_LONG = {240: "4h", 1440: "1d"}


def timeframe_name(length: int) -> str:
    """Return the name of a frame: 60m, 4h, 1d."""
    return _LONG.get(length, f"{length}m")


def timeframe_column_name(name: str, minutes: int) -> str:
    """Return the name of a column of a coarse frame: `rsi_14@60m`, `rsi_14@4h`, `rsi_14@1d`."""
    return f"{name}@{timeframe_name(minutes)}"


def timeframe_staleness(known_at_base: np.ndarray, known_at_coarse: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Return the age of the joined coarse bars, in minutes: mean, median, 99th percentile and maximum.

    In a session every age is below the frame's length; the first rows of a session see the last session's bar.

    rows : int64[N], position of the joined coarse bar of each base row, as of `asof_rows`; none below 0
    """
    if not len(rows):
        return dict.fromkeys(("mean", "median", "p99", "max"), float("nan"))
    # Ages are whole minutes: counted in chunks, they need no array as long as the file.
    counts = np.zeros(1, np.int64)
    for begin in range(0, len(rows), CHUNK):
        part = slice(begin, begin + CHUNK)
        more = np.bincount((known_at_base[part] - known_at_coarse[rows[part]]) // MINUTE_NS, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    ages, up_to = np.arange(len(counts)), np.cumsum(counts)
    mean, highest = float(ages @ counts / up_to[-1]), float(np.flatnonzero(counts)[-1])
    return {"mean": mean, "median": _quantile(up_to, 0.5), "p99": _quantile(up_to, 0.99), "max": highest}


def _quantile(up_to: np.ndarray, share: float) -> float:
    """Return the quantile of whole numbers given their cumulative counts, interpolated as in np.quantile."""
    place = share * (up_to[-1] - 1)
    low, high = np.searchsorted(up_to, [np.floor(place), np.ceil(place)], side="right")
    return float(low + (high - low) * (place - np.floor(place)))
