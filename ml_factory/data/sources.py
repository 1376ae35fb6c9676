"""Bars from files: Parquet and CSV in, the workspace's raw Parquet out."""

import csv
import difflib
import gzip
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow

from ml_factory.data.bars import BarSpec, check_bars, read_columns
from ml_factory.data.contracts import RollSpec, continuous
from ml_factory.data.findings import BarReport, Finding, refuse
from ml_factory.data.sessions import MarketSpec, market_for
from ml_factory.errors import BarsError, NotPreparedError, SettingsError
from ml_factory.progress import phase
from ml_factory.runs import mount_table, mounts
from ml_factory.runs.storage import (
    at_hand,
    disk_errors,
    is_file,
    is_folder,
    names_in,
    read_file,
    replace_file,
    write_bytes_atomic,
)
from ml_factory.runs.workspace import Workspace

DELIMITERS = (",", ";", "\t", "|")
CONTRACT_COLUMNS = ("contract", "expiry", "instrument", "symbol")  # the first found wins
_TEXT_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_HEAD_BYTES = 65_536
# Until 3.1 pandas reads decimals a last bit off unless told otherwise; since then it warns when told.
_EXACT = {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}


def read_table(path: str | os.PathLike, *, delimiter: str | None = None) -> pd.DataFrame:
    """The table in a Parquet or CSV file (also .gz), whatever its columns; notes about it in `.attrs["notes"]`.

    delimiter : of a CSV; found from its first lines if None (comma, semicolon, tab or bar).
    Raises BarsError for a file that is absent, empty, cut short or neither.
    """
    path = Path(path).expanduser()
    _check_there(path)
    with at_hand(path) as here:
        return _read(path, here, delimiter)


def _read(path: Path, here: Path, delimiter: str | None) -> pd.DataFrame:
    """path : what the user calls it.  here : where it is read."""
    head = _first_bytes(path, here)
    if head[:4] == b"PK\x03\x04":
        step = "save the sheet or the archive's table as CSV or Parquet"
        raise BarsError("This is a workbook or an archive", where=path, wanted="Parquet or CSV", next_step=step)
    if head[:4] == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path, here)
    return _read_csv(path, here, head, delimiter)


def import_bars(
    source: str | os.PathLike | pd.DataFrame,
    workspace: Workspace,
    symbol: str,
    spec: BarSpec | None = None,
    *,
    market: MarketSpec | None = None,
    delimiter: str | None = None,
    roll: RollSpec | None = None,
    calendar: str | None = None,
) -> BarReport:
    """Check bars and put them at data/raw/{SYMBOL}_1m.parquet in one step; nothing is written if they are refused.

    source : a file, or a table already read. Bars of other content that were there are kept once more beside the
    new ones, as {SYMBOL}_1m.previous.parquet.
    roll : joins bars of several contracts to one series (`contracts.continuous`); the file then also has `contract`,
    `chain` (for features), `factor` and `shift`, which give the contracts' own prices back.  calendar : whose
    sessions the rolls follow, if
    it is not to be looked up by symbol.
    """
    spec = spec or BarSpec()
    path = workspace.raw_bars(symbol)
    if spec.minutes != 1:
        step = "give 1-minute bars; coarser ones are made of them"
        raise SettingsError("The workspace keeps 1-minute bars", where="minutes", got=spec.minutes, next_step=step)
    where = "bars" if isinstance(source, pd.DataFrame) else source
    raw = source if isinstance(source, pd.DataFrame) else read_table(source, delimiter=delimiter)
    if roll is None:
        bars, report = check_bars(raw, spec, where=where, market=market, symbol=symbol)
    else:
        known = market or (market_for(symbol, calendar=calendar) if calendar else None)
        bars, report = _join_contracts(raw, roll, spec, where, known, symbol)
    if is_file(path):
        if not isinstance(source, pd.DataFrame) and _is_at(Path(source).expanduser(), path):
            return report
        if _holds(path, bars):
            return report  # the same bars once more: what was there before them stays the previous
        _keep_previous(path)
    write_bars(path, bars)
    return report


def _join_contracts(
    raw: pd.DataFrame, roll: RollSpec, spec: BarSpec, where: object, market: MarketSpec | None, symbol: str
) -> tuple[pd.DataFrame, BarReport]:
    """Checked bars of one series, with `contract`, `factor` and `shift`, and their report."""
    plain = {str(name).strip().lower(): name for name in raw.columns}
    named = next((plain[name] for name in CONTRACT_COLUMNS if name in plain), None)
    if named is None:
        got, step = "columns " + ", ".join(map(repr, raw.columns)), "leave --roll out for bars of one series"
        raise BarsError("These bars name no contract", where=where, got=got, wanted="contract", next_step=step)
    start_ns, values, findings = read_columns(raw, spec, where)
    refuse([finding for finding in findings if finding.severity == "refused"], where)
    index = pd.DatetimeIndex(start_ns.astype("datetime64[ns]"), tz="UTC", name="timestamp")
    code, names = pd.factorize(raw[named].astype(str))
    order = np.lexsort((code, start_ns))
    order = order[~_repeated(np.column_stack([start_ns, code])[order], {k: v[order] for k, v in values.items()})]
    table = pd.DataFrame({"contract": names[code]} | values, index=index).iloc[order]
    joined, rolls = continuous(table, roll, market or market_for(symbol, table))
    if not len(joined):
        step = "give bars of more days, or name the contract to begin with: RollSpec(first=...)"
        raise BarsError("The first session decides the first contract, and no other came", where=where, next_step=step)
    own = [name for name in joined.columns if name not in ("factor", "shift")]
    # joined bars are in the contract's form: nothing is to be shifted or translated again
    bars, report = check_bars(
        joined[own].reset_index(), BarSpec(strict=spec.strict), where=where, market=market, symbol=symbol
    )
    told = [finding for finding in findings if finding.severity != "refused"] + _told_rolls(rolls, table, joined)
    report = replace(report, findings=(*told, *report.findings))
    return bars.join(joined[["factor", "shift"]]), report


def _repeated(keys: np.ndarray, values: dict[str, np.ndarray]) -> np.ndarray:
    """bool[N]: rows that say again, in every number, what the row before them said."""
    again = np.zeros(len(keys), bool)
    again[1:] = (keys[1:] == keys[:-1]).all(1)
    for column in values.values():
        again[1:] &= (column[1:] == column[:-1]) | (np.isnan(column[1:]) & np.isnan(column[:-1]))
    return again


def _told_rolls(rolls: pd.DataFrame, table: pd.DataFrame, joined: pd.DataFrame) -> list[Finding]:
    """What was joined to what, and where two contracts never traded in one minute."""
    count = table["contract"].nunique()
    message = f"{len(table):,} bars of {count} contracts joined into {len(joined):,}; rows of what follows count these"
    told = [Finding("contracts", "mapped", np.empty(0, np.int64), message)]
    for one in rolls.itertuples():
        row = np.array([joined.index.searchsorted(one.at)], np.int64)
        begin = f"{one.contract} from {one.at:%Y-%m-%d %H:%M} UTC ({one.why})"
        told.append(Finding("rolled", "mapped", row, f"{begin}: times {one.factor:.6g}, plus {one.shift:.6g}"))
        if one.why == "floor":
            message = f"differences would carry {one.contract} to under half of its own price, and then to zero: from "
            message += (
                f"{one.at:%Y-%m-%d %H:%M} UTC on the series, features and labels go by the contracts' own returns"
            )
            told.append(Finding("floor", "reported", row, message))
        elif one.previous and pd.isna(one.common):
            message = f"{one.previous} and {one.contract} never traded in one minute before {one.at}: prices jump there"
            told.append(Finding("unjoined_roll", "reported", row, message))
    return told


def raw_bars_of(workspace: Workspace, symbol: str) -> Path:
    """The symbol's raw file. Raises NotPreparedError where there is none."""
    path = workspace.raw_bars(symbol)
    if is_file(path):
        return path
    raise NotPreparedError(
        "There are no raw bars for this symbol",
        where=path,
        got="no file",
        wanted="1-minute bars as Parquet",
        next_step=f"put the file there, or run: python -m ml_factory prepare --data YOUR_FILE --symbol {symbol}",
    )


def load_bars(
    workspace: Workspace, symbol: str, spec: BarSpec | None = None, *, market: MarketSpec | None = None
) -> tuple[pd.DataFrame, BarReport]:
    """Checked bars of the workspace's raw file, and their report.

    Raises NotPreparedError when there is no such file, BarsError when it cannot be read or breaks the contract.
    """
    path = raw_bars_of(workspace, symbol)
    with phase("reading") as done:
        table = read_table(path)
        done(len(table))
    with phase("checking", len(table)):
        return check_bars(table, spec, where=path, market=market, symbol=symbol)


def write_bars(path: str | os.PathLike, bars: pd.DataFrame) -> None:
    """Checked bars as Parquet, in one step: a column `timestamp` (UTC, start) and then the others."""
    table = bars.reset_index()
    replace_file(path, lambda aside: table.to_parquet(aside, index=False, compression="zstd"))


def _is_at(source: Path, path: Path) -> bool:
    """Whether the source is that very file; on two mounts, or on one alone, it is not."""
    if mount_table.mount_of(source) != mount_table.mount_of(path):
        return False
    with disk_errors(path):
        return mounts.same_file(path, os.path.abspath(source))


def _holds(path: Path, bars: pd.DataFrame) -> bool:
    with at_hand(path) as here:
        try:
            return pd.read_parquet(here).equals(bars.reset_index())
        except (pyarrow.ArrowException, OSError, ValueError):
            return False


def _keep_previous(path: Path) -> None:
    previous = path.with_name(path.stem + ".previous.parquet")
    content = read_file(path)
    if not is_file(previous) or read_file(previous) != content:
        write_bytes_atomic(previous, content)


def _check_there(path: Path) -> None:
    if is_file(path):
        return
    if is_folder(path):
        raise BarsError("Not a file", where=path, wanted="one Parquet or CSV file", next_step="name the file itself")
    near = difflib.get_close_matches(path.name, names_in(path.parent), n=1)
    step = f"did you mean {near[0]!r}?" if near else "check the path"
    raise BarsError("No such file", where=path, next_step=step)


def _first_bytes(path: Path, here: Path) -> bytes:
    try:
        with open(here, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise BarsError("This file cannot be read", where=path, got=error.strerror) from error
    if not head.strip():
        raise BarsError(
            "The file is empty", where=path, got=f"{here.stat().st_size} bytes", next_step="export it again"
        )
    return head


def _read_parquet(path: Path, here: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(here)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        with open(here, "rb") as file:
            begin = file.read(4)
            file.seek(max(0, here.stat().st_size - 4))
            whole = begin == b"PAR1" and file.read(4) == b"PAR1"
        got = str(error).splitlines()[0] if whole else "a Parquet file that is cut short, or another format"
        step = "download or export the file again"
        raise BarsError("This Parquet file cannot be read", where=path, got=got, next_step=step) from error


def _read_csv(path: Path, here: Path, head: bytes, delimiter: str | None) -> pd.DataFrame:
    encoding = next((name for mark, name in _TEXT_MARKS.items() if head.startswith(mark)), "utf-8")
    try:
        with gzip.open(here) if head[:2] == b"\x1f\x8b" else open(here, "rb") as file:
            text = file.read().decode(encoding)
    except UnicodeDecodeError as error:
        got = f"byte {error.start} is not {encoding} text"
        step = "give a Parquet file, or a CSV in UTF-8"
        raise BarsError("This file is neither Parquet nor text", where=path, got=got, next_step=step) from error
    except (EOFError, OSError) as error:
        raise BarsError("This file is cut short", where=path, got=error, next_step="download it again") from error
    width, delimiter = _check_layout(path, text, delimiter)
    try:
        table = pd.read_csv(io.StringIO(text), sep=delimiter, skipinitialspace=True, low_memory=False, **_EXACT)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        got = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        step = f"every line needs {width} fields like the first; mend that line"
        raise BarsError("This CSV cannot be read", where=path, got=got, next_step=step) from error
    if not len(table):
        raise BarsError("No bars", where=path, got="a header and no rows", next_step="export the file again")
    if not text.endswith(("\n", "\r")):
        table.attrs["notes"] = ["the file does not end with a line break: the last bar may be cut short"]
    return table


def _check_layout(path: Path, text: str, delimiter: str | None) -> tuple[int, str]:
    """Fields of the header, and the delimiter; refuses what would be read as something else without a word."""
    lines = [line for line in text[:_HEAD_BYTES].splitlines() if line.strip()]
    lines = lines[:50] if len(lines) > 50 or len(text) <= _HEAD_BYTES else lines[:-1]
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
