"""Compare features with those of a live stream: at each push no later bar exists, so nothing can look ahead.

Cuts are samples, and a leak in a few random rows escapes them. A stream that completes one base bar at a time has no
future at any row, so the whole file's rows must equal its rows, to the bit.
"""

from itertools import pairwise

import numpy as np
import pandas as pd

from ml_factory.data.resample import resample_bars, to_bar_chunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureSpec, FeatureStream
from ml_factory.leakage.timed_tables import TimedTable
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator

STRETCH = 250  # rows in a stretch that is pushed bar by bar, where not all rows are


def stream_feature_table(
    bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, rows: int, seed: int = 0
) -> TimedTable:
    """Return the feature rows of a stream of these bars; about `rows` rows are pushed singly.

    Columns of the user's own features are left out: a stream may compute them with other last bits.
    """
    stream = FeatureStream(market, spec)
    cuts = stream_push_positions(bars, market, spec.base_minutes, rows, seed)
    given, chunk = [], to_bar_chunk(bars, market)
    with progress_phase("live feed", len(bars)) as done:
        for first, stop in pairwise(cuts):
            given.append(stream.push(chunk.part(first, stop)))
            done(stop - first)
    known_at = np.concatenate([one.known_at for one in given])
    own = len(stream.names) - len(spec.custom)
    values = np.concatenate([one.values[:, :own] for one in given])
    return TimedTable(known_at, known_at, names=tuple(stream.names[:own]), matrix=values)


def stream_push_positions(
    bars: pd.DataFrame, market: MarketSpec, base: int, rows: int, seed: int, since: int = 0
) -> np.ndarray:
    """Return int64 positions, increasing, that split the bars into pushes of at most one base bar.

    The pushes lie in stretches over all bars.
    """
    first = np.searchsorted(bars.index.as_unit("ns").asi8, resample_bars(bars, market, base).start)
    stretch = min(STRETCH, rows)
    count = -(-rows // stretch)
    if len(first) > rows:
        spacing = len(first) / count
        begin = (np.arange(count) + seeded_generator(seed, "feed").random(count)) * (spacing - stretch)
        kept = (begin + np.arange(count) * stretch).astype(np.int64)[:, None] + np.arange(stretch)
        first = first[np.minimum(kept.ravel(), len(first) - 1)]
    return np.unique(np.concatenate([[0], first, [len(bars)]]))


def select_common_columns(table: TimedTable, other: TimedTable) -> TimedTable:
    """Return the columns of `table` that `other` has too, in its order."""
    places = [table.names.index(name) for name in other.names if name in table.names]
    return TimedTable(
        table.at, table.proven, names=tuple(table.names[k] for k in places), matrix=table.matrix[:, places]
    )
