"""One connection to PostgreSQL through ADBC: a read-only transaction of one snapshot, that others can share.

Values travel as parameters into settings of the transaction, which `COPY`, that has no parameters, reads.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

import pyarrow

from ml_factory.data.databases.address import DatabaseAddress
from ml_factory.errors import DatabaseError

_log = logging.getLogger("ml_factory")
_USE_COPY, _BATCH_BYTES = "adbc.postgresql.use_copy", "adbc.postgresql.batch_size_hint_bytes"
_BATCH, _FETCHED_ROWS = 1 << 21, 50_000


class PostgresSession:
    """An open connection. Raises DatabaseError where there is none.

    driver : module `adbc_driver_postgresql.dbapi`.
    """

    def __init__(self, address: DatabaseAddress, driver: ModuleType):
        self._address, self._driver = address, driver
        self._settings: dict[str, str] = {}
        self._running: Any = None
        with self.errors("The database cannot be reached"):
            self._connection = driver.connect(address.libpq_uri())

    def close(self) -> None:
        """End the transaction; a lost connection is closed all the same."""
        with suppress(self._driver.Error):
            self._connection.close()

    def cancel(self) -> None:
        """Ask the server to end the question that another thread waits for."""
        if (cursor := self._running) is not None:
            with suppress(self._driver.Error):
                cursor.adbc_cancel()

    # ------------------------------------------------------------------ the transaction

    def begin(self) -> None:
        """Begin a read-only transaction, whose questions all see one snapshot."""
        self._begin(None)

    def share(self) -> "PostgresSession | None":
        """Return another connection with the snapshot and the settings of this transaction; None where there can be
        none: at the limit of connections, or behind a pool of them.
        """
        (exported,) = self.query("SELECT pg_export_snapshot() AS snapshot")
        with ExitStack() as opened, suppress(DatabaseError), self.errors("No second connection"):
            other = PostgresSession(self._address, self._driver)
            opened.callback(other.close)
            other._begin(exported["snapshot"])
            # Rows are read meanwhile, which takes longer than one process needs for the pass over them.
            other.query("SELECT set_config('max_parallel_workers_per_gather', '0', true) AS value")
            for name, value in self._settings.items():
                other.set(name, value)
            opened.pop_all()
            return other
        return None

    def _begin(self, snapshot: str | None) -> None:
        self.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if snapshot is not None:
            self.run("SET TRANSACTION SNAPSHOT '" + snapshot.replace("'", "") + "'")
        # Compiling the one pass of the hash takes as long as a million rows of it.
        self.query("SELECT set_config(name, 'off', true) AS value FROM pg_settings WHERE name = 'jit'")

    def set(self, name: str, value: str) -> str:
        """Set a value for this transaction as a parameter; return the SQL that reads it."""
        self._settings[name] = value
        self.query("SELECT set_config($1, $2, true) AS value", f"ml_factory.{name}", value)
        return f"current_setting('ml_factory.{name}')"

    def trial(self, question: str, copy: bool = False) -> list[dict] | None:
        """Return the rows of an answer, and end the transaction; None where this server refuses the question.

        copy : ask by COPY, whose rows are not returned.
        """
        try:
            if copy:
                self.run(question)
            return [] if copy else self.query(question)
        except self._driver.ProgrammingError as error:
            _log.info("This server refuses %s: %s", f"COPY ({question})" if copy else question, _first_line(error))
            return None
        finally:
            self._connection.rollback()

    # ------------------------------------------------------------------ SQL

    def run(self, statement: str) -> None:
        """Run a statement; a SELECT is sent as COPY."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def query(self, question: str, *values: Any, raw: bool = False) -> list[dict]:
        """Return the rows of an answer; raw : times as integers."""
        answer = self._fetch(question, *values)
        if raw:
            kinds = [pyarrow.int64() if pyarrow.types.is_timestamp(one) else one for one in answer.schema.types]
            answer = pyarrow.table([one.cast(kind) for one, kind in zip(answer.columns, kinds, strict=True)],
                                   names=answer.schema.names)  # fmt: skip
        return answer.to_pylist()

    def stream(self, query: str, copies: bool) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of a query; copies : by COPY, otherwise from a server-side cursor."""
        if copies:
            with self._connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{_BATCH_BYTES: str(_BATCH)})
                cursor.execute(query)
                with cursor.fetch_record_batch() as reader:
                    yield from reader
            return
        self.run(f"DECLARE ml_factory_rows NO SCROLL CURSOR FOR {query}")
        while (fetched := self._fetch(f"FETCH FORWARD {_FETCHED_ROWS} FROM ml_factory_rows")).num_rows:
            yield from fetched.to_batches()
        self.run("CLOSE ml_factory_rows")

    def _fetch(self, question: str, *values: Any) -> pyarrow.Table:
        """Return a whole answer, which is read without COPY."""
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{_USE_COPY: "false"})
            self._running = cursor
            try:
                cursor.execute(question, values or None)
                return cursor.fetch_arrow_table()
            finally:
                self._running = None

    @contextmanager
    def errors(self, what: str, lost: bool = False) -> Iterator[None]:
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


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _first_line(error: Exception) -> str:
    """Return the message of the server in one line, without the query."""
    message = str(error).partition("\n\nQuery was:")[0].partition("\nLINE ")[0].replace("[libpq] ", "")
    return " ".join(message.split())[:300]
