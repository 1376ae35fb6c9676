"""Serialisation of the parts of a prepared data set.

Labels are plain Arrow columns (times int64 ns UTC), splits are runs of positions in JSON; features and the facts of
their rows are arrays (`memmap`).
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ml_factory.features.build import FeatureRows
from ml_factory.targets.labels import BARRIERS

ROW_FACTS = np.dtype([("known_at", "<i8"), ("session", "<i4"), ("segment", "<i4"), ("close", "<f8")])


def feature_row_facts(matrix: FeatureRows) -> np.ndarray:
    """Return known_at (ns, UTC), session, segment and close of each feature row, as one ROW_FACTS array."""
    facts = np.empty(len(matrix.known_at), ROW_FACTS)
    for name in ROW_FACTS.names:
        facts[name] = getattr(matrix, name)
    return facts


def labels_to_arrow(labels: pd.DataFrame) -> pa.Table:
    """Return an Arrow table: known_at from the index, then the columns of `triple_barrier_labels`."""
    columns = {"known_at": _to_arrow_timestamps(labels.index)}
    for name, column in labels.items():
        if isinstance(column.dtype, pd.DatetimeTZDtype):
            columns[name] = _to_arrow_timestamps(pd.DatetimeIndex(column))
        elif name == "barrier":
            columns[name] = pa.array(column.astype(object).to_numpy(), pa.string())
        else:
            columns[name] = pa.array(column.to_numpy())
    return pa.table(columns)


def labels_from_arrow(table: pa.Table) -> pd.DataFrame:
    """Restore the labels: index known_at (UTC, ns), barrier a categorical of BARRIERS; a writable copy."""
    columns = {}
    for name in table.column_names[1:]:
        if name == "barrier":
            named = table.column(name).combine_chunks().dictionary_encode()
            codes = pd.Index(BARRIERS).get_indexer(named.dictionary.to_pylist())[named.indices.to_numpy()]
            columns[name] = pd.Categorical.from_codes(codes, categories=list(BARRIERS))
        elif pa.types.is_timestamp(table.schema.field(name).type):
            columns[name] = _index_from_arrow(table, name)
        else:
            columns[name] = np.array(table.column(name).to_numpy())
    return pd.DataFrame(columns, index=_index_from_arrow(table))


def write_parquet_table(table: pa.Table, path: Path) -> None:
    """Write Parquet without dictionary and compression: float features hardly shrink, and reading is a copy."""
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


def write_json_line(obj: object, path: Path) -> None:
    """Write one line of JSON; raise ValueError for NaN and infinity, which JSON cannot hold."""
    path.write_text(json.dumps(obj, allow_nan=False) + "\n", encoding="utf-8")


def _to_arrow_timestamps(moments: np.ndarray | pd.DatetimeIndex) -> pa.Array:
    """Convert int64 ns, or an index in UTC, to Arrow timestamps."""
    if isinstance(moments, pd.DatetimeIndex):
        moments = moments.as_unit("ns").asi8
    return pa.array(np.asarray(moments, np.int64)).cast(pa.timestamp("ns", tz="UTC"))


def to_utc_index(moments: np.ndarray, name: str = "known_at") -> pd.DatetimeIndex:
    """Convert int64 ns to a DatetimeIndex in UTC."""
    return pd.DatetimeIndex(np.ascontiguousarray(moments).view("M8[ns]"), tz="UTC", name=name)


def _index_from_arrow(table: pa.Table, name: str = "known_at") -> pd.DatetimeIndex:
    """Return the table's column of that name as `_to_arrow_timestamps` wrote it."""
    return to_utc_index(np.array(table.column(name).cast(pa.int64()).to_numpy()), name)


def encode_position_runs(rows: np.ndarray) -> list[list[int]]:
    """Encode positions as contiguous runs [first, stop)."""
    rows = np.asarray(rows, np.int64)
    if not len(rows):
        return []
    edges = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.append(0, edges + 1)], rows[np.append(edges, len(rows) - 1)]
    return [[int(first), int(last) + 1] for first, last in zip(firsts, lasts, strict=True)]


def decode_position_runs(runs: list[list[int]]) -> np.ndarray:
    """Decode runs to positions, int64."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, stop, dtype=np.int64) for first, stop in runs)])
