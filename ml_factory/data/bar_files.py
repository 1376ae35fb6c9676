"""Read the table of a CSV file (also gzip-compressed) or a Parquet file of bars, whatever its columns."""

import csv
import gzip
import io
import os
import stat
import zlib
from pathlib import Path

import pandas as pd

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import BarsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.files import remote_address

mirror = LazyModule("ml_factory.storage.mirror")
pyarrow = LazyModule("pyarrow")  # a service predicts without it

DELIMITERS = (",", ";", "\t", "|")
_TEXT_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_HEAD_BYTES = 65_536
# Before 3.1 pandas parses decimals inexactly in the last bit without this option; since then the option is deprecated.
_EXACT = {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}


def read_bars_table(path: str | os.PathLike, *, copy: Path | None = None, skip_bad: bool = False) -> pd.DataFrame:
    """Read the table in a Parquet or CSV file (also .gz; delimited by comma, semicolon, tab or bar), whatever its
    columns.

    Notes about the table are in `.attrs["notes"]`.

    Parameters
    ----------
    path : also gs://bucket/folder/file, which is downloaded once
    copy : a copy of the file, read in its place; messages name `path`
    skip_bad : leave out lines of a CSV with another number of fields; `.attrs["skipped"]` has their (number, text)

    Raises
    ------
    BarsError : the file is absent, empty, truncated or of another format
    """
    path = resolve_bars_file(path)
    local = check_file_exists(path, "one Parquet or CSV file", kind=BarsError) if copy is None else copy
    head = _first_bytes(path, local)
    if head[:4] == b"PK\x03\x04":
        step = "save the sheet or the archive's table as CSV or Parquet"
        raise BarsError("This is a workbook or an archive", where=path, wanted="Parquet or CSV", next_step=step)
    if head[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path, local)
    return _read_csv(path, local, head, skip_bad)


def resolve_bars_file(source: str | os.PathLike) -> Path:
    """Return the local path of the user's file; one in a bucket or on a mount is downloaded."""
    address = remote_address(source)
    return Path(source).expanduser() if address is None else mirror.fetch_file(address)


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


def _read_parquet(path: Path, local: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(local)
        pyarrow.default_memory_pool().release_unused()  # it would keep as much as the table takes
        return table
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        content = local.read_bytes()
        whole = content[:4] == content[-4:] == b"PAR1"
        got = str(error).splitlines()[0] if whole else "a Parquet file that is cut short, or another format"
        step = "download or export the file again"
        raise BarsError("This Parquet file cannot be read", where=path, got=got, next_step=step) from error


def _read_csv(path: Path, local: Path, head: bytes, skip_bad: bool) -> pd.DataFrame:
    try:
        content = gzip.decompress(local.read_bytes()) if head[:2] == b"\x1f\x8b" else local.read_bytes()
        encoding = next((name for mark, name in _TEXT_MARKS.items() if content.startswith(mark)), "utf-8")
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        got = f"byte {error.start} is not {encoding} text"
        step = "give a Parquet file, or a CSV in UTF-8"
        raise BarsError("This file is neither Parquet nor text", where=path, got=got, next_step=step) from error
    except (EOFError, OSError, zlib.error) as error:
        raise BarsError("This file is cut short", where=path, got=error, next_step="download it again") from error
    skipped = []
    try:
        width, delimiter = _check_layout(path, text)
        if skip_bad and (skipped := _ragged_lines(text, delimiter, width)):
            left_out = {number for number, _ in skipped}
            text = "".join(f"{line}\n" for number, line in enumerate(text.splitlines(), 1) if number not in left_out)
        _check_ends(path, text, delimiter, width)
        table = pd.read_csv(io.StringIO(text), sep=delimiter, skipinitialspace=True, low_memory=False, **_EXACT)
    except csv.Error as error:
        raise BarsError("This is not a table of bars", where=path, got=error, next_step="export it again") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        ragged = _ragged_lines(text, delimiter, width)
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


def _fields(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])


def _ragged_lines(text: str, delimiter: str, width: int) -> list[tuple[int, str]]:
    """Return (number from 1, line) of the lines with another number of fields than the first."""
    return [
        (number, line) for number, line in enumerate(text.splitlines(), 1)
        if line.count(delimiter) + 1 != width and line.strip() and len(_fields(line, delimiter)) != width
    ]  # fmt: skip


def _check_layout(path: Path, text: str) -> tuple[int, str]:
    """Return the number of fields and the delimiter; refuse text without a header."""
    first = next((line for line in text[:_HEAD_BYTES].splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=first.count)
    header, got = _fields(first, delimiter), f"first line {first[:80]!r}"
    if len(header) < 5:
        wanted = "column names separated by comma, semicolon, tab or '|'"
        raise BarsError("No columns found", where=path, got=got, wanted=wanted, next_step="export it with one of these")
    if not any(letter.isalpha() for name in header for letter in name):
        step = "add: " + delimiter.join(("timestamp", "open", "high", "low", "close", "volume"))
        raise BarsError("The first line is no header", where=path, got=got, wanted="column names", next_step=step)
    return len(header), delimiter


def _check_ends(path: Path, text: str, delimiter: str, width: int) -> None:
    """Refuse text that pandas would silently misread: first lines longer than the header, and a last one cut short."""
    wanted = f"{width} as in the first line"
    for number, line in enumerate(text[:_HEAD_BYTES].splitlines()[:50], start=1):
        if len(row := _fields(line, delimiter)) > width:
            step = "if the prices have decimal commas, export with semicolons or put them in quotes"
            got = f"{len(row)} fields in line {number}"
            raise BarsError("Lines longer than the header", where=path, got=got, wanted=wanted, next_step=step)
    last = text.rstrip()[-_HEAD_BYTES:].splitlines()[-1]
    fields = len(_fields(last, delimiter))
    if fields < width:
        got = f"{fields} fields in the last line, {last[:60]!r}"
        step = "the file is cut short: download it again, or delete its last line"
        raise BarsError("The last line is incomplete", where=path, got=got, wanted=wanted, next_step=step)
