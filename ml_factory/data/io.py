"""Read bars from Parquet and CSV files, and write the workspace's raw Parquet."""

import csv
import gzip
import importlib
import io
import os
import stat
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from ml_factory.argument_checks import check_file_exists
from ml_factory.data.bad_rows import (
    bad_rows_to_frame,
    drop_bad_rows,
    format_bad_lines,
    raise_on_bad_rows,
    skipped_bad_rows_finding,
)
from ml_factory.data.bar_report import BarFinding, BarReport, raise_on_bar_findings
from ml_factory.data.rolls import RollSpec, build_continuous_contract
from ml_factory.data.sessions import MarketSpec, resolve_market_spec
from ml_factory.data.validation import RawBarSpec, validate_bar_columns, validate_bars
from ml_factory.errors import BarsError, SettingsError
from ml_factory.progress import progress_phase
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, parse_raw_bars_name, require_raw_bars

DELIMITERS = (",", ";", "\t", "|")
CONTRACT_COLUMNS = ("contract", "expiry", "instrument", "symbol")  # the first found wins
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
    with files.local_copy(path) as local:
        return _read(path, local, delimiter, skip_bad)


def resolve_bars_file(source: str | os.PathLike) -> Path:
    """Return the local path of the user's file; a file in a bucket is downloaded."""
    if "://" in os.fspath(source):
        return importlib.import_module("ml_factory.storage.bucket_sync").download_bucket_file(os.fspath(source))
    return Path(source).expanduser()


def _read(path: Path, local: Path, delimiter: str | None, skip_bad: bool) -> pd.DataFrame:
    """Read `local`, naming it `path` in messages."""
    head = _first_bytes(path, local)
    if head[:4] == b"PK\x03\x04":
        step = "save the sheet or the archive's table as CSV or Parquet"
        raise BarsError("This is a workbook or an archive", where=path, wanted="Parquet or CSV", next_step=step)
    if head[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path, local)
    return _read_csv(path, local, head, delimiter, skip_bad)


def import_bars(
    source: str | os.PathLike | pd.DataFrame,
    workspace: Workspace,
    symbol: str,
    spec: RawBarSpec | None = None,
    *,
    market: MarketSpec | None = None,
    delimiter: str | None = None,
    roll: RollSpec | None = None,
    calendar: str | None = None,
) -> BarReport:
    """Check bars and write them to data/raw/{SYMBOL}_1m.parquet in one step; nothing is written if they are refused.

    Bars of 5 minutes go to {SYMBOL}_5m.parquet, and so on. A symbol has bars of one length: others are refused.
    Previous bars with other content are kept once, as {SYMBOL}_1m.previous.parquet. With `spec.skip_bad` the skipped
    rows are listed in {SYMBOL}_skipped.csv in the same folder.

    Parameters
    ----------
    source : a file (also gs://bucket/folder/file), or a table
    workspace, symbol : the destination
    spec : spelling of the bars
    market : calendar, tick and length of bars; None: looked up or inferred
    delimiter : of a CSV
    roll : joins bars of several contracts to one series (`rolls.build_continuous_contract`); the file then also has
        `contract`, `chain` (for features), and `factor` and `shift`, which restore the contracts' own prices
    calendar : calendar for the rolls, if it is not to be looked up by symbol
    """
    spec, path = spec or RawBarSpec(), workspace.raw_bars(symbol)
    if market is not None and spec.minutes is None:
        spec = replace(spec, minutes=market.bar_minutes)
    where = "bars" if isinstance(source, pd.DataFrame) else source
    file = None if isinstance(source, pd.DataFrame) else resolve_bars_file(source)
    raw = source if isinstance(source, pd.DataFrame) else _read_to_import(source, file, delimiter, spec)
    rows, skipped = len(raw) + len(raw.attrs.get("skipped", ())), []
    if spec.skip_bad:
        raw, skipped = drop_bad_rows(raw, spec, file)
    try:
        if roll is None:
            bars, report = validate_bars(raw, spec, where=where, market=market, symbol=symbol)
        else:
            bars, report = _join_contracts(raw, roll, spec, where, market, symbol, calendar)
    except BarsError as error:
        raise_on_bad_rows(raw, spec, file, error)
        raise
    if files.is_file(path):
        _check_bar_length(path, report.minutes)
    path = workspace.raw_bars(symbol, report.minutes)
    if skipped:
        report = replace(report, findings=(skipped_bad_rows_finding(skipped, rows), *report.findings))
        listed = bad_rows_to_frame(skipped).to_csv(index=False)
        files.write(path.with_name(f"{symbol}_skipped.csv"), listed.encode())
    if files.is_file(path):
        if file is not None and files.is_same(path, file):
            return report
        if _has_equal_bars(path, bars):
            return report  # equal bars: the backup of the previous ones stays
        _back_up_previous(path)
    write_bars(path, bars)
    return report


def _read_to_import(source: str | os.PathLike, file: Path, delimiter: str | None, spec: RawBarSpec) -> pd.DataFrame:
    """Read the table; where lines of a CSV have another number of fields, the error lists all bad rows."""
    try:
        return read_bars_table(source, delimiter=delimiter, skip_bad=spec.skip_bad)
    except BarsError as error:
        try:
            others = None if spec.skip_bad else read_bars_table(source, delimiter=delimiter, skip_bad=True)
        except BarsError:
            others = None  # the file cannot be read at all
        if others is not None and "skipped" in others.attrs:
            raise_on_bad_rows(others, spec, file, error)
        raise


def _join_contracts(
    raw: pd.DataFrame,
    roll: RollSpec,
    spec: RawBarSpec,
    where: object,
    market: MarketSpec | None,
    symbol: str,
    calendar: str | None,
) -> tuple[pd.DataFrame, BarReport]:
    """Return checked bars of one series, with `contract`, `factor` and `shift`, and their report."""
    plain = {str(name).strip().lower(): name for name in raw.columns}
    named = next((plain[name] for name in CONTRACT_COLUMNS if name in plain), None)
    if named is None:
        got, step = "columns " + ", ".join(map(repr, raw.columns)), "leave --roll out for bars of one series"
        raise BarsError("These bars name no contract", where=where, got=got, wanted="contract", next_step=step)
    start_ns, values, findings, minutes = validate_bar_columns(raw, spec, where)
    raise_on_bar_findings([finding for finding in findings if finding.severity == "refused"], where)
    index = pd.DatetimeIndex(start_ns.astype("datetime64[ns]"), tz="UTC", name="timestamp")
    code, names = pd.factorize(raw[named].astype(str))
    order = np.lexsort((code, start_ns))
    order = order[~_repeated(np.column_stack([start_ns, code])[order], {k: v[order] for k, v in values.items()})]
    table = pd.DataFrame({"contract": names[code]} | values, index=index).iloc[order]
    if market is None and calendar:
        market = resolve_market_spec(symbol, calendar=calendar, bar_minutes=minutes)
    joined, rolls = build_continuous_contract(
        table, roll, market or resolve_market_spec(symbol, table, bar_minutes=minutes)
    )
    if not len(joined):
        step = "give bars of more days, or name the contract to begin with: RollSpec(first=...)"
        raise BarsError("No bars after the session that decides the first contract", where=where, next_step=step)
    own = [name for name in joined.columns if name not in ("factor", "shift")]
    # joined bars are in canonical form: no zone, stamp or spelling is to be mapped again
    bars, report = validate_bars(
        joined[own].reset_index(), RawBarSpec(minutes, strict=spec.strict), where=where, market=market, symbol=symbol
    )
    findings = [finding for finding in findings if finding.severity != "refused"] + _roll_findings(rolls, table, joined)
    report = replace(report, findings=(*findings, *report.findings))
    return bars.join(joined[["factor", "shift"]]), report


def _repeated(keys: np.ndarray, values: dict[str, np.ndarray]) -> np.ndarray:
    """Return bool[N]: rows that repeat the previous row in every number."""
    again = np.zeros(len(keys), bool)
    again[1:] = (keys[1:] == keys[:-1]).all(1)
    for column in values.values():
        again[1:] &= (column[1:] == column[:-1]) | (np.isnan(column[1:]) & np.isnan(column[:-1]))
    return again


def _roll_findings(rolls: pd.DataFrame, table: pd.DataFrame, joined: pd.DataFrame) -> list[BarFinding]:
    """Return findings on the joined contracts, and on pairs without a common minute."""
    count = table["contract"].nunique()
    message = f"{len(table):,} bars of {count} contracts joined into {len(joined):,}; later row numbers count these"
    findings = [BarFinding("contracts", "mapped", np.empty(0, np.int64), message)]
    for one in rolls.itertuples():
        row = np.array([joined.index.searchsorted(one.at)], np.int64)
        begin = f"{one.contract} from {one.at:%Y-%m-%d %H:%M} UTC ({one.why})"
        findings.append(BarFinding("rolled", "mapped", row, f"{begin}: times {one.factor:.6g}, plus {one.shift:.6g}"))
        if one.why == "floor":
            message = f"differences would carry {one.contract} to under half of its own price, and then to zero: from "
            message += (
                f"{one.at:%Y-%m-%d %H:%M} UTC on the series, features and labels go by the contracts' own returns"
            )
            findings.append(BarFinding("floor", "reported", row, message))
        elif one.previous and pd.isna(one.common):
            message = f"{one.previous} and {one.contract} never traded in one minute before {one.at}: prices jump there"
            findings.append(BarFinding("unjoined_roll", "reported", row, message))
    return findings


def raw_bar_minutes(workspace: Workspace, symbol: str, given: int | None = None) -> int:
    """Return the minutes of the symbol's raw bars, by the file's name; raise SettingsError for others."""
    return _check_bar_length(require_raw_bars(workspace, symbol), given)


def _check_bar_length(path: Path, given: int | None) -> int:
    existing = parse_raw_bars_name(path.name)[1]
    if given not in (None, existing):
        raise SettingsError(
            "A symbol has raw bars of one length", where=path, got=f"bars of {given} min", wanted=f"{existing} min",
            next_step=f"move {path.name} away first, or use another workspace (--workspace)",
        )  # fmt: skip
    return existing


def load_bars(
    workspace: Workspace, symbol: str, spec: RawBarSpec | None = None, *, market: MarketSpec | None = None
) -> tuple[pd.DataFrame, BarReport]:
    """Read and check the bars of the workspace's raw file; return them with their report.

    Raises NotPreparedError when there is no such file, BarsError when it cannot be read or its bars are refused.
    """
    path = require_raw_bars(workspace, symbol)
    spec = replace(spec or RawBarSpec(), minutes=raw_bar_minutes(workspace, symbol, spec and spec.minutes))
    with progress_phase("reading") as done:
        table = read_bars_table(path)
        done(len(table))
    with progress_phase("checking", len(table)):
        return validate_bars(table, spec, where=path, market=market, symbol=symbol)


def write_bars(path: str | os.PathLike, bars: pd.DataFrame) -> None:
    """Write checked bars as Parquet in one step: a column `timestamp` (UTC, start) and then the others."""
    table = bars.reset_index()
    files.replace(path, lambda temporary: table.to_parquet(temporary, index=False, compression="zstd"))


def _has_equal_bars(path: Path, bars: pd.DataFrame) -> bool:
    with files.local_copy(path) as local:
        try:
            return pd.read_parquet(local).equals(bars.reset_index())
        except (pyarrow.ArrowException, OSError, ValueError):
            return False


def _back_up_previous(path: Path) -> None:
    previous = path.with_name(path.stem + ".previous.parquet")
    content = files.read(path)
    if not files.is_file(previous) or files.read(previous) != content:
        files.write(previous, content)


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
        facts = pyarrow.parquet.read_metadata(local)
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
        got = format_bad_lines(ragged) or str(error).removeprefix("Error tokenizing data. C error: ").strip()
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
