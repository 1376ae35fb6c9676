"""Rows of a QuestDB table through its REST interface: questions to /exec, rows as CSV from /exp.

The interface has no parameters. Names come from the catalogue and are quoted; a symbol has no quote in it
(`columns.RowSelection`), and times are written by `format_time_value`.
"""

import base64
import http.client
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlencode

import numpy as np
import pyarrow
import pyarrow.csv

from ml_factory.data.databases.address import DatabaseAddress
from ml_factory.data.databases.columns import (
    ChosenColumns,
    Column,
    RowSelection,
    choose_columns,
    choose_table,
    format_time_value,
    has_prices,
    time_bound,
)
from ml_factory.data.databases.table_summary import TableSummary, check_one_symbol, check_summary
from ml_factory.errors import DatabaseError
from ml_factory.storage.json_values import parse_json

ANSWER_SECONDS = 60.0  # of silence
_LARGEST_ANSWER, _BLOCK = 1 << 24, 1 << 20  # bytes
_KINDS = {
    "TIMESTAMP": "utc", "DATE": "utc", "BYTE": "integer", "SHORT": "integer", "INT": "integer",
    "LONG": "integer", "FLOAT": "float", "DOUBLE": "float", "BOOLEAN": "boolean",
}  # fmt: skip


class QuestDBRows:
    """The selected rows of one table. Raises DatabaseError, SettingsError."""

    def __init__(self, address: DatabaseAddress, selection: RowSelection):
        self._address = address
        tables = [str(row[0]) for row in self._query("SELECT table_name FROM tables()")]
        priced = [name for name in tables if selection.table is None and has_prices([c.name for c in self._of(name)])]
        self.table = choose_table(tables, priced, selection.table, address.shown)
        where = f"{address.shown}, {self.table}"
        self.columns: ChosenColumns = choose_columns(self._of(self.table), selection, where)
        self.symbol, self._conditions = selection.symbol, []
        if self.symbol is None and self.columns.symbol is not None:
            name = _quoted(self.columns.symbol.name)
            several = self._query(f"SELECT DISTINCT {name} FROM {_quoted(self.table)} LIMIT 11")
            self.symbol = check_one_symbol([row[0] for row in several], where)
            RowSelection(symbol=self.symbol)  # refuses one with quotes
        if self.symbol is not None:
            self._conditions.append(f"{_quoted(self.columns.symbol.name)} = '{self.symbol}'")
        self._limit(selection)
        self.summary = self._summarize(where)
        self._conditions.append(self._bound("<=", self.summary.last))  # a live table grows while it is read

    @property
    def known_rows(self) -> int:
        """Count of the selected rows."""
        return self.summary.rows

    def close(self) -> None:
        """Nothing stays open between two questions."""

    def _of(self, table: str) -> list[Column]:
        """Return the columns of a table."""
        found = self._query(f"SHOW COLUMNS FROM {_quoted(table)}")
        kinds = [(str(row[0]), str(row[1])) for row in found]
        return [Column(name, _KINDS.get(stored.partition("(")[0], "text"), stored) for name, stored in kinds]

    def _limit(self, selection: RowSelection) -> None:
        """Add the conditions on time."""
        time = self.columns.time
        for option, sign in (("start", ">="), ("end", "<")):
            if text := getattr(selection, option):
                newest = 0.0
                if time.kind != "utc":
                    ((answer,),) = self._query(f"SELECT max({_quoted(time.name)}) FROM {_quoted(self.table)}")
                    newest = float(answer or 0)
                self._conditions.append(self._bound(sign, time_bound(text, time, f"--{option}", newest)))

    def _bound(self, sign: str, value: float) -> str:
        text = format_time_value(value, self.columns.time)
        return f"{_quoted(self.columns.time.name)} {sign} " + (f"'{text}'" if self.columns.time.kind == "utc" else text)

    def _summarize(self, where: str) -> TableSummary:
        time = self.columns.time
        name = _quoted(time.name)
        ((rows, known, first, last),) = self._query(
            f"SELECT count(), count({name}), min({name}), max({name}) FROM {_quoted(self.table)}{self._where()}"
        )
        ends = [None if one is None else _microseconds(one) if time.kind == "utc" else one for one in (first, last)]
        summary = TableSummary(int(rows), *ends, None)
        check_summary(summary, int(rows) - int(known), where, time, self.symbol)
        return summary

    def _where(self, *more: str) -> str:
        conditions = [*self._conditions, *more]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    # ------------------------------------------------------------------ rows

    def batches(self, since: float | None = None) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows in order of time; rows of one time come as QuestDB has stored them.

        since : value of the time column to begin with, None for the first row
        """
        more = [] if since is None else [self._bound(">=", since)]
        names = ", ".join(_quoted(column.name) for column in self.columns.exported)
        order = _quoted(self.columns.time.name)
        query = f"SELECT {names} FROM {_quoted(self.table)}{self._where(*more)} ORDER BY {order}"
        schema = self.columns.arrow_schema()
        read = pyarrow.csv.ReadOptions(block_size=_BLOCK, column_names=schema.names, skip_rows=1)
        convert = pyarrow.csv.ConvertOptions(
            column_types=schema, null_values=["", "null"], strings_can_be_null=True, quoted_strings_can_be_null=False,
            true_values=["true"], false_values=["false"],
        )  # fmt: skip
        with self._answer("/exp", query) as answer, _Body(answer) as body:
            try:
                yield from pyarrow.csv.open_csv(body, read_options=read, convert_options=convert)
            except pyarrow.ArrowInvalid as error:
                raise DatabaseError(
                    "QuestDB's answer is not the requested table",
                    where=f"{self._address.shown}, {self.table}",
                    got=" ".join(str(error).split())[:200], next_step="run the same command again",
                ) from error  # fmt: skip

    # ------------------------------------------------------------------ HTTP

    def _query(self, query: str) -> list[list]:
        with self._answer("/exec", query) as answer:
            try:
                return parse_json(answer.read(_LARGEST_ANSWER))["dataset"]
            except (ValueError, LookupError, TypeError) as error:
                raise DatabaseError(
                    "This is not QuestDB", where=self._address.shown, got=str(error)[:200],
                    next_step="give the address of its REST interface, port 9000",
                ) from error  # fmt: skip

    @contextmanager
    def _answer(self, path: str, query: str) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a query; no redirection is followed, so that a password stays with its host."""
        parts = self._address.parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
        user, password = self._address.login
        password = password or os.environ.get("PGPASSWORD", "") if user else ""
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}{path}?{urlencode({'query': query})}",
                               headers={"Authorization": f"Basic {login}"} if user else {})  # fmt: skip
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                refused = answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
                raise DatabaseError(
                    "QuestDB refused a question", where=self._address.shown, got=_server_message(answer),
                    next_step="check the user in --source and PGPASSWORD" if refused else "check --source",
                )  # fmt: skip
            yield answer
        except (OSError, http.client.HTTPException) as error:
            lost = path == "/exp"
            raise DatabaseError(
                "The connection to the database was lost" if lost else "The database cannot be reached",
                where=self._address.shown, got=f"{type(error).__name__}: {error}"[:200],
                next_step="run the same command again: it continues after the last part" if lost else "check --source",
            ) from error  # fmt: skip
        finally:
            with suppress(OSError):
                connection.close()


class _Body(io.RawIOBase):
    """The body of an answer as a file; one that ends in mid-line, or before its length, raises ConnectionError."""

    def __init__(self, answer: http.client.HTTPResponse):
        self._answer, self._left, self._last = answer, answer.length, b"\n"

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        piece = self._answer.read(_BLOCK if size is None or size < 0 else size)
        if piece:
            self._last = piece[-1:]
            self._left = None if self._left is None else self._left - len(piece)
        elif self._left or self._last != b"\n":
            raise ConnectionError("the answer ended before its end")
        return piece


def _server_message(answer: http.client.HTTPResponse) -> str:
    """Return the message of an answer with an error, in one line."""
    content = answer.read(4096)
    with suppress(ValueError):
        found = parse_json(content)
        content = str(found.get("error", "")).encode() if isinstance(found, dict) else content
    text = " ".join(content.decode(errors="replace").split())[:200]
    return f"HTTP {answer.status} {answer.reason}: {text}"


def _microseconds(text: str) -> int:
    return int(np.datetime64(str(text).rstrip("Z"), "us").astype(np.int64))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
