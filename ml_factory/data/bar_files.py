"""Read the table of a CSV file (also gzip-compressed) or a Parquet file of bars, whatever its columns."""

import csv
import gzip
import importlib
import io
import os
import stat
import zlib
from pathlib import Path

import pandas as pd

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import BarsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.mounts import mount_of

pyarrow, parquet = LazyModule("pyarrow"), LazyModule("pyarrow.parquet")  # a service predicts without them

DELIMITERS = (",", ";", "\t", "|")
_TEXT_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_HEAD_BYTES = 65_536
_PIECE, _LARGE = 1 << 24, 1 << 26  # bytes
_MOST_OF_TEXT, _MOST_OF_COLUMNS = 50, 400  # times its stored size: bars grow 5 to 15 times from gzip, 2 from Parquet
# Before 3.1 pandas parses decimals inexactly in the last bit without this option; since then the option is deprecated.
_EXACT = {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}


def read_bars_table(path: str | os.PathLike, *, delimiter: str | None = None, skip_bad: bool = False) -> pd.DataFrame:
    """Read the table in a Parquet or CSV file (also .gz), whatever its columns.

    Notes about the table are in `.attrs["notes"]`.

    Parameters
    ----------
    path : also gs://bucket/folder/file, which is downloaded once
    delimiter : of a CSV; None: inferred from its first lines (comma, semicolon, tab or bar)
    skip_bad : leave out lines of a CSV with another number of fields; `.attrs["skipped"]` has their (number, text)

    Raises
    ------
    BarsError : the file is absent, empty, truncated or of another format
    """
    path = resolve_bars_file(path)
    check_file_exists(path)
    return read_copied_bars_table(path, path, delimiter=delimiter, skip_bad=skip_bad)


def resolve_bars_file(source: str | os.PathLike) -> Path:
    """Return the local path of the user's file; one in a bucket or on a mount is downloaded."""
    address = os.fspath(source) if "://" in os.fspath(source) else os.path.abspath(Path(source).expanduser())
    if "://" in address or mount_of(address):
        return importlib.import_module("ml_factory.storage.mirror").fetch_file(address)
    return Path(source).expanduser()


def read_copied_bars_table(
    path: Path, local: Path, *, delimiter: str | None = None, skip_bad: bool = False
) -> pd.DataFrame:
    """Read `local`, a copy of `path`, which messages name; otherwise as `read_bars_table`."""
    head = _first_bytes(path, local)
    if head[:4] == b"PK\x03\x04":
        step = "save the sheet or the archive's table as CSV or Parquet"
        raise BarsError("This is a workbook or an archive", where=path, wanted="Parquet or CSV", next_step=step)
    if head[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path, local)
    return _read_csv(path, local, head, delimiter, skip_bad)


def _first_bytes(path: Path, local: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(local).st_mode):  # a pipe is never read to its end, /dev/zero has none
            raise BarsError(
                "This is not a regular file", where=path, got="a pipe, a device or a socket", wanted="Parquet or CSV",
                next_step="write its content to a file first",
            )  # fmt: skip
        with open(local, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise BarsError("This file cannot be read", where=path, got=error.strerror) from error
    if not head.strip():
        raise BarsError(
            "The file is empty", where=path, got=f"{local.stat().st_size} bytes", next_step="export it again"
        )
    return head


def _check_expansion(path: Path, stored: int, expanded: float, most: int) -> None:
    """Raise BarsError for a file that grows more than `most` times when it is read."""
    if expanded > max(_LARGE, most * stored):
        raise BarsError(
            "This file is a decompression bomb, or not a table of bars", where=path,
            got=f"{expanded / 1e6:,.0f} MB or more in {stored / 1e6:,.1f} MB",
            wanted=f"at most {most} times its size on the disk", next_step="export it again",
        )  # fmt: skip


def _read_gzip(path: Path, local: Path) -> bytes:
    """Read a compressed file piece by piece, so that a bomb is refused while it is small."""
    stored, pieces, size = local.stat().st_size, [], 0
    with gzip.open(local) as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            _check_expansion(path, stored, size, _MOST_OF_TEXT)
            pieces.append(piece)
    return b"".join(pieces)


def _read_parquet(path: Path, local: Path) -> pd.DataFrame:
    try:
        facts = parquet.read_metadata(local)
        # By the number of values: repeated values take no space in a file, and all of theirs in memory.
        _check_expansion(path, local.stat().st_size, 8.0 * facts.num_rows * facts.num_columns, _MOST_OF_COLUMNS)
        return pd.read_parquet(local)
    except BarsError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        with open(local, "rb") as file:
            begin = file.read(4)
            file.seek(max(0, local.stat().st_size - 4))
            whole = begin == b"PAR1" and file.read(4) == b"PAR1"
        got = str(error).splitlines()[0] if whole else "a Parquet file that is cut short, or another format"
        step = "download or export the file again"
        raise BarsError("This Parquet file cannot be read", where=path, got=got, next_step=step) from error


def _read_csv(path: Path, local: Path, head: bytes, delimiter: str | None, skip_bad: bool) -> pd.DataFrame:
    encoding = next((name for mark, name in _TEXT_MARKS.items() if head.startswith(mark)), "utf-8")
    try:
        content = _read_gzip(path, local) if head[:2] == b"\x1f\x8b" else local.read_bytes()
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        got = f"byte {error.start} is not {encoding} text"
        step = "give a Parquet file, or a CSV in UTF-8"
        raise BarsError("This file is neither Parquet nor text", where=path, got=got, next_step=step) from error
    except (EOFError, OSError, zlib.error) as error:
        raise BarsError("This file is cut short", where=path, got=error, next_step="download it again") from error
    try:
        text, skipped = _without_ragged(text, delimiter) if skip_bad else (text, [])
        width, delimiter = _check_layout(path, text, delimiter)
    except csv.Error as error:
        raise BarsError("This is not a table of bars", where=path, got=error, next_step="export it again") from error
    try:
        table = pd.read_csv(io.StringIO(text), sep=delimiter, skipinitialspace=True, low_memory=False, **_EXACT)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        ragged = _without_ragged(text, delimiter)[1]
        shown = "; ".join(f"line {number}: {line[:80]!r}" for number, line in ragged[:10])
        shown += f"; and {len(ragged) - 10:,} more" if len(ragged) > 10 else ""
        got = shown or str(error).removeprefix("Error tokenizing data. C error: ").strip()
        step = f"every line needs {width} fields like the first; correct these lines, or leave them out (--skip-bad)"
        raise BarsError("This CSV cannot be read", where=path, got=got, next_step=step) from error
    if not len(table):
        raise BarsError("No bars", where=path, got="a header and no rows", next_step="export the file again")
    if not text.endswith(("\n", "\r")):
        table.attrs["notes"] = ["the file does not end with a line break: the last bar may be cut short"]
    if skipped:
        table.attrs["skipped"] = skipped
    return table


def _without_ragged(text: str, delimiter: str | None) -> tuple[str, list[tuple[int, str]]]:
    """Remove lines whose number of fields differs from the first; return the text and (number from 1, line)."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    delimiter = delimiter or max(DELIMITERS, key=first.count)
    width = len(next(csv.reader([first], delimiter=delimiter, skipinitialspace=True), []))
    bad = []
    for number, line in enumerate(lines, start=1):
        if line.count(delimiter) + 1 == width or not line.strip():
            continue
        if len(next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))) != width:  # quotes are rare
            bad.append((number, line))
    left_out = {number for number, _ in bad}
    kept = text if not bad else "\n".join(line for number, line in enumerate(lines, 1) if number not in left_out) + "\n"
    return kept, bad


def _check_layout(path: Path, text: str, delimiter: str | None) -> tuple[int, str]:
    """Return the number of fields and the delimiter; refuse text that pandas would silently misread."""
    lines = [line for line in text[:_HEAD_BYTES].splitlines() if line.strip()]
    lines = lines[:50] if len(lines) > 50 or len(text) <= _HEAD_BYTES else lines[:-1]
    if not lines:
        raise BarsError("No lines found", where=path, got="blank text", next_step="export the file again")
    delimiter = delimiter or max(DELIMITERS, key=lambda mark: lines[0].count(mark))
    rows = list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
    header = rows[0]
    if len(header) < 5:
        got = f"first line {lines[0][:80]!r}"
        wanted = "column names separated by comma, semicolon, tab or '|'"
        raise BarsError("No columns found", where=path, got=got, wanted=wanted, next_step="give another delimiter")
    if not any(any(letter.isalpha() for letter in name) for name in header):
        got, wanted = f"first line {lines[0][:80]!r}", "column names"
        step = delimiter.join(("timestamp", "open", "high", "low", "close", "volume"))
        raise BarsError("The first line is no header", where=path, got=got, wanted=wanted, next_step=f"add: {step}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) > len(header):
            step = "if the prices have decimal commas, export with semicolons or put them in quotes"
            got, wanted = f"{len(row)} fields in line {number}", f"{len(header)} as in the first line"
            raise BarsError("Lines longer than the header", where=path, got=got, wanted=wanted, next_step=step)
    last = text.rstrip().splitlines()[-1] if len(text) <= _HEAD_BYTES else text[-4096:].rstrip().splitlines()[-1]
    fields = len(next(csv.reader([last], delimiter=delimiter, skipinitialspace=True)))
    if fields < len(header):
        got, wanted = f"{fields} fields in the last line, {last[:60]!r}", f"{len(header)}"
        step = "the file is cut short: download it again, or delete its last line"
        raise BarsError("The last line is incomplete", where=path, got=got, wanted=wanted, next_step=step)
    return len(header), delimiter
