"""Connections to databases: PostgreSQL through ADBC, postgresql://user@host/name, and QuestDB through its REST
interface, http://host:9000.
"""

import base64
import http.client
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

import pyarrow
import pyarrow.csv

from ml_factory.errors import DatabaseError, SettingsError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.storage.json_values import parse_json

POSTGRES, QUESTDB = ("postgresql", "postgres"), ("http", "https")


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of a database.

    shown : scheme, host and name, for messages and records: never a user, a password or an option.
    parts : of the address as given.
    """

    shown: str
    parts: SplitResult = field(repr=False)


def parse_database_address(text: str) -> DatabaseAddress:
    """Parse an address; nothing is opened. Raises SettingsError, whose message has no part of a password."""
    with suppress(ValueError):  # of a port that is no number
        parts = urlsplit(text.strip())
        host = parts.hostname or dict(parse_qsl(parts.query)).get("host", "")
        if "://" in text and (parts.scheme in POSTGRES or (parts.scheme in QUESTDB and host)):
            port = f":{parts.port}" if parts.port else ""
            return DatabaseAddress(f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}", parts)
    scheme, found, _ = text.strip().partition("://")
    raise SettingsError(
        "This is not the address of a database", where="--source", got=f"{scheme}: …" if found else "no scheme",
        wanted="postgresql://user@host/database, or http://host:9000 of QuestDB",
        next_step="the password belongs into PGPASSWORD or ~/.pgpass",
    )  # fmt: skip


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    kind : "utc" (time with a zone), "time" (without), "integer", "float", "boolean" or "text"
    stored : the database's own name of the type
    value : SQL of its values in the type of its kind
    """

    name: str
    kind: str
    stored: str
    value: str


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


# ---- PostgreSQL ------------------------------------------------------------------------------------------------------

# A server that is gone is noticed within a minute, and names are text in one encoding.
_OPTIONS = {
    "connect_timeout": "15", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "client_encoding": "UTF8", "fallback_application_name": "ml_factory",
}  # fmt: skip
_POSTGRES_KINDS = {
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
    """PostgreSQL: Arrow batches of `COPY`, of one read-only transaction. Raises DatabaseError, MissingPackageError."""

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
            kind = _POSTGRES_KINDS.get(stored, "text")
            value = quoted(name) + ("" if stored in _PLAIN else _CASTS[kind])
            columns.append(TableColumn(name, kind, stored, value))
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


# ---- QuestDB ---------------------------------------------------------------------------------------------------------

ANSWER_SECONDS = 60.0  # of silence
_LARGEST_ANSWER, BLOCK = 1 << 24, 1 << 23  # bytes
_QUESTDB_KINDS = {
    "TIMESTAMP": "utc", "DATE": "utc", "BYTE": "integer", "SHORT": "integer", "INT": "integer",
    "LONG": "integer", "FLOAT": "float", "DOUBLE": "float", "BOOLEAN": "boolean",
}  # fmt: skip


class QuestDB:
    """QuestDB: questions to /exec, rows as CSV from /exp. Raises DatabaseError."""

    def __init__(self, address: DatabaseAddress):
        self._address = address

    def close(self) -> None:
        """Nothing stays open between two questions."""

    def tables(self) -> dict[str, str]:
        """Return the tables: name -> SQL."""
        return {str(row[0]): quoted(str(row[0])) for row in self.query("SELECT table_name FROM tables()")}

    def columns(self, table: str) -> list[TableColumn]:
        """Return the columns of a table, which is given as SQL."""
        found = [(str(row[0]), str(row[1])) for row in self.query(f"SHOW COLUMNS FROM {table}")]
        kinds = [_QUESTDB_KINDS.get(stored.partition("(")[0], "text") for _, stored in found]
        return [
            TableColumn(name, kind, stored, quoted(name)) for (name, stored), kind in zip(found, kinds, strict=True)
        ]

    def query(self, question: str) -> list[list]:
        """Return the rows of an answer, times as text."""
        with self._answer("/exec", question) as answer:
            try:
                return parse_json(answer.read(_LARGEST_ANSWER))["dataset"]
            except (ValueError, LookupError, TypeError) as error:
                raise DatabaseError(
                    "This is not QuestDB", where=self._address.shown, got=str(error)[:200],
                    next_step="give the address of its REST interface, port 9000",
                ) from error  # fmt: skip

    def batches(self, question: str, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of an answer, which is not held as a whole."""
        read = pyarrow.csv.ReadOptions(block_size=BLOCK, column_names=schema.names, skip_rows=1)
        convert = pyarrow.csv.ConvertOptions(
            column_types=schema, null_values=["", "null"], strings_can_be_null=True, quoted_strings_can_be_null=False,
            true_values=["true"], false_values=["false"],
        )  # fmt: skip
        with self._answer("/exp", question) as answer:
            try:
                yield from pyarrow.csv.open_csv(answer, read_options=read, convert_options=convert)
            except pyarrow.ArrowInvalid as error:
                if not answer.length or answer.read(1):  # else the answer ended in mid-line
                    raise DatabaseError(
                        "QuestDB's answer is not the requested table", where=self._address.shown,
                        got=" ".join(str(error).split())[:200], next_step="run the same command again",
                    ) from error  # fmt: skip
            if answer.length != 0 and not answer.chunked:  # a cut chunk raises an error by itself
                raise ConnectionError("the answer ended before its end, or had no length")

    @contextmanager
    def _answer(self, path: str, query: str) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a query; no redirection is followed, so that a password stays with its host."""
        parts = self._address.parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        login = base64.b64encode(f"{user}:{password or os.environ.get('PGPASSWORD', '')}".encode()).decode()
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}{path}?{urlencode({'query': query})}",
                               headers={"Authorization": f"Basic {login}"} if user else {})  # fmt: skip
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                refused = answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
                text = " ".join(answer.read(4096).decode(errors="replace").split())[:200]
                raise DatabaseError(
                    "QuestDB refused a question", where=self._address.shown,
                    got=f"HTTP {answer.status} {answer.reason}: {text}",
                    next_step="check the user in --source and PGPASSWORD" if refused else "check --source",
                )  # fmt: skip
            yield answer
        except (OSError, http.client.HTTPException) as error:
            lost = path == "/exp"
            raise DatabaseError(
                "The connection to the database was lost" if lost else "The database cannot be reached",
                where=self._address.shown, got=f"{type(error).__name__}: {error}"[:200],
                next_step="run the same command again" if lost else "check --source",
            ) from error  # fmt: skip
        finally:
            with suppress(OSError):
                connection.close()
