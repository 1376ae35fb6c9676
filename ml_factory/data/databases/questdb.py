"""QuestDB through its REST interface: questions to /exec, rows as CSV from /exp."""

import base64
import http.client
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlencode

import pyarrow
import pyarrow.csv

from ml_factory.data.databases.address import DatabaseAddress, TableColumn, quoted
from ml_factory.errors import DatabaseError
from ml_factory.storage.json_values import parse_json

ANSWER_SECONDS = 60.0  # of silence
_LARGEST_ANSWER, BLOCK = 1 << 24, 1 << 23  # bytes
_KINDS = {
    "TIMESTAMP": "utc", "DATE": "utc", "BYTE": "integer", "SHORT": "integer", "INT": "integer",
    "LONG": "integer", "FLOAT": "float", "DOUBLE": "float", "BOOLEAN": "boolean",
}  # fmt: skip


class QuestDB:
    """The REST interface. Raises DatabaseError."""

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
        kinds = [_KINDS.get(stored.partition("(")[0], "text") for _, stored in found]
        return [
            TableColumn(name, kind, stored, quoted(name), quoted(name))  # no time is infinite here
            for (name, stored), kind in zip(found, kinds, strict=True)
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
                said = " ".join(answer.read(4096).decode(errors="replace").split())[:200]
                raise DatabaseError(
                    "QuestDB refused a question", where=self._address.shown,
                    got=f"HTTP {answer.status} {answer.reason}: {said}",
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
