"""The exported file, Parquet or CSV: written table by table, and read back in batches to be compared."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from ml_factory.data.databases.columns import ChosenColumns
from ml_factory.data.databases.row_hash import format_content_hash, hash_rows
from ml_factory.data.databases.table_summary import TableSummary
from ml_factory.errors import SettingsError

FORMATS = (".parquet", ".csv")
_HASHING_THREADS = 2


def check_output_format(name: str) -> str:
    """Return the suffix of the output's name. Raises SettingsError for another one."""
    suffix = Path(name).suffix.lower()
    if suffix not in FORMATS:
        raise SettingsError(
            "The file's name decides its format", where="--output", got=repr(name), wanted=" or ".join(FORMATS),
            next_step="give for example data/training_set.parquet",
        )  # fmt: skip
    return suffix


def open_writer(path: Path, suffix: str, schema: pyarrow.Schema):
    """Return a context whose `write_table` appends rows; a table is one row group of Parquet."""
    if suffix == ".csv":
        return pyarrow.csv.CSVWriter(path, schema)
    texts = [field.name for field in schema if pyarrow.types.is_string(field.type)]
    return pyarrow.parquet.ParquetWriter(path, schema, compression="snappy", use_dictionary=texts)


def read_batches(path: Path, suffix: str, schema: pyarrow.Schema, rows: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a written file, about `rows` at a time."""
    if suffix == ".csv":
        options = pyarrow.csv.ConvertOptions(
            column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        with pyarrow.csv.open_csv(path, convert_options=options) as reader:
            yield from reader
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):  # one reader of all would keep what it has read
            yield from file.iter_batches(batch_size=rows, row_groups=[group])


def summarize_batches(batches: Iterator[pyarrow.RecordBatch], columns: ChosenColumns) -> TableSummary:
    """Return count, ends and content hash of ordered rows."""
    count = total = 0
    first = last = None
    hashed = deque[Future[int]]()
    with ThreadPoolExecutor(_HASHING_THREADS, "hash") as pool:
        for batch in batches:
            if batch.num_rows:
                ends = [_raw(batch.column(0)[place]) for place in (0, batch.num_rows - 1)]
                first, last = ends[0] if first is None else first, ends[1]
                count += batch.num_rows
                hashed.append(pool.submit(hash_rows, batch, columns.exported))
            while len(hashed) > _HASHING_THREADS:
                total += hashed.popleft().result()
        total += sum(one.result() for one in hashed)
    return TableSummary(count, first, last, format_content_hash(total))


def _raw(value: pyarrow.Scalar) -> float:
    return value.value if pyarrow.types.is_timestamp(value.type) else value.as_py()
