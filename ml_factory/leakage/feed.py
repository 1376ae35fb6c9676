"""Rows of features of a live feed: at each push no later bar exists, so nothing can look ahead.

The last row of each push has no future, the rows before it the future of that push alone. The pushes end at random base
bars of the whole file, so a leak of one row ahead is met in as many rows as there are pushes, a longer one in more.
"""

from itertools import pairwise

import numpy as np
import pandas as pd

from ml_factory.data.resample import resample_bars, to_bar_chunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureSpec, FeatureStream
from ml_factory.seeding import seeded_generator


def fed_features(bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, pushes: int, seed: int = 0) -> pd.DataFrame:
    """Return the features of a stream of these bars, index known_at; the end of each push is drawn from the base bars.

    Columns of the user's own features are left out: a stream may compute them with other last bits.
    """
    stream, chunk = FeatureStream(market, spec), to_bar_chunk(bars, market)
    first = np.searchsorted(bars.index.as_unit("ns").asi8, resample_bars(bars, market, spec.base_minutes).start)
    drawn = seeded_generator(seed, "feed").permutation(first)[:pushes]
    given = [stream.push(chunk.part(*part)) for part in pairwise(np.unique([0, *drawn, len(bars)]))]
    own = len(stream.names) - len(spec.custom)
    known_at = np.concatenate([one.known_at for one in given])
    index = pd.DatetimeIndex(known_at.view("M8[ns]"), tz="UTC", name="known_at")
    values = np.concatenate([one.values[:, :own] for one in given])
    return pd.DataFrame(values, index=index, columns=stream.names[:own], copy=False)
