"""Rows of a PostgreSQL table through ADBC: Arrow batches of `COPY`, or of a server-side cursor where it is refused.

All queries of an export run in one read-only transaction of one snapshot. Names come from the catalogue and
are quoted; values travel as parameters into settings of the transaction, which `COPY`, that has no parameters, reads.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow

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
from ml_factory.data.databases.row_hash import format_content_hash, hash_floats, hash_integers, postgres_hash_sql
from ml_factory.data.databases.table_summary import TableSummary, check_one_symbol, check_summary
from ml_factory.errors import DatabaseError
from ml_factory.lazy_module import import_module_or_explain

_log = logging.getLogger("ml_factory")
_USE_COPY, _BATCH_BYTES = "adbc.postgresql.use_copy", "adbc.postgresql.batch_size_hint_bytes"
_BATCH, _FETCHED_ROWS = 1 << 21, 50_000
_KINDS = {
    "timestamptz": "utc", "timestamp": "time", "date": "time", "int2": "integer", "int4": "integer", "int8": "integer",
    "float4": "float", "float8": "float", "numeric": "float", "bool": "boolean",
}  # fmt: skip
_EXPRESSIONS = {
    "utc": "{0}", "time": "{0}::timestamp", "integer": "{0}::bigint", "float": "{0}::double precision",
    "boolean": "{0}", "text": "{0}::text",
}  # fmt: skip
_TABLES = """
SELECT n.nspname::text AS schema, c.relname::text AS name, c.oid::bigint AS oid, pg_table_is_visible(c.oid) AS visible,
       (SELECT string_agg(a.attname::text, chr(1)) FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND n.nspname !~ '^pg_(toast|temp)' AND has_table_privilege(c.oid, 'SELECT')
ORDER BY 1, 2"""
_COLUMNS = """
SELECT a.attname::text AS name, coalesce(b.typname, t.typname)::text AS stored
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
     LEFT JOIN pg_catalog.pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
WHERE a.attrelid = $1::bigint::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_UNIQUE_KEYS = """
SELECT string_agg(a.attname::text, chr(1)) AS columns
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = $1::bigint::oid AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
  AND i.indexprs IS NULL
GROUP BY i.indexrelid"""


class PostgresRows:
    """The selected rows of one table, as of the moment this is made.

    Raises DatabaseError, SettingsError, MissingPackageError.
    """

    def __init__(self, address: DatabaseAddress, selection: RowSelection):
        self._address, self._driver = address, import_module_or_explain("adbc_driver_postgresql.dbapi")
        with self._errors("The database cannot be reached"):
            self._connection = self._driver.connect(address.libpq_uri())
        try:
            with self._errors("The database refused a question"):
                hashes, self._copies = self._has_our_hash(), self._allows_copy()
                self._run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                # Compiling the one pass of the hash takes as long as a million rows of it.
                self._query("SELECT set_config(name, 'off', true) AS value FROM pg_settings WHERE name = 'jit'")
                self._find(selection)
                self.summary = self._summarize(selection, hashes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the transaction; a lost connection is closed all the same."""
        with suppress(self._driver.Error):
            self._connection.close()

    # ------------------------------------------------------------------ what there is

    def _find(self, selection: RowSelection) -> None:
        """Resolve table and columns in the catalogue, and set the values of the selection."""
        tables, priced = {}, []
        for one in self._query(_TABLES):
            names = [f"{one['schema']}.{one['name']}", *([one["name"]] if one["visible"] else [])]
            tables |= dict.fromkeys(names, one)
            if has_prices((one["columns"] or "").split("\1")):
                priced.append(names[-1])
        self.table = choose_table(list(tables), priced, selection.table, self._address.shown)
        found, where = tables[self.table], f"{self._address.shown}, {self.table}"
        columns = [Column(one["name"], _KINDS.get(one["stored"], "text"), one["stored"])
                   for one in self._query(_COLUMNS, found["oid"])]  # fmt: skip
        self.columns: ChosenColumns = choose_columns(columns, selection, where)
        self._from = f"{_quoted(found['schema'])}.{_quoted(found['name'])}"
        self.symbol, self._conditions = selection.symbol, []
        if self.symbol is None and self.columns.symbol is not None:
            name = f"{_quoted(self.columns.symbol.name)}::text"
            several = self._query(f"SELECT DISTINCT {name} AS symbol FROM {self._from} LIMIT 11")
            self.symbol = check_one_symbol([one["symbol"] for one in several], where)
        if self.symbol is not None:
            self._set_symbol(self.columns.symbol, self.symbol)
        self._is_key = any(
            set((one["columns"] or "").split("\1")) <= {self.columns.time.name, *self._selected_by()}
            for one in self._query(_UNIQUE_KEYS, found["oid"])
        )

    def _selected_by(self) -> list[str]:
        return [self.columns.symbol.name] if self.columns.symbol and self.symbol is not None else []

    def _set_symbol(self, column: Column, symbol: str) -> None:
        name = _quoted(column.name)
        plain = {"text": "", "varchar": "", "bpchar": "::bpchar", "name": "::name"}.get(column.stored)
        value = self._setting("symbol", symbol)
        self._conditions.append(f"{name} = {value}{plain}" if plain is not None else f"{name}::text = {value}")

    def _set_bound(self, option: str, sign: str, value: float) -> str:
        """Return the condition on the time column."""
        column = self.columns.time
        kind = {"utc": "timestamptz", "time": "timestamp", "integer": "bigint", "float": "float8"}[column.kind]
        return f"{_quoted(column.name)} {sign} {self._setting(option, format_time_value(value, column))}::{kind}"

    def _setting(self, name: str, value: str) -> str:
        """Set a value for this transaction as a parameter; return the SQL that reads it."""
        self._query("SELECT set_config($1, $2, true) AS value", f"ml_factory.{name}", value)
        return f"current_setting('ml_factory.{name}')"

    def _summarize(self, selection: RowSelection, hashes: bool) -> TableSummary:
        """Return count, ends and hash of the selected rows, of one pass over them in the database."""
        time = self.columns.time
        name, value = _quoted(time.name), self._expressions()[0]
        if selection.start or selection.end:
            where = f" WHERE {' AND '.join(self._conditions)}" if self._conditions else ""
            (newest,) = self._query(f"SELECT max({name})::text AS newest FROM {self._from}{where}")
            for option, sign in (("start", ">="), ("end", "<")):
                if text := getattr(selection, option):
                    size = float(newest["newest"] or 0) if time.kind in ("integer", "float") else 0.0
                    bound = time_bound(text, time, f"--{option}", size)
                    self._conditions.append(self._set_bound(option, sign, bound))
        finite = {
            "utc": f"isfinite({name})", "time": f"isfinite({name})", "integer": "true",
            "float": f"{value} NOT IN ('NaN', 'Infinity', '-Infinity')",
        }[time.kind]  # fmt: skip
        hashed = postgres_hash_sql(self.columns.exported, self._expressions()) if hashes else "NULL"
        (found,) = self._query(
            f"SELECT count(*) AS count, count(*) FILTER (WHERE {name} IS NULL OR NOT {finite}) AS timeless, "
            f"min({value}) AS first, max({value}) AS last, ({hashed})::text AS hash FROM {self._from}{self._where()}",
            raw=True,
        )
        total = None if found["hash"] is None else format_content_hash(int(found["hash"]))
        summary = TableSummary(found["count"], found["first"], found["last"], total)
        check_summary(summary, found["timeless"], f"{self._address.shown}, {self.table}", time, self.symbol)
        return summary

    def _has_our_hash(self) -> bool:
        """Return whether this server hashes as `row_hash` does; others (before 11, forks) are read twice instead."""
        try:
            (got,) = self._query(
                "SELECT hashint8extended(-5::bigint, 3) AS integers, hashfloat8extended(1.5::float8, 2) AS floats"
            )
        except self._driver.ProgrammingError:
            return False
        finally:
            self._connection.rollback()
        ours = int(hash_integers(np.array([-5]), 3)[0]), int(hash_floats(np.array([1.5]), 2)[0])
        return (got["integers"], got["floats"]) == ours

    def _allows_copy(self) -> bool:
        """Return whether this server answers `COPY (SELECT ...)`; without it rows come through a cursor."""
        try:
            self._run("SELECT 1 AS one")
        except self._driver.ProgrammingError as error:
            _log.info("This server refuses COPY, its rows come through a cursor: %s", _first_line(error))
            return False
        finally:
            self._connection.rollback()
        return True

    # ------------------------------------------------------------------ rows

    def batches(self, since: float | None = None) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows in order of time, and of all their values where times repeat.

        since : value of the time column to begin with, None for the first row
        """
        more = [] if since is None else [self._set_bound("since", ">=", since)]
        values, schema = self._expressions(), self.columns.arrow_schema()
        order = values[:1] if self._is_key else [
            f'{value} COLLATE "C"' if column.kind == "text" else value
            for value, column in zip(values, self.columns.exported, strict=True)
        ]  # fmt: skip
        named = [f"{value} AS {_quoted(name)}" for value, name in zip(values, schema.names, strict=True)]
        query = f"SELECT {', '.join(named)} FROM {self._from}{self._where(more)} ORDER BY {', '.join(order)}"
        with self._errors("The connection to the database was lost", lost=True):
            for batch in self._stream(query):
                yield pyarrow.RecordBatch.from_arrays(
                    [one.cast(kind) for one, kind in zip(batch.columns, schema.types, strict=True)], schema=schema
                )

    def _stream(self, query: str) -> Iterator[pyarrow.RecordBatch]:
        if self._copies:
            with self._connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{_BATCH_BYTES: str(_BATCH)})
                cursor.execute(query)
                with cursor.fetch_record_batch() as reader:
                    yield from reader
            return
        self._run(f"DECLARE ml_factory_rows NO SCROLL CURSOR FOR {query}")
        while (fetched := self._fetch(f"FETCH FORWARD {_FETCHED_ROWS} FROM ml_factory_rows")).num_rows:
            yield from fetched.to_batches()
        self._run("CLOSE ml_factory_rows")

    # ------------------------------------------------------------------ SQL

    def _expressions(self) -> list[str]:
        return [_EXPRESSIONS[column.kind].format(_quoted(column.name)) for column in self.columns.exported]

    def _where(self, more: list[str] | None = None) -> str:
        conditions = [*self._conditions, *(more or [])]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    def _run(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def _query(self, question: str, *values: Any, raw: bool = False) -> list[dict]:
        """Return the rows of an answer; raw : times as integers."""
        answer = self._fetch(question, *values)
        if raw:
            kinds = [pyarrow.int64() if pyarrow.types.is_timestamp(one) else one for one in answer.schema.types]
            answer = pyarrow.table([one.cast(kind) for one, kind in zip(answer.columns, kinds, strict=True)],
                                   names=answer.schema.names)  # fmt: skip
        return answer.to_pylist()

    def _fetch(self, question: str, *values: Any) -> pyarrow.Table:
        """Return a whole answer, which is read without COPY."""
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{_USE_COPY: "false"})
            cursor.execute(question, values or None)
            return cursor.fetch_arrow_table()

    @contextmanager
    def _errors(self, what: str, lost: bool = False) -> Iterator[None]:
        """Raise DatabaseError for an error of the driver."""
        try:
            yield
        except (self._driver.Error, OSError, pyarrow.ArrowException) as error:
            message = _first_line(error)
            step = "run the same command again: it continues after the last part" if lost else "check --source"
            if "password" in message:
                step = (
                    "put the password into PGPASSWORD or ~/.pgpass (mode 0600), or into Colab's secrets as PGPASSWORD"
                )
            raise DatabaseError(what, where=self._address.shown, got=message, next_step=step) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_line(error: Exception) -> str:
    """Return the message of the server in one line, without the query."""
    message = str(error).partition("\n\nQuery was:")[0].partition("\nLINE ")[0].replace("[libpq] ", "")
    return " ".join(message.split())[:300]
