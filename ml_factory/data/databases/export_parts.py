"""Parts of an unfinished export: a killed one continues after the last complete part, and ends with the same bytes."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import xxhash

from ml_factory.storage.files import disk_errors, files
from ml_factory.storage.json_values import fingerprint_json

ROWS_PER_PART = 1 << 17
_COMPRESSED = pyarrow.ipc.IpcWriteOptions(compression="lz4")  # quicker than writing the bytes as they are


class ExportParts:
    """Complete parts of one export as Arrow files, each with the hash of its content in its name.

    Parameters
    ----------
    folder : of the parts of one output file; parts of an export with another plan are removed.
    plan : what the rows are: source, table, columns and selection, as JSON values.
    schema : of the rows.
    """

    def __init__(self, folder: Path, plan: dict, schema: pyarrow.Schema):
        self._schema = schema
        self.folder = folder / fingerprint_json([plan, ROWS_PER_PART])[:16]
        for name in files.names(folder):
            if name not in (self.folder.name, "lock"):
                shutil.rmtree(folder / name, ignore_errors=True)
        files.make_folder(self.folder)
        self.count = 0  # of complete parts

    def stored(self) -> Iterator[pyarrow.Table]:
        """Yield the complete parts in order; one that is damaged is removed, with all behind it."""
        names = {name.partition("-")[0]: name for name in files.names(self.folder)}
        while (name := names.pop(f"{self.count:06d}", None)) is not None:
            table = self._read(self.folder / name)
            if table is None:
                names[""] = name
                break
            self.count += 1
            yield table
        for name in names.values():
            files.remove(self.folder / name)

    def _read(self, path: Path) -> pyarrow.Table | None:
        """Return the rows of a part; None for a file whose content has another hash than its name."""
        with disk_errors(path), pyarrow.memory_map(str(path)) as source:
            content = source.read_buffer()
            if path.stem.partition("-")[2] != xxhash.xxh3_128_hexdigest(content):
                return None
            with suppress(pyarrow.ArrowException):
                table = pyarrow.ipc.open_file(content).read_all()
                return table if table.schema == self._schema and len(table) == ROWS_PER_PART else None
        return None

    def add(self, number: int, table: pyarrow.Table) -> None:
        """Write the next part of ROWS_PER_PART rows."""
        stream = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_file(stream, self._schema, options=_COMPRESSED) as writer:
            writer.write_table(table)
        content = stream.getvalue()
        path = self.folder / f"{number:06d}-{xxhash.xxh3_128_hexdigest(content)}.arrow"
        files.replace(path, lambda temporary: temporary.write_bytes(content), content.size, flush=False)

    def clear(self) -> None:
        """Remove all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)
        files.make_folder(self.folder)
        self.count = 0


class ResumePoint:
    """The place behind the rows that are there: their last time, and how many of them have it."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.repeated = self.rows = 0

    def move_behind(self, table: pyarrow.Table) -> None:
        """Count the rows of the next table, ordered by their first column."""
        times = table.column(0)
        kind = pyarrow.int64() if pyarrow.types.is_timestamp(times.type) else times.type
        values = times.cast(kind).to_numpy()
        last = values[-1].item()
        tail = int(np.count_nonzero(values == last))
        self.repeated = tail + (self.repeated if tail == len(values) and last == self.since else 0)
        self.since, self.rows = last, self.rows + len(values)


def cut_batches(batches: Iterator[pyarrow.RecordBatch], rows: int, skip: int = 0) -> Iterator[pyarrow.Table]:
    """Yield tables of `rows` rows and one of the rest, without the first `skip` rows."""
    waiting: list[pyarrow.RecordBatch] = []
    held = 0
    for batch in batches:
        dropped = min(skip, batch.num_rows)
        batch, skip = batch.slice(dropped), skip - dropped
        while batch.num_rows:
            piece = batch.slice(0, rows - held)
            waiting.append(piece)
            held += piece.num_rows
            batch = batch.slice(piece.num_rows)
            if held == rows:
                yield pyarrow.Table.from_batches(waiting).combine_chunks()
                waiting, held = [], 0
    if held:
        yield pyarrow.Table.from_batches(waiting).combine_chunks()
