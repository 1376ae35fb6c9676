"""Export bars of a database to one file, resumable, and equal to the database by count, ends and content hash."""

import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ml_factory.data.databases import export_parts
from ml_factory.data.databases.address import DatabaseAddress, parse_database_address
from ml_factory.data.databases.columns import RowSelection, format_time_value
from ml_factory.data.databases.export_parts import ExportParts, ResumePoint, cut_batches
from ml_factory.data.databases.exported_file import check_output_format, open_writer, read_batches, summarize_batches
from ml_factory.data.databases.postgres import PostgresRows
from ml_factory.data.databases.questdb import QuestDBRows
from ml_factory.data.databases.table_summary import summary_differences
from ml_factory.errors import DatabaseError
from ml_factory.progress import progress_phase
from ml_factory.storage.bucket_sync import BucketMirror
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import acquire_lock_file, release_lock_file
from ml_factory.storage.workspace import nearest_legal_symbol
from ml_factory.workflows.results.base import Result

RECORD_SUFFIX = ".json"  # behind the file's own name
_WAITING_TABLES = 2  # that are read and not yet written
_OWN_HASH, _READ_TWICE = "hash computed by the database", "hash of the rows read a second time"


@dataclass(frozen=True)
class ExportDataResult(Result):
    """Result of `export_data`.

    first, last : times as the database writes them.
    compared : the database's side of the content hash, in words.
    resumed_rows : rows that an interrupted export had left.
    reused : the file was there, and equals the database as it is now.
    """

    source: str
    table: str
    symbol: str | None
    columns: list[str]
    rows: int
    first: str
    last: str
    content_hash: str
    compared: str
    file_hash: str
    path: Path | str
    record_path: Path | str
    resumed_rows: int
    reused: bool
    has_zone: bool

    def summary(self) -> str:
        how = "found as exported before" if self.reused else f"exported in {self.seconds:.1f} s"
        resumed = f", {self.resumed_rows:,} of them before an interruption" if self.resumed_rows else ""
        zone = "" if self.has_zone else " --zone ZONE (the times carry none; such as America/Chicago)"
        data, symbol = shlex.quote(str(self.path)), nearest_legal_symbol(self.symbol or "") or "SYMBOL"
        return (
            f"{self.symbol or self.table}: {self.rows:,} rows from {self.source}, {self.first} to {self.last}, "
            f"{how}{resumed}\n  equal to the database in rows, first and last time and content hash "
            f"({self.compared})\n  {self.path}\n  {self.record_path}\n"
            f"  next: python -m ml_factory prepare --data {data} --symbol {symbol}{zone}"
        )


def export_data(
    source: str, output: str | Path, *, table: str | None = None, symbol: str | None = None, start: str | None = None,
    end: str | None = None, columns: Sequence[str] | None = None, time_column: str | None = None,
    symbol_column: str | None = None,
) -> ExportDataResult:  # fmt: skip
    """Export rows of a database in order of time to a Parquet or CSV file that `prepare` takes as it is.

    An interrupted export continues after its last complete part and ends with the bytes of an uninterrupted one. The
    file replaces an older one in one step, after count, first and last time and content hash were found equal to the
    database's; they are written next to it, as OUTPUT.json.

    source : postgresql://user@host/database, or http://host:9000 of QuestDB; passwords from PGPASSWORD or .pgpass.
    output : .parquet or .csv; also gs://bucket/folder/name.parquet.
    table : also schema.table; None: the only one with prices.
    symbol : None: all rows, of a table with one symbol.
    start, end : first time, and the first time that is left out; UTC unless they say another zone.
    columns : None: all but the symbol's.
    time_column, symbol_column : None: by their usual names.

    Raises SettingsError, BarsError, DatabaseError, WorkspaceError, MissingPackageError.
    """
    started, address = time.perf_counter(), parse_database_address(source)
    suffix = check_output_format(str(output))
    given = None if columns is None else tuple(columns)
    selection = RowSelection(table, symbol, start, end, given, time_column, symbol_column)
    target = _Target(str(output))
    with target.owned(), closing(_open_rows(address, selection)) as rows:
        plan = _plan(address, rows, selection)
        facts = _found_export(target, plan, rows)
        reused, resumed = facts is not None, 0
        if facts is None:
            facts, resumed = _Export(rows, target, suffix, plan).write()
    return ExportDataResult(
        source=address.shown, table=rows.table, symbol=rows.symbol, columns=rows.columns.arrow_schema().names,
        rows=facts["rows"], first=facts["first"], last=facts["last"], content_hash=facts["content_hash"],
        compared=facts["compared"], file_hash=facts["sha256"], path=target.shown, record_path=target.shown_record,
        resumed_rows=resumed, reused=reused, has_zone=rows.columns.time.kind != "time",
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _open_rows(address: DatabaseAddress, selection: RowSelection) -> PostgresRows | QuestDBRows:
    with progress_phase("opening"):
        return (QuestDBRows if address.is_questdb else PostgresRows)(address, selection)


def _plan(address: DatabaseAddress, rows: PostgresRows | QuestDBRows, selection: RowSelection) -> dict:
    """Return what the rows are, as JSON values: exports with equal plans continue each other."""
    return {
        "source": address.shown, "table": rows.table, "symbol": rows.symbol, "start": selection.start,
        "end": selection.end, "columns": [asdict(column) for column in rows.columns.exported],
    }  # fmt: skip


class _Target:
    """Places of one export: the file, the record next to it, and the folder of its parts, removed at the end."""

    def __init__(self, output: str):
        self.mirror, name = None, ""
        if "://" in output:
            folder, _, name = output.rpartition("/")
            self.mirror = BucketMirror(folder)
        self.path = self.mirror.folder / name if self.mirror else Path(output).expanduser().absolute()
        self.record = self.path.with_name(self.path.name + RECORD_SUFFIX)
        self.shown = output if self.mirror else self.path
        self.shown_record = output + RECORD_SUFFIX if self.mirror else self.record
        hidden = local_cache_folder("exports") / fingerprint_json(str(self.path))[:16]
        elsewhere = self.mirror is not None or files.is_remote(self.path)
        self.parts = hidden if elsewhere else self.path.with_name(f".{self.path.name}.parts")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keep another process from exporting to the same file."""
        files.make_folder(self.parts)
        lock = self.parts / "lock"
        acquire_lock_file(lock, f"the export to {self.shown}")
        try:
            yield
            shutil.rmtree(self.parts, ignore_errors=True)
        finally:
            release_lock_file(lock)

    def publish(self) -> None:
        """Upload the file, then its record, where the output is in a bucket."""
        if self.mirror is not None:
            self.mirror.push(self.path.name)


def _found_export(target: _Target, plan: dict, rows: PostgresRows | QuestDBRows) -> dict | None:
    """Return the record of a local file that equals the database as it is now; None where there is none."""
    record = None if target.mirror else files.read_json_or_none(target.record)
    if not isinstance(record, dict) or not files.is_file(target.path) or rows.summary.content_hash is None:
        return None
    wanted = _facts(rows, rows.summary.content_hash, _OWN_HASH, files.sha256(target.path))
    return wanted if record == {**plan, **wanted, "file": target.path.name} else None


def _facts(rows: PostgresRows | QuestDBRows, content_hash: str, compared: str, sha256: str) -> dict[str, Any]:
    first, last = (format_time_value(at, rows.columns.time) for at in (rows.summary.first, rows.summary.last))
    return {"rows": rows.summary.rows, "first": first, "last": last, "content_hash": content_hash,
            "compared": compared, "sha256": sha256}  # fmt: skip


class _Export:
    """One export: rows in, parts and file out, in this process."""

    def __init__(self, rows: PostgresRows | QuestDBRows, target: _Target, suffix: str, plan: dict):
        self._rows, self._target, self._suffix, self._plan = rows, target, suffix, plan
        self._schema = rows.columns.arrow_schema()
        self._parts = ExportParts(target.parts, plan, self._schema)
        self._resumed, self._facts = 0, {}

    def write(self) -> tuple[dict, int]:
        """Write file and record; return the record's facts, and the rows that were there before."""
        files.replace(self._target.path, self._fill)
        self._facts["sha256"] = files.sha256(self._target.path)
        files.write_json(self._target.record, {**self._plan, **self._facts, "file": self._target.path.name})
        self._target.publish()
        return self._facts, self._resumed

    def _fill(self, path: Path) -> None:
        """Write the rows to a temporary path and compare them with the database's.

        Parts of rows that were changed since do not fit together: then all are read again.
        """
        try:
            self._write_rows(path)
        except DatabaseError:
            with suppress(DatabaseError):
                _ = self._rows.summary  # raises what is wrong with the rows themselves, such as an infinite time
            raise
        differences = self._compare(path)
        if differences and self._resumed:
            self._parts.clear()
            self._write_rows(path)
            differences = self._compare(path)
        if differences:
            self._parts.clear()
            raise DatabaseError(
                "The exported rows are not those of the database", where=self._target.shown, got="; ".join(differences),
                next_step="run the same command again; the table may have changed meanwhile",
            )  # fmt: skip

    def _write_rows(self, path: Path) -> None:
        """Write stored parts, and behind them the rows that the database still has."""
        place = ResumePoint()
        with open_writer(path, self._suffix, self._schema) as writer, _Behind() as behind:
            with progress_phase("earlier parts") as done:
                for table in self._parts.stored():
                    place.move_behind(table)
                    behind.run(writer.write_table, table)
                    done(len(table))
            self._resumed = place.rows
            number, rows = self._parts.count, export_parts.ROWS_PER_PART
            with progress_phase("reading rows", self._rows.known_rows, start=place.rows) as done, closing(
                self._rows.batches(place.since)
            ) as batches:  # fmt: skip
                for table in cut_batches(batches, rows, place.repeated):
                    if len(table) == rows:
                        behind.run(self._parts.add, number, table)
                        number += 1
                    behind.run(writer.write_table, table)
                    done(len(table), self._rows.known_rows)

    def _compare(self, path: Path) -> list[str]:
        """Return the differences between the file and the database; none where it is right."""
        columns, compared = self._rows.columns, _OWN_HASH
        with progress_phase("counting"):
            wanted = self._rows.summary
        with progress_phase("comparing", wanted.rows):
            if wanted.content_hash is None:
                with closing(self._rows.batches()) as batches:
                    wanted, compared = summarize_batches(batches, columns), _READ_TWICE
            written = read_batches(path, self._suffix, self._schema, export_parts.ROWS_PER_PART)
            got = summarize_batches(written, columns)
        self._facts = _facts(self._rows, got.content_hash, compared, "")
        return summary_differences(wanted, got, columns.time)


class _Behind:
    """Calls that run in order in a thread of their own, while the next rows are read."""

    def __enter__(self) -> "_Behind":
        self._pool, self._waiting = ThreadPoolExecutor(1, "export"), deque[Future]()
        return self

    def run(self, call: Any, *arguments: Any) -> None:
        """Queue a call; raises the error of an earlier one, and waits while too many are queued."""
        self._waiting.append(self._pool.submit(call, *arguments))
        while len(self._waiting) > 2 * _WAITING_TABLES:
            self._waiting.popleft().result()

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._pool:
            while kind is None and self._waiting:
                self._waiting.popleft().result()
        self._waiting.clear()
