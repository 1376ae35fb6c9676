"""Columns of a database's table: which are exported, which holds the time and which the symbol."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow

from ml_factory.data.bar_columns import PRICES, SPELLINGS
from ml_factory.data.parsing import EPOCH_UNITS
from ml_factory.errors import SettingsError, did_you_mean

SYMBOL_COLUMNS = ("symbol", "ticker", "instrument", "sym", "pair")  # the first found wins
TIME_COLUMNS = ("timestamp", *SPELLINGS["timestamp"])
TIME_KINDS = ("utc", "time", "integer", "float")
_ARROW_TYPES = {
    "utc": pyarrow.timestamp("us", "UTC"), "time": pyarrow.timestamp("us"), "integer": pyarrow.int64(),
    "float": pyarrow.float64(), "boolean": pyarrow.bool_(), "text": pyarrow.string(),
}  # fmt: skip
# Symbols of all vendors, such as ES=F, BTC/USDT, ^GSPC or @MES#; no quote, no backslash, no line break.
_SYMBOL = re.compile(r"[\w ./:=^#+@&$!*~-]{1,64}")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    kind : "utc" (time with a zone), "time" (without), "integer", "float", "boolean" or "text"
    stored : the database's own name of the type
    """

    name: str
    kind: str
    stored: str = ""


@dataclass(frozen=True)
class RowSelection:
    """Rows and columns to read, as the user names them.

    table : also schema.table; None: the only table with prices
    symbol : None: all rows, of a table with one symbol
    start, end : first time, and the first time that is no longer read; text, or None
    columns : None: all
    time_column, symbol_column : None: by their usual names
    """

    table: str | None = None
    symbol: str | None = None
    start: str | None = None
    end: str | None = None
    columns: tuple[str, ...] | None = None
    time_column: str | None = None
    symbol_column: str | None = None

    def __post_init__(self) -> None:
        if self.symbol is not None and not _SYMBOL.fullmatch(self.symbol):
            raise SettingsError(
                "This cannot be the name of a symbol", where="--symbol", got=repr(self.symbol[:80]),
                wanted="letters, digits, spaces and ./:=^#+@&$!*~-_, at most 64", next_step="give for example MES",
            )  # fmt: skip
        for option in ("start", "end"):
            if getattr(self, option):
                _parse_time(getattr(self, option), f"--{option}")


@dataclass(frozen=True)
class ChosenColumns:
    """The columns that are read: `exported` begins with the time; `symbol` selects rows, None where it is not used."""

    exported: list[Column]
    symbol: Column | None

    @property
    def time(self) -> Column:
        """The column by which rows are ordered."""
        return self.exported[0]

    def arrow_schema(self) -> pyarrow.Schema:
        """Return the schema of the file; the time is called `timestamp`."""
        names = ["timestamp", *(column.name for column in self.exported[1:])]
        kinds = [_ARROW_TYPES[column.kind] for column in self.exported]
        return pyarrow.schema(list(zip(names, kinds, strict=True)))


def choose_table(tables: Sequence[str], priced: Sequence[str], given: str | None, where: str) -> str:
    """Return the table that was named, or the only one with prices.

    tables : names of all tables; priced : of those that have columns of prices
    """
    if given is not None:
        if given in tables:
            return given
        raise SettingsError(
            "There is no such table, or it may not be read", where=where, got=repr(given[:80]),
            wanted="a table of this database's catalogue", next_step=did_you_mean(given, tables) if tables else "",
        )  # fmt: skip
    if len(priced) == 1:
        return priced[0]
    got = ", ".join(sorted(priced)[:10]) or "no table with " + ", ".join(PRICES)
    raise SettingsError("Which table holds the bars?", where=where, got=got, next_step="name it with --table")


def has_prices(names: Sequence[str]) -> bool:
    """Return whether columns of these names hold open, high, low and close, in any usual spelling."""
    lower = {name.lower() for name in names}
    return all(not lower.isdisjoint((price, *SPELLINGS[price])) for price in PRICES)


def choose_columns(found: Sequence[Column], selection: RowSelection, where: str) -> ChosenColumns:
    """Return the columns to read. Raises SettingsError naming one that does not exist or cannot hold a time."""
    by_name = {column.name: column for column in found}
    for option, names in (("--columns", selection.columns or ()), ("--time-column", [selection.time_column]),
                          ("--symbol-column", [selection.symbol_column])):  # fmt: skip
        for name in names:
            if name is not None and name not in by_name:
                raise SettingsError("There is no such column", where=f"{where}, {option}", got=repr(name[:80]),
                                    next_step=did_you_mean(name, by_name))  # fmt: skip
    time = _time_column(found, selection.time_column, where)
    symbol = by_name.get(selection.symbol_column) if selection.symbol_column else _named(found, SYMBOL_COLUMNS)
    if selection.symbol is not None and symbol is None:
        raise SettingsError(
            "This table has no column of symbols", where=where, got="columns " + ", ".join(by_name),
            next_step="name it with --symbol-column, or leave --symbol out",
        )  # fmt: skip
    if selection.columns is not None:
        wanted = [by_name[name] for name in dict.fromkeys(selection.columns)]
    else:
        wanted = [column for column in found if column not in (symbol, time) and column.name != "timestamp"]
    others = [column for column in wanted if column != time]
    if any(column.name == "timestamp" for column in others):
        raise SettingsError("Two columns would be called timestamp", where=where, got=f"--time-column {time.name}",
                            next_step="leave the other one out of --columns")  # fmt: skip
    return ChosenColumns([time, *others], symbol)


def _named(found: Sequence[Column], names: Sequence[str]) -> Column | None:
    lower = {column.name.lower(): column for column in reversed(found)}
    return next((lower[name] for name in names if name in lower), None)


def _time_column(found: Sequence[Column], given: str | None, where: str) -> Column:
    fitting = [column for column in found if column.kind in TIME_KINDS]
    if given is None:
        moments = [column for column in fitting if column.kind in ("utc", "time")]
        column = _named(fitting, TIME_COLUMNS) or (moments[0] if len(moments) == 1 else None)
    else:
        column = next((column for column in fitting if column.name == given), None)
    if column is None:
        got = ", ".join(f"{one.name} {one.stored}" for one in found if given in (None, one.name))
        raise SettingsError(
            "No column can be the time of a bar", where=where, got=got, wanted="a timestamp, or an integer epoch",
            next_step="make a view that casts it to a timestamp" if given else "name it with --time-column",
        )  # fmt: skip
    return column


# ---- times ----------------------------------------------------------------------------------------------------------


def _parse_time(text: str, option: str) -> pd.Timestamp:
    try:
        return pd.Timestamp(text)
    except (ValueError, TypeError) as error:
        raise SettingsError("This is not a time", where=option, got=repr(text[:80]), wanted="such as 2024-01-31 or "
                            "2024-01-31T14:30Z") from error  # fmt: skip


def time_bound(text: str, column: Column, option: str, newest: float) -> int | float:
    """Return the value of the time column at a time that the user gives.

    Text without a zone is UTC, or the clock of a column without a zone.

    newest : greatest value of the column, from which the unit of an epoch follows
    """
    moment = _parse_time(text, option)
    if column.kind == "time" and moment.tz is not None:
        raise SettingsError("The times of this table have no zone", where=f"{option}, column {column.name}",
                            got=repr(text), next_step="leave the zone out")  # fmt: skip
    utc = moment if moment.tz is None else moment.tz_convert(None)
    if column.kind in ("utc", "time"):
        return int(utc.to_datetime64().astype("M8[us]").astype(np.int64))
    for low, high, factor in EPOCH_UNITS.values():
        if low <= abs(newest) < high:
            nanoseconds = utc.as_unit("ns").value
            return nanoseconds / factor if column.kind == "float" else -(-nanoseconds // factor)
    raise SettingsError("These numbers are no epoch in s, ms, us or ns", where=f"column {column.name}", got=newest,
                        next_step=f"leave {option} out")  # fmt: skip


def format_time_value(value: float, column: Column) -> str:
    """Return a value of the time column as text that the database reads back exactly."""
    if column.kind in ("utc", "time"):
        return f"{np.datetime64(value, 'us')}{'Z' * (column.kind == 'utc')}"
    return repr(value)
