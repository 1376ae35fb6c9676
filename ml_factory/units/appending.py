"""Bars that only grew: what was made of the first of them is kept, and the new ones cost what they are."""

import numpy as np
import pandas as pd

from ml_factory.data.resample import Frame, asof_rows, frames_of
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.mapped import content_hash
from ml_factory.datasets.store import Store
from ml_factory.errors import NotPreparedError
from ml_factory.features.build import FeatureMatrix, FeatureSpec
from ml_factory.features.multi_timeframe import frame_name, staleness
from ml_factory.features.stream import FeatureRows, FeatureStream
from ml_factory.progress import phase
from ml_factory.runs.storage import fingerprint, plain

STREAM_BARS = 50_000


def grown_from(store: Store, bars: pd.DataFrame, made: dict, spec: FeatureSpec) -> Store | None:
    """The symbol's current data set, when it is sound and was made in the same way of the first of these bars.

    Not with features of the user's own: a stream may give those other last bits than the whole file.
    """
    try:
        before = Store.current(store.folder.parent)
    except NotPreparedError:
        return None
    same = all(before.facts[name] == plain(made[name]) for name in ("settings", "sources", "market"))
    raw = before.facts["raw"]
    grown = same and raw["rows"] <= len(bars) and raw["bars"] == bars_hash(bars.iloc[: raw["rows"]])
    exact = not spec.custom and before.load_state() is not None and not before.verify()
    return before if grown and exact else None


def state_after(bars: pd.DataFrame, matrix: FeatureMatrix, market: MarketSpec, spec: FeatureSpec) -> dict | None:
    """What later rows are made from; None with features of the user's own, whose last bits a stream may change."""
    return None if spec.custom else FeatureStream.after(bars, matrix, market, spec).get_state()


def append_rows(before: Store, bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec) -> tuple[FeatureRows, dict]:
    """The feature rows that follow those of `before`, and the state after them: the stream goes on where it stood."""
    stream, old = FeatureStream(market, spec), before.facts["raw"]["rows"]
    stream.load_state(before.load_state())
    with phase("features", len(bars) - old) as done:
        firsts = range(old, max(len(bars), old + 1), STREAM_BARS)  # the same bars in another file are no new ones
        pieces = []
        for first in firsts:
            pieces.append(stream.push(bars.iloc[first : first + STREAM_BARS]))
            done(STREAM_BARS)
    names = ("values", "known_at", "session", "segment", "close")
    columns = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in names)
    return FeatureRows(*columns, exact=all(piece.exact for piece in pieces)), stream.get_state()


def bars_hash(bars: pd.DataFrame) -> str:
    """Hex digest of checked bars: their moments, the columns' names and what is in them."""
    columns = {}
    for name, column in bars.items():
        codes, texts = (column, ()) if pd.api.types.is_numeric_dtype(column) else pd.factorize(column)
        columns[name] = [content_hash(np.ascontiguousarray(codes)), *map(str, texts)]
    return fingerprint({"start": content_hash(bars.index.as_unit("ns").asi8), "columns": columns})


def frames_and_ages(bars: pd.DataFrame, market: MarketSpec, spec: FeatureSpec, first: int) -> tuple[Frame, dict]:
    """The base frame, and `FeatureMatrix.frame_staleness` of its rows from `first` on."""
    frames = frames_of(bars, market, (spec.base_minutes, *spec.frames))
    base = frames.pop(spec.base_minutes)
    ages = {}
    for minutes, frame in frames.items():
        joined = asof_rows(base.known_at, frame.known_at)[first:]
        ages[frame_name(minutes)] = staleness(base.known_at[first:], frame.known_at, joined)
    return base, ages
