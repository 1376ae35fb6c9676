"""Export bars of a database to one file, equal to the database by count, first and last time."""

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from ml_factory.data.databases.connections import POSTGRES, Postgres, QuestDB, parse_database_address
from ml_factory.data.databases.selected_rows import RowSelection, SelectedRows, check_output_format, format_time
from ml_factory.errors import DatabaseError
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.storage.files import files
from ml_factory.storage.mirror import Mirror
from ml_factory.storage.workspace import nearest_legal_symbol

RECORD_SUFFIX = ".json"  # behind the file's own name


def export_data(
    source: str, output: str | Path, *, table: str | None = None, symbol: str | None = None, start: str | None = None,
    end: str | None = None, columns: Sequence[str] | None = None, time_column: str | None = None,
    symbol_column: str | None = None,
) -> Result:  # fmt: skip
    """Export rows of a database in order of time to a Parquet or CSV file that `prepare` takes as it is.

    The file replaces an older one in one step, after count, first and last time were found equal to the database's;
    they are written next to it, as OUTPUT.json. An interrupted export starts again.

    source : postgresql://user@host/database, or http://host:9000 of QuestDB; passwords from PGPASSWORD or .pgpass.
    output : .parquet or .csv; also gs://bucket/folder/name.parquet.
    table : also schema.table; None: the only one with prices.
    symbol : None: all rows, of a table with one symbol.
    start, end : first time, and the first time that is left out; UTC unless they say another zone.
    columns : None: all but the symbol's.
    time_column, symbol_column : None: by their usual names.

    The result has `first` and `last`, times as the database writes them; `file_hash`, SHA-256 of the file; `has_zone`,
    False for times without a zone; `prepare` then needs `--zone`.

    Raises SettingsError, BarsError, DatabaseError, WorkspaceError, MissingPackageError.
    """
    started, address, suffix = time.perf_counter(), parse_database_address(source), check_output_format(str(output))
    selection = RowSelection(table, symbol, start, end, columns, time_column, symbol_column)
    folder, in_bucket, name = str(output).rpartition("/") if "://" in str(output) else ("", "", "")
    mirror = Mirror(folder) if in_bucket else None
    path = mirror.folder / name if mirror else Path(output).expanduser().absolute()
    record = path.with_name(path.name + RECORD_SUFFIX)
    with progress_phase("opening"):
        database = (Postgres if address.parts.scheme in POSTGRES else QuestDB)(address)
    with closing(database):
        with progress_phase("counting"):
            rows = SelectedRows(database, selection, address.shown)
        files.replace(path, lambda temporary: _write_rows(rows, temporary, suffix))
    facts = {
        "source": address.shown, "table": rows.table, "symbol": rows.symbol, "columns": rows.schema.names,
        "rows": rows.rows, "first": format_time(rows.first), "last": format_time(rows.last),
        "file_hash": files.sha256(path),
    }  # fmt: skip
    files.write_json(record, {**facts, "start": start, "end": end, "file": path.name})
    if mirror is not None:
        mirror.push(path.name)
    has_zone = rows.schema.types[0] != pyarrow.timestamp("us")
    shown, record_shown = (str(output), f"{output}{RECORD_SUFFIX}") if mirror else (path, record)
    zone = "" if has_zone else " --zone ZONE (the times carry none; such as America/Chicago)"
    named = nearest_legal_symbol(rows.symbol or "") or "SYMBOL"
    seconds = time.perf_counter() - started
    lines = [
        f"{rows.symbol or rows.table}: {rows.rows:,} rows from {address.shown}, {facts['first']} to {facts['last']}, "
        f"exported in {seconds:.1f} s",
        "  equal to the database in rows, first and last time", f"  {shown}", f"  {record_shown}",
        f"  next: python -m ml_factory prepare --data {shlex.quote(str(shown))} --symbol {named}{zone}",
    ]  # fmt: skip
    return Result(lines, **facts, path=shown, record_path=record_shown, has_zone=has_zone, seconds=seconds)


def _write_rows(rows: SelectedRows, path: Path, suffix: str) -> None:
    """Write the rows to a temporary path. Raises DatabaseError where they are not those that were counted.

    A thread writes a batch while the next one is read.
    """
    count, first, last, job = 0, None, None, None
    with (
        _open_writer(path, suffix, rows.schema) as writer,
        ThreadPoolExecutor(1) as thread,
        progress_phase("reading rows", rows.rows) as done,
    ):
        for batch in rows.batches():
            if batch.num_rows:
                if job:
                    job.result()
                job = thread.submit(writer.write_batch, batch)
                first, last = batch.column(0)[0] if first is None else first, batch.column(0)[-1]
                count += batch.num_rows
                done(batch.num_rows)
        if job:
            job.result()
    wanted = (rows.rows, rows.first, rows.last)
    if (count, first, last) != wanted:
        shown = [f"{one[0]:,} rows" + "".join(f", {format_time(at)}" for at in one[1:] if at is not None)
                 for one in ((count, first, last), wanted)]  # fmt: skip
        raise DatabaseError(
            "The exported rows are not those of the database", got=f"{shown[0]} in the file", wanted=shown[1],
            next_step="run the same command again; the table may have changed meanwhile",
        )  # fmt: skip


def _open_writer(path: Path, suffix: str, schema: pyarrow.Schema):
    """Return a context whose `write_batch` appends rows."""
    if suffix == ".csv":
        return pyarrow.csv.CSVWriter(path, schema)
    texts = [field.name for field in schema if pyarrow.types.is_string(field.type)]
    return pyarrow.parquet.ParquetWriter(path, schema, compression="snappy", use_dictionary=texts)
