"""Rows of a PostgreSQL table through ADBC: Arrow batches of `COPY`, or of a server-side cursor where it is refused.

All questions of an export see one snapshot; a second connection counts and hashes the rows while they are read. Names
come from the catalogue and are quoted; values travel as parameters.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

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
from ml_factory.data.databases.postgres_session import PostgresSession, quoted
from ml_factory.data.databases.row_hash import format_content_hash, hash_floats, hash_integers, postgres_hash_sql
from ml_factory.data.databases.table_summary import TableSummary, check_one_symbol, check_summary
from ml_factory.lazy_module import import_module_or_explain

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
        driver = import_module_or_explain("adbc_driver_postgresql.dbapi")
        self._address, self._session = address, PostgresSession(address, driver)
        with ExitStack() as opened:
            opened.callback(self._session.close)
            with self._session.errors("The database refused a question"):
                hashes = self._has_our_hash()
                self._copies = self._session.trial("SELECT 1 AS one", copy=True) is not None
                shares = self._session.trial("SELECT pg_export_snapshot() AS snapshot") is not None
                self._session.begin()
                self._find(selection)
                self._set_bounds(selection)
                other = self._session.share() if shares else None
                self._counted = self._begin_counting(other, hashes, opened)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End the transactions; lost connections are closed all the same."""
        self._opened.close()

    @property
    def summary(self) -> TableSummary:
        """Count, ends and hash of the selected rows; waits until the database has them."""
        with self._session.errors("The database refused a question"):
            return self._counted.result()

    @property
    def known_rows(self) -> int | None:
        """Count of the selected rows; None while the database still counts, or where it cannot."""
        done = self._counted.done() and self._counted.exception() is None
        return self._counted.result().rows if done else None

    def _begin_counting(self, other: PostgresSession | None, hashes: bool, opened: ExitStack) -> "Future[TableSummary]":
        """Begin to count and hash the rows in another connection; without one they are counted before they are read."""
        counted: Future[TableSummary] = Future()
        if other is None:
            counted.set_result(self._summarize(self._session, hashes))
            return counted
        pool = ThreadPoolExecutor(1, "counting")
        for end in (other.close, pool.shutdown, other.cancel):  # the last one first
            opened.callback(end)
        return pool.submit(self._summarize, other, hashes)

    # ------------------------------------------------------------------ what there is

    def _find(self, selection: RowSelection) -> None:
        """Resolve table and columns in the catalogue, and set the values of the selection."""
        tables, priced = {}, []
        for one in self._session.query(_TABLES):
            names = [f"{one['schema']}.{one['name']}", *([one["name"]] if one["visible"] else [])]
            tables |= dict.fromkeys(names, one)
            if has_prices((one["columns"] or "").split("\1")):
                priced.append(names[-1])
        self.table = choose_table(list(tables), priced, selection.table, self._address.shown)
        found, where = tables[self.table], f"{self._address.shown}, {self.table}"
        columns = [Column(one["name"], _KINDS.get(one["stored"], "text"), one["stored"])
                   for one in self._session.query(_COLUMNS, found["oid"])]  # fmt: skip
        self.columns: ChosenColumns = choose_columns(columns, selection, where)
        self._from = f"{quoted(found['schema'])}.{quoted(found['name'])}"
        self.symbol, self._conditions = selection.symbol, []
        if self.symbol is None and self.columns.symbol is not None:
            name = f"{quoted(self.columns.symbol.name)}::text"
            several = self._session.query(f"SELECT DISTINCT {name} AS symbol FROM {self._from} LIMIT 11")
            self.symbol = check_one_symbol([one["symbol"] for one in several], where)
        if self.symbol is not None:
            self._set_symbol(self.columns.symbol, self.symbol)
        self._is_key = any(
            set((one["columns"] or "").split("\1")) <= {self.columns.time.name, *self._selected_by()}
            for one in self._session.query(_UNIQUE_KEYS, found["oid"])
        )

    def _selected_by(self) -> list[str]:
        return [self.columns.symbol.name] if self.columns.symbol and self.symbol is not None else []

    def _set_symbol(self, column: Column, symbol: str) -> None:
        name = quoted(column.name)
        plain = {"text": "", "varchar": "", "bpchar": "::bpchar", "name": "::name"}.get(column.stored)
        value = self._session.set("symbol", symbol)
        self._conditions.append(f"{name} = {value}{plain}" if plain is not None else f"{name}::text = {value}")

    def _set_bound(self, option: str, sign: str, value: float) -> str:
        """Return the condition on the time column."""
        column = self.columns.time
        kind = {"utc": "timestamptz", "time": "timestamp", "integer": "bigint", "float": "float8"}[column.kind]
        return f"{quoted(column.name)} {sign} {self._session.set(option, format_time_value(value, column))}::{kind}"

    def _set_bounds(self, selection: RowSelection) -> None:
        """Add the conditions of the first and the last time; the unit of an epoch follows from the newest one."""
        time, size = self.columns.time, 0.0
        if (selection.start or selection.end) and time.kind in ("integer", "float"):
            question = f"SELECT max({quoted(time.name)})::text AS newest FROM {self._from}{self._where()}"
            size = float(self._session.query(question)[0]["newest"] or 0)
        for option, sign in (("start", ">="), ("end", "<")):
            if text := getattr(selection, option):
                bound = time_bound(text, time, f"--{option}", size)
                self._conditions.append(self._set_bound(option, sign, bound))

    def _summarize(self, session: PostgresSession, hashes: bool) -> TableSummary:
        """Return count, ends and hash of the selected rows, of one pass over them in the database."""
        time = self.columns.time
        name, value = quoted(time.name), self._expressions()[0]
        finite = {
            "utc": f"isfinite({name})", "time": f"isfinite({name})", "integer": "true",
            "float": f"{value} NOT IN ('NaN', 'Infinity', '-Infinity')",
        }[time.kind]  # fmt: skip
        hashed = postgres_hash_sql(self.columns.exported, self._expressions()) if hashes else "NULL"
        (found,) = session.query(
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
        found = self._session.trial(
            "SELECT hashint8extended(-5::bigint, 3) AS integers, hashfloat8extended(1.5::float8, 2) AS floats"
        )
        ours = int(hash_integers(np.array([-5]), 3)[0]), int(hash_floats(np.array([1.5]), 2)[0])
        return found == [{"integers": ours[0], "floats": ours[1]}]

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
        named = [f"{value} AS {quoted(name)}" for value, name in zip(values, schema.names, strict=True)]
        query = f"SELECT {', '.join(named)} FROM {self._from}{self._where(more)} ORDER BY {', '.join(order)}"
        with self._session.errors("The connection to the database was lost", lost=True):
            for batch in self._session.stream(query, self._copies):
                yield pyarrow.RecordBatch.from_arrays(
                    [one.cast(kind) for one, kind in zip(batch.columns, schema.types, strict=True)], schema=schema
                )

    def _expressions(self) -> list[str]:
        return [_EXPRESSIONS[column.kind].format(quoted(column.name)) for column in self.columns.exported]

    def _where(self, more: list[str] | None = None) -> str:
        conditions = [*self._conditions, *(more or [])]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""
