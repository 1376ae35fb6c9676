"""The selected rows of one table: counted first, then read in order of time.

Names come from the catalogue and are quoted. A symbol has no quote in it (`RowSelection`), and times are written by
`format_time`.
"""

from collections.abc import Iterator

import pyarrow

from ml_factory.data.databases.postgres import Postgres
from ml_factory.data.databases.questdb import QuestDB
from ml_factory.data.databases.selection import (
    ARROW_TYPES,
    Column,
    RowSelection,
    choose_columns,
    choose_table,
    format_time,
    quoted,
    time_bound,
)
from ml_factory.errors import BarsError, SettingsError


class SelectedRows:
    """The selected rows of an open database.

    table, symbol, schema : what was found; the schema begins with `timestamp`
    rows, first, last : their count and ends
    """

    def __init__(self, database: Postgres | QuestDB, selection: RowSelection, shown: str):
        self._database, self._conditions = database, []
        tables = database.tables()
        self.table = choose_table(tables, database.columns, selection.table, shown)
        self._from, self._where = tables[self.table], f"{shown}, {self.table}"
        self._columns, symbol = choose_columns(database.columns(self._from), selection, self._where)
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
                self._limit(sign, time_bound(text, self._time, option, self._newest()))
        self.rows, self.first, self.last = self._count()
        self._limit("<=", self.last)  # a live table grows while it is read

    @property
    def _time(self) -> Column:
        return self._columns[0]

    def _only_symbol(self, column: Column) -> str | None:
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
        time = self._database.finite(self._time)
        question = f"SELECT count(*), count({time}), min({time}), max({time}) FROM {self._selected()}"
        ((rows, timed, first, last),) = self._database.query(question)
        if rows > timed:
            raise BarsError(
                "Rows without a time cannot be bars", where=f"{self._where}, column {self._time.name}",
                got=f"{rows - timed:,} rows that are NULL or infinite there",
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
