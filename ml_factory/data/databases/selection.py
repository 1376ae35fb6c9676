"""Which rows of a database are exported: its table, its columns, the symbol and the range of time."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow

from ml_factory.data.parsing import EPOCH_UNITS, PRICES, SPELLINGS
from ml_factory.errors import SettingsError, did_you_mean

SYMBOL_COLUMNS = ("symbol", "ticker", "instrument", "sym", "pair")  # the first found wins
TIME_COLUMNS = ("timestamp", *SPELLINGS["timestamp"])
FORMATS = (".parquet", ".csv")
ARROW_TYPES = {
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
    value : SQL of its values in the type of its kind
    """

    name: str
    kind: str
    stored: str
    value: str


@dataclass(frozen=True)
class RowSelection:
    """Rows and columns to read, as the user names them.

    table : also schema.table; None: the only table with prices
    symbol : None: all rows, of a table with one symbol
    start, end : first time, and the first time that is no longer read; text, or None
    columns : None: all but the symbol's
    time_column, symbol_column : None: by their usual names
    """

    table: str | None = None
    symbol: str | None = None
    start: str | None = None
    end: str | None = None
    columns: Sequence[str] | None = None
    time_column: str | None = None
    symbol_column: str | None = None

    def __post_init__(self) -> None:
        if self.symbol is not None and not _SYMBOL.fullmatch(self.symbol):
            raise SettingsError(
                "This cannot be the name of a symbol", where="--symbol", got=repr(self.symbol[:80]),
                wanted="letters, digits, spaces and ./:=^#+@&$!*~-_, at most 64", next_step="give for example MES",
            )  # fmt: skip
        for option, text in (("--start", self.start), ("--end", self.end)):
            try:
                pd.Timestamp(text or 0)
            except (ValueError, TypeError) as error:
                raise SettingsError("This is not a time", where=option, got=repr(text[:80]), wanted="such as "
                                    "2024-01-31 or 2024-01-31T14:30Z") from error  # fmt: skip


def check_output_format(name: str) -> str:
    """Return the suffix of the output's name. Raises SettingsError for another one."""
    suffix = "".join(re.findall(r"\.[^./]+$", name)).lower()
    if suffix not in FORMATS:
        raise SettingsError(
            "The file's name decides its format", where="--output", got=repr(name), wanted=" or ".join(FORMATS),
            next_step="give for example data/training_set.parquet",
        )  # fmt: skip
    return suffix


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def choose_table(
    tables: dict[str, str], columns_of: Callable[[str], Sequence[Column]], given: str | None, where: str
) -> str:
    """Return the name of the table that was named, or of the only one with prices.

    tables : name -> SQL; of two names of one table the last one is shown
    """
    if given is not None:
        if given in tables:
            return given
        raise SettingsError(
            "There is no such table, or it may not be read", where=where, got=repr(given[:80]),
            wanted="a table of this database's catalogue", next_step=did_you_mean(given, tables),
        )  # fmt: skip
    names = {sql: name for name, sql in tables.items()}
    priced = [name for sql, name in names.items() if _has_prices(columns_of(sql))]
    if len(priced) == 1:
        return priced[0]
    got = ", ".join(sorted(priced)[:10]) or "no table with " + ", ".join(PRICES)
    raise SettingsError("Which table holds the bars?", where=where, got=got, next_step="name it with --table")


def _has_prices(found: Sequence[Column]) -> bool:
    lower = {column.name.lower() for column in found}
    return all(not lower.isdisjoint((price, *SPELLINGS[price])) for price in PRICES)


def choose_columns(found: Sequence[Column], selection: RowSelection, where: str) -> tuple[list[Column], Column | None]:
    """Return the columns to read, the time first, and the column of symbols where there is one.

    Raises SettingsError naming a column that does not exist or cannot hold a time.
    """
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
    if selection.columns is None:
        others = [column for column in found if column not in (symbol, time) and column.name != "timestamp"]
    else:
        others = [by_name[name] for name in dict.fromkeys(selection.columns) if name != time.name]
    if any(column.name == "timestamp" for column in others):
        raise SettingsError("Two columns would be called timestamp", where=where, got=f"--time-column {time.name}",
                            next_step="leave the other one out of --columns")  # fmt: skip
    return [time, *others], symbol


def _named(found: Sequence[Column], names: Sequence[str]) -> Column | None:
    lower = {column.name.lower(): column for column in reversed(found)}
    return next((lower[name] for name in names if name in lower), None)


def _time_column(found: Sequence[Column], given: str | None, where: str) -> Column:
    fitting = [column for column in found if column.kind in ("utc", "time", "integer", "float")]
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


def time_bound(text: str, column: Column, option: str, newest: float) -> pyarrow.Scalar:
    """Return the value of the time column at a time that the user gives.

    Text without a zone is UTC, or the clock of a column without a zone.

    newest : greatest value of the column, from which the unit of an epoch follows
    """
    moment = pd.Timestamp(text)
    if column.kind == "time" and moment.tz is not None:
        raise SettingsError("The times of this table have no zone", where=f"{option}, column {column.name}",
                            got=repr(text), next_step="leave the zone out")  # fmt: skip
    utc = moment if moment.tz is None else moment.tz_convert(None)
    if column.kind in ("utc", "time"):
        return pyarrow.scalar(utc.to_datetime64().astype("M8[us]")).cast(ARROW_TYPES[column.kind])
    for low, high, factor in EPOCH_UNITS.values():
        if low <= abs(newest) < high:
            nanoseconds = utc.as_unit("ns").value
            value = nanoseconds / factor if column.kind == "float" else -(-nanoseconds // factor)
            return pyarrow.scalar(value, ARROW_TYPES[column.kind])
    raise SettingsError("These numbers are no epoch in s, ms, us or ns", where=f"column {column.name}", got=newest,
                        next_step=f"leave {option} out")  # fmt: skip


def format_time(value: pyarrow.Scalar) -> str:
    """Return a value of the time column as text that a database reads back exactly."""
    if pyarrow.types.is_timestamp(value.type):
        return f"{np.datetime64(value.value, 'us')}{'Z' * (value.type.tz is not None)}"
    return repr(value.as_py())
