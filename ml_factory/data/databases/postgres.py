"""PostgreSQL through ADBC: Arrow batches of `COPY`, all of one snapshot."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qsl, quote, urlencode

import pyarrow

from ml_factory.data.databases.address import DatabaseAddress, TableColumn, quoted
from ml_factory.errors import DatabaseError
from ml_factory.lazy_module import import_module_or_explain

# A server that is gone is noticed within a minute, and names are text in one encoding.
_OPTIONS = {
    "connect_timeout": "15", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "client_encoding": "UTF8", "fallback_application_name": "ml_factory",
}  # fmt: skip
_KINDS = {
    "timestamptz": "utc", "timestamp": "time", "date": "time", "int2": "integer", "int4": "integer", "int8": "integer",
    "float4": "float", "float8": "float", "numeric": "float", "bool": "boolean",
}  # fmt: skip
_PLAIN = ("timestamptz", "timestamp", "bool", "text", "varchar")  # types that need no cast
_CASTS = {"time": "::timestamp", "integer": "::bigint", "float": "::double precision", "text": "::text"}
_TABLES = """
SELECT n.nspname::text, c.relname::text, pg_table_is_visible(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND n.nspname !~ '^pg_(toast|temp)' AND has_table_privilege(c.oid, 'SELECT')
ORDER BY 1, 2"""
_COLUMNS = """
SELECT a.attname::text, coalesce(b.typname, t.typname)::text
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
     LEFT JOIN pg_catalog.pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
WHERE a.attrelid = '{}'::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""


class Postgres:
    """An open read-only transaction. Raises DatabaseError, MissingPackageError."""

    def __init__(self, address: DatabaseAddress):
        self._driver, self._shown = import_module_or_explain("adbc_driver_postgresql.dbapi"), address.shown
        given = dict(parse_qsl(address.parts.query, keep_blank_values=True))
        uri = address.parts._replace(query=urlencode(_OPTIONS | given, quote_via=quote)).geturl()
        with self._errors("The database cannot be reached", "check --source"):
            self._connection = self._driver.connect(uri)
            with self._connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def close(self) -> None:
        """End the transaction; a lost connection is closed all the same."""
        with suppress(self._driver.Error):
            self._connection.close()

    def tables(self) -> dict[str, str]:
        """Return the tables that may be read: name -> SQL."""
        found = {}
        for schema, name, visible in self.query(_TABLES):
            for shown in (f"{schema}.{name}", name)[: 1 + visible]:
                found[shown] = f"{quoted(schema)}.{quoted(name)}"
        return found

    def columns(self, table: str) -> list[TableColumn]:
        """Return the columns of a table, which is given as SQL."""
        columns = []
        for name, stored in self.query(_COLUMNS.format(table.replace("'", "''"))):
            kind = _KINDS.get(stored, "text")
            value = quoted(name) + ("" if stored in _PLAIN else _CASTS[kind])
            infinite = "'infinity', '-infinity'" + ", 'nan'" * (kind == "float")
            finite = value if kind == "integer" else f"CASE WHEN {value} NOT IN ({infinite}) THEN {value} END"
            columns.append(TableColumn(name, kind, stored, value, finite))
        return columns

    def query(self, question: str) -> list[tuple]:
        """Return the rows of an answer, times as text."""
        with self._errors("The database refused a question", "check --source"), self._connection.cursor() as cursor:
            cursor.execute(question)
            table = cursor.fetch_arrow_table()
        columns = [one.cast(pyarrow.string()) if pyarrow.types.is_timestamp(one.type) else one for one in table.columns]
        return list(zip(*(one.to_pylist() for one in columns), strict=True))

    def batches(self, question: str, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of an answer, which is not held as a whole."""
        with (
            self._errors("The connection to the database was lost", "run the same command again"),
            self._connection.cursor() as cursor,
        ):
            cursor.execute(question)
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    yield batch.cast(schema)

    @contextmanager
    def _errors(self, what: str, step: str) -> Iterator[None]:
        """Raise DatabaseError for an error of the driver, with the server's message in one line, without the query."""
        try:
            yield
        except (self._driver.Error, OSError, pyarrow.ArrowException) as error:
            message = str(error).partition("\n\nQuery was:")[0].partition("\nLINE ")[0].replace("[libpq] ", "")
            if "password" in message:
                step = "put it into PGPASSWORD or ~/.pgpass (mode 0600), or into Colab's secrets as PGPASSWORD"
            raise DatabaseError(what, where=self._shown, got=" ".join(message.split())[:300], next_step=step) from error
