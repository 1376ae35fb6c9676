"""Rows of features as a live feed gives them: at each push no later bar exists, so there is nothing to look ahead to.

Cuts are samples, and a leak that sits in a few rows at random slips between them. A feed that completes one base bar at
a time has no future at any row, so the whole file's rows must be its rows, to the bit.
"""

from itertools import pairwise

import numpy as np
import pandas as pd

from ml_factory.data.activity_bars import base_bars
from ml_factory.data.resample import to_chunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureSpec
from ml_factory.features.stream import FeatureStream
from ml_factory.leakage.tables import Table
from ml_factory.progress import phase
from ml_factory.seeding import generator

STRETCH = 250  # rows in a stretch that is fed bar by bar, where not all rows are


def table_of_feed(
    bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, rows: int, seed: int = 0, since: int = 0
) -> Table:
    """The rows of features that a feed of these bars gives; of those made of bar `since` and later ones about `rows`
    come singly, or all if fewer.

    Columns of the user's own are left out: a stream may give them other last bits.
    """
    stream = FeatureStream(market, spec)
    cuts = pushes(bars, market, spec.base, rows, seed, since)
    given, chunk = [], to_chunk(bars, market)
    with phase("live feed", len(bars)) as done:
        for first, stop in pairwise(cuts):
            given.append(stream.push(chunk.part(first, stop)))
            done(stop - first)
    known_at = np.concatenate([one.known_at for one in given])
    own = len(stream.names) - len(spec.custom)
    values = np.concatenate([one.values[:, :own] for one in given])
    return Table(known_at, known_at, names=tuple(stream.names[:own]), matrix=values)


def pushes(bars: pd.DataFrame, market: MarketSpec, base: int | str, rows: int, seed: int, since: int = 0) -> np.ndarray:
    """int64, rising: positions that part the bars from `since` on into pushes of at most one base bar, in stretches
    over all of them.

    Bars by activity are parted at their ends: minutes that fill none may follow the last of a session.
    """
    made = base_bars(bars, market, base)
    edges = made.start if isinstance(base, int) else made.known_at
    first = np.searchsorted(bars.index.as_unit("ns").asi8, edges)
    first = first[first >= since]
    stretch = min(STRETCH, rows)
    count = -(-rows // stretch)
    if len(first) > rows:
        room = len(first) / count
        begin = (np.arange(count) + generator(seed, "feed").random(count)) * (room - stretch)
        kept = (begin + np.arange(count) * stretch).astype(np.int64)[:, None] + np.arange(stretch)
        first = first[np.minimum(kept.ravel(), len(first) - 1)]
    return np.unique(np.concatenate([[0], first, [len(bars)]]))


def shared(table: Table, other: Table) -> Table:
    """The columns of `table` that `other` has too, in its order."""
    places = [table.names.index(name) for name in other.names if name in table.names]
    return Table(table.at, table.proven, names=tuple(table.names[k] for k in places), matrix=table.matrix[:, places])
