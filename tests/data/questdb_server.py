"""A small HTTP server on loopback that answers as QuestDB's REST interface does, its tables in SQLite.

/exec answers JSON, /exp CSV with a header, text in quotes and CR LF, as QuestDB 9 writes them. Times are text such as
2024-01-01T00:00:00.000000Z, so that SQLite orders and compares them.
"""

import base64
import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

LOGIN = "reader", "quest-password"


class QuestDBServer:
    """The fake server.

    tables : name -> [(column, QuestDB type)]
    queries : all that were received
    fault : what /exp does wrong: "" for nothing, "short" ends the answer in mid-line, "chunk" ends in mid-chunk,
        "silent" ends between two lines before the announced length, "text" sends text in a column of numbers
    answer : (status, headers, body) of every question, instead of an answer
    guarded : only LOGIN is let in
    arriving : rows of the table `bars` that come in, one before each answer to /exp
    """

    def __init__(self) -> None:
        self.tables: dict[str, list[tuple[str, str]]] = {}
        self.queries: list[str] = []
        self.headers: list[dict] = []
        self.fault, self.answer, self.guarded, self.port = "", None, False, 0
        self.fault_at, self.arriving = 0.5, []
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_table(self, name: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence]) -> None:
        self.tables[name] = list(columns)
        quoted = '"' + name.replace('"', '""') + '"'
        self._database.execute(f"DROP TABLE IF EXISTS {quoted}")
        self._database.execute(f"CREATE TABLE {quoted} ({', '.join(json.dumps(column) for column, _ in columns)})")
        self._database.executemany(f"INSERT INTO {quoted} VALUES ({', '.join('?' * len(columns))})", rows)

    def run(self, query: str) -> tuple[list[tuple[str, str]], list[tuple]]:
        """Columns with types, and rows, of a query."""
        self.queries.append(query)
        if query == "SELECT table_name FROM tables()":
            return [("table_name", "STRING")], [(name,) for name in self.tables]
        if found := re.fullmatch(r'SHOW COLUMNS FROM "(.*)"', query):
            return [("column", "STRING"), ("type", "STRING")], self.tables[found[1].replace('""', '"')]
        with self._lock:
            cursor = self._database.execute(query.replace("count()", "count(*)"))
            types = {column: kind for columns in self.tables.values() for column, kind in columns}
            return [(one[0], types.get(one[0], "LONG")) for one in cursor.description], cursor.fetchall()


def _field(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and not re.fullmatch(r"\d{4}-\d\d-\d\dT.*Z|true|false", value):
        return '"' + value.replace('"', '""') + '"'
    return str(value)


def _csv(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence]) -> bytes:
    lines = [",".join(f'"{name}"' for name, _ in columns), *(",".join(map(_field, row)) for row in rows)]
    return "".join(f"{line}\r\n" for line in lines).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        state: QuestDBServer = self.server.state
        parts = urlsplit(self.path)
        state.headers.append(dict(self.headers))
        login = base64.b64encode(":".join(LOGIN).encode()).decode()
        if state.guarded and self.headers.get("Authorization") != f"Basic {login}":
            return self.send(401, {}, b"Unauthorized")
        if state.answer is not None:
            return self.send(*state.answer)
        if parts.path == "/exp" and state.arriving:
            row = state.arriving.pop(0)
            state._database.execute(f"INSERT INTO bars VALUES ({', '.join('?' * len(row))})", row)
        try:
            columns, rows = state.run(parse_qs(parts.query)["query"][0])
        except (sqlite3.Error, KeyError) as error:
            return self.send(400, {}, json.dumps({"error": str(error), "position": 0}).encode())
        if parts.path == "/exp":
            return self.send_rows(state, _csv(columns, rows))
        shown = [{"name": name, "type": kind} for name, kind in columns]
        return self.send(200, {}, json.dumps({"columns": shown, "dataset": rows, "count": len(rows)}).encode())

    def send_rows(self, state: QuestDBServer, body: bytes) -> None:
        cut = int(len(body) * state.fault_at)
        if state.fault in ("short", "silent"):
            end = body.rindex(b"\n", 0, cut) + 1
            return self.send(200, {"Content-Length": len(body)}, body[: end + (5 if state.fault == "short" else 0)])
        if state.fault == "text":
            body = body.replace(b",4000.", b",four ", 1)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if state.fault == "chunk":
            self.wfile.write(b"%x\r\n" % len(body) + body[:cut])
        else:
            for start in range(0, len(body), 65_536):
                piece = body[start : start + 65_536]
                self.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def send(self, status: int, headers: dict, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def questdb_server() -> Iterator[QuestDBServer]:
    """Start the fake server; it ends with the block."""
    state = QuestDBServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.state, state.port = state, server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
    state._database.close()
