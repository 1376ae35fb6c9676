"""Match the columns of a table of bars, in any usual spelling, with our names."""

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarFinding
from ml_factory.data.parsing import combine_date_and_time
from ml_factory.errors import BarsError, did_you_mean

PRICES = ("open", "high", "low", "close")
_NO_ROWS = np.empty(0, np.int64)

# column -> other spellings, the first found wins
SPELLINGS = {
    "timestamp": ("datetime", "date_time", "open_time", "ts", "ts_event", "time", "date", "unix", "unix_timestamp"),
    "open": ("o", "open_price", "opening"),
    "high": ("h", "high_price", "max"),
    "low": ("l", "low_price", "min"),
    "close": ("c", "close_price", "last", "closing"),
    "volume": ("vol", "v", "tick_volume", "tickvol", "trade_volume", "base_volume"),
}


def normalize_column_name(name: object) -> str:
    """Return a column's name in lower case, without brackets or quotes, words joined by `_`."""
    return re.sub(r"[\s\-/]+", "_", str(name).strip().strip("<>\"'").strip().lower())


def match_bar_columns(
    raw: pd.DataFrame, where: object, given: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, pd.Series], list[BarFinding]]:
    """Return our column names with the columns of `raw` that carry them, and the findings on mapped names.

    given : (ours, theirs) as the user declares; theirs must exist
    """
    for ours, theirs in given:
        if theirs not in raw.columns:
            raise BarsError(
                "There is no such column", where=where or "bars", got=f"{ours}={theirs}",
                wanted="one of " + ", ".join(map(repr, raw.columns.tolist())),
                next_step=did_you_mean(theirs, [str(name) for name in raw.columns]),
            )  # fmt: skip
    if given:
        taken = dict(given)
        others = raw.drop(
            columns=[name for name in raw if normalize_column_name(name) in taken and name not in taken.values()]
        )
        raw = others.rename(columns={theirs: ours for ours, theirs in taken.items()})
        raw.attrs = {}
    named: dict[str, list] = {}
    for column in raw.columns:
        named.setdefault(normalize_column_name(column), []).append(column)
    found, mapped = {}, []
    for target, others in SPELLINGS.items():
        spelling = next((name for name in (target, *others) if name in named), None)
        if spelling is None:
            continue
        if len(named[spelling]) > 1:
            got = ", ".join(map(repr, named[spelling]))
            raise BarsError("Two columns of one name", where=where or "bars", got=got, next_step="keep one of them")
        found[target] = raw[named[spelling][0]]
        if named[spelling][0] != target:
            mapped.append(f"{named[spelling][0]!r} as {target}")
    if "date" in named and "time" in named and not {"timestamp", "datetime"} & set(named):
        found["timestamp"] = combine_date_and_time(raw, named["date"][0], named["time"][0])
        mapped = [text for text in mapped if not text.endswith("as timestamp")] + ["date and time as timestamp"]
    elif "timestamp" not in found and _is_time_index(raw.index):
        found["timestamp"] = raw.index.to_series(index=range(len(raw)))
        mapped.append("the index as timestamp")
    absent = [name for name in ("timestamp", *PRICES) if name not in found]
    if absent:
        raise BarsError(
            f"Missing column {', '.join(map(repr, absent))}",
            where=where or "bars",
            got="columns " + ", ".join(map(repr, raw.columns.tolist())),
            wanted="timestamp, open, high, low, close and perhaps volume",
            next_step="name them: --columns close=Schluss, or rename the columns in the first line",
        )
    mapped += [f"{theirs!r} as {ours}" for ours, theirs in given if ours != theirs]
    message = "columns read: " + ", ".join(mapped)
    return found, [BarFinding("columns", "mapped", _NO_ROWS, message)] if mapped else []


def _is_time_index(index: pd.Index) -> bool:
    names = ("timestamp", *SPELLINGS["timestamp"])
    return isinstance(index, pd.DatetimeIndex) or (
        index.name is not None and normalize_column_name(index.name) in names
    )
