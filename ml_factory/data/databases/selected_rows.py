"""The rows of a database that are exported: counted first, then read in order of time.

Names come from the catalogue and are quoted. A symbol has no quote in it (`RowSelection`), and times are written by
`format_time`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow

from ml_factory.data.databases.connections import Postgres, QuestDB, TableColumn, quoted
from ml_factory.data.parsing import EPOCH_UNITS, SPELLINGS
from ml_factory.data.sessions import PRICES
from ml_factory.errors import BarsError, SettingsError, did_you_mean

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


def _choose_table(
    tables: dict[str, str], columns_of: Callable[[str], Sequence[TableColumn]], given: str | None, where: str
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
    lower = {name: {column.name.lower() for column in columns_of(sql)} for sql, name in names.items()}
    spelt = [{price, *SPELLINGS[price]} for price in PRICES]
    priced = [name for name, found in lower.items() if all(found & one for one in spelt)]
    if len(priced) == 1:
        return priced[0]
    got = ", ".join(sorted(priced)[:10]) or "no table with " + ", ".join(PRICES)
    raise SettingsError("Which table holds the bars?", where=where, got=got, next_step="name it with --table")


def _choose_columns(
    found: Sequence[TableColumn], selection: RowSelection, where: str
) -> tuple[list[TableColumn], TableColumn | None]:
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


def _named(found: Sequence[TableColumn], names: Sequence[str]) -> TableColumn | None:
    lower = {column.name.lower(): column for column in reversed(found)}
    return next((lower[name] for name in names if name in lower), None)


def _time_column(found: Sequence[TableColumn], given: str | None, where: str) -> TableColumn:
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


def _time_bound(text: str, column: TableColumn, option: str, newest: float) -> pyarrow.Scalar:
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


class SelectedRows:
    """The selected rows of an open database.

    table, symbol, schema : what was found; the schema begins with `timestamp`
    rows, first, last : their count and ends
    """

    def __init__(self, database: Postgres | QuestDB, selection: RowSelection, shown: str):
        self._database, self._conditions = database, []
        tables = database.tables()
        self.table = _choose_table(tables, database.columns, selection.table, shown)
        self._from, self._where = tables[self.table], f"{shown}, {self.table}"
        self._columns, symbol = _choose_columns(database.columns(self._from), selection, self._where)
        self._time = self._columns[0]
        names = ["timestamp", *(column.name for column in self._columns[1:])]
        kinds = [ARROW_TYPES[column.kind] for column in self._columns]
        self.schema = pyarrow.schema(list(zip(names, kinds, strict=True)))
        self.symbol = selection.symbol
        if self.symbol is None and symbol is not None:
            self.symbol = self._only_symbol(symbol)
        if self.symbol is not None:
            self._conditions.append(f"{symbol.value} = '{self.symbol}'")
        for option, sign, text in (("--start", ">=", selection.start), ("--end", "<", selection.end)):
            if text is not None:
                self._limit(sign, _time_bound(text, self._time, option, self._newest()))
        self.rows, self.first, self.last = self._count()
        self._limit("<=", self.last)  # a live table grows while it is read

    def _only_symbol(self, column: TableColumn) -> str | None:
        """Return the only symbol of the table. Raises SettingsError where there are several: that is not one market."""
        found = self._database.query(f"SELECT DISTINCT {column.value} FROM {self._from} LIMIT 11")
        if len(found) > 1:
            names = ", ".join(sorted(str(symbol) for (symbol,) in found)[:10])
            raise SettingsError("This table has bars of several symbols", where=self._where, got=names,
                                next_step="choose one with --symbol")  # fmt: skip
        (symbol,) = found[0] if found else (None,)
        return None if symbol is None else RowSelection(symbol=str(symbol)).symbol  # refuses one with quotes

    def _limit(self, sign: str, value: pyarrow.Scalar) -> None:
        """Add a condition on the time."""
        text = format_time(value)
        literal = f"'{text}'" if pyarrow.types.is_timestamp(value.type) else text
        self._conditions.append(f"{self._time.value} {sign} {literal}")

    def _newest(self) -> float:
        """Return the greatest number of a time column of numbers."""
        if self._time.kind in ("utc", "time"):
            return 0.0
        ((newest,),) = self._database.query(f"SELECT max({self._time.value}) FROM {self._selected()}")
        return newest or 0.0

    def _count(self) -> tuple[int, pyarrow.Scalar, pyarrow.Scalar]:
        """Return count, first and last time. Raises BarsError for no rows, or rows without a time."""
        time = self._time.value
        question = f"SELECT count(*), count({time}), min({time}), max({time}) FROM {self._selected()}"
        ((rows, timed, first, last),) = self._database.query(question)
        if rows > timed:
            raise BarsError(
                "Rows without a time cannot be bars", where=f"{self._where}, column {self._time.name}",
                got=f"{rows - timed:,} rows that are NULL there",
                next_step="correct them, or give a view without them",
            )  # fmt: skip
        if not rows:
            got = "0 rows" + ("" if self.symbol is None else f" of the symbol {self.symbol!r}")
            raise BarsError("No rows to export", where=self._where, got=got,
                            next_step="check --symbol, --start and --end")  # fmt: skip
        return rows, *(pyarrow.scalar(one).cast(self.schema.types[0]) for one in (first, last))

    def _selected(self) -> str:
        return self._from + (" WHERE " + " AND ".join(self._conditions) if self._conditions else "")

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows in order of time."""
        named = [
            f"{column.value} AS {quoted(name)}" for column, name in zip(self._columns, self.schema.names, strict=True)
        ]
        query = f"SELECT {', '.join(named)} FROM {self._selected()} ORDER BY {self._time.value}"
        yield from self._database.batches(query, self.schema)
