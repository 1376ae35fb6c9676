"""List all bad rows of a table at once, for a CSV with their line numbers in the file.

`validate_bars` refuses at the first fault, since nothing after it can be relied on. This module checks every row on its
own, so that a user sees all rows that must be corrected, or skips them (`BarSpec.skip_bad`).
"""

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.bar_columns import PRICES, match_bar_columns
from ml_factory.data.bar_report import BarFinding, pluralize_count
from ml_factory.data.parsing import GROUPED, NUMBER_WORDS, TEXT_FORMATS, clean_number_text, infer_decimal_mark
from ml_factory.data.validation import RawBarSpec
from ml_factory.errors import BarsError

SHOWN = 10
_EPOCH = re.compile(r"\d{9,19}(\.\d+)?")


@dataclass(frozen=True)
class _BadRow:
    """One row that cannot be a bar.

    row : its position in the table, from 0; -1 for a line that is no row
    line : its line in the file, from 1; 0 where the file has no lines
    text : the line, or the row's values
    reason : the fault
    """

    row: int
    line: int
    text: str
    reason: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else f"row {self.row}"
        return f"{where}: {self.text!r} ({self.reason})"


def _find_bad_rows(raw: pd.DataFrame, spec: RawBarSpec, source: Path | None) -> list[_BadRow]:
    """List the rows that cannot be bars, each with its first fault: time, numbers, impossible prices or volume.

    Parameters
    ----------
    raw : table as `read_table` returns it
    spec : spelling of the bars
    source : local file of the table, None where there is none

    Raises
    ------
    BarsError : a whole column is absent
    """
    columns, _ = match_bar_columns(raw, source, spec.columns)
    reasons: dict[int, str] = {}
    for rows, reason in (*_bad_timestamps(columns.pop("timestamp")), *_bad_values(columns, spec.decimal)):
        for row in rows.tolist():
            reasons.setdefault(row, reason)
    rows = sorted(reasons)
    left_out = {number for number, _ in raw.attrs.get("skipped", ())}
    lines = _source_lines(source, rows, left_out) if source else None
    found = []
    for k, row in enumerate(rows):
        line, text = lines[k] if lines else (0, ", ".join(map(str, raw.iloc[row])))
        found.append(_BadRow(row, line, text, reasons[row]))
    return found


def drop_bad_rows(raw: pd.DataFrame, spec: RawBarSpec, source: Path | None) -> tuple[pd.DataFrame, list[_BadRow]]:
    """Return the table without its bad rows, and the bad rows, including lines that `read_table` left out."""
    bad = _find_bad_rows(raw, spec, source)
    kept = raw.drop(index=raw.index[[one.row for one in bad]]).reset_index(drop=True) if bad else raw
    if not len(kept):
        raise BarsError("Every row is bad", where=source, got=str(bad[0]), next_step="check zone, decimals and columns")
    if bad:  # columns that were text only because of bad cells become numbers
        kept = kept.apply(lambda column: _as_numbers(column) if column.dtype == object else column)
    return kept, _with_ragged(bad, raw)


def _with_ragged(bad: Sequence[_BadRow], raw: pd.DataFrame) -> list[_BadRow]:
    """Return the bad rows and the lines that `read_table` left out, in the file's order."""
    ragged = [_BadRow(-1, number, text, "another number of fields") for number, text in raw.attrs.get("skipped", ())]
    return sorted([*bad, *ragged], key=lambda one: (one.line, one.row))


def raise_on_bad_rows(raw: pd.DataFrame, spec: RawBarSpec, source: Path | None, cause: BarsError) -> None:
    """Raise one BarsError that adds all bad rows to `cause`, which named the first; return if there is none."""
    try:
        bad = _with_ragged(_find_bad_rows(raw, spec, source), raw)
    except BarsError:
        return  # a fault of the whole file: `cause` names it
    if not bad:
        return
    shown = "; ".join(map(str, bad[:SHOWN])) + (f"; and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else "")
    step = "correct them, or leave them out and have them listed: --skip-bad"
    step = f"{cause.next_step}; {step}" if cause.next_step else step
    what = f"{cause.what}. {pluralize_count(len(bad), 'bad row')} in all: {shown}"
    error = BarsError(what, where=cause.where, got=cause.got, wanted=cause.wanted, next_step=step)
    error.findings = getattr(cause, "findings", ())
    raise error from cause


def format_bad_lines(lines: Sequence[tuple[int, str]]) -> str:
    """Format (number, text) of lines as "line 7: 'text'; line 9: ..."; "" for none."""
    shown = "; ".join(f"line {number}: {text[:80]!r}" for number, text in lines[:SHOWN])
    return shown + (f"; and {len(lines) - SHOWN:,} more" if len(lines) > SHOWN else "")


def _as_numbers(column: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().equals(column.notna()) else column


def skipped_bad_rows_finding(bad: Sequence[_BadRow], rows: int) -> BarFinding:
    """Return the finding on skipped rows; `rows` is the number of rows in all."""
    shown = "; ".join(map(str, bad[:3])) + ("; ..." if len(bad) > 3 else "")
    message = f"{pluralize_count(len(bad), 'bad row')} of {rows:,} skipped: {shown}"
    return BarFinding("skipped_rows", "mapped", np.array([one.row for one in bad if one.row >= 0], np.int64), message)


def bad_rows_to_frame(bad: Sequence[_BadRow]) -> pd.DataFrame:
    """Return a table with line, row, reason and text of every skipped row."""
    columns = ["line", "row", "reason", "text"]
    return pd.DataFrame([(one.line, one.row, one.reason, one.text) for one in bad], columns=columns)


def _read_csv_lines(path: Path) -> list[tuple[int, str]]:
    """Read (number from 1, text) of the lines of a CSV (also .gz) that are not blank; [] for other files."""
    with open(path, "rb") as file:
        head = file.read(4)
    if head == b"PAR1":
        return []
    with gzip.open(path) if head[:2] == b"\x1f\x8b" else open(path, "rb") as file:
        content = file.read()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    lines = content.decode(encoding, errors="replace").splitlines()
    return [(number, text) for number, text in enumerate(lines, start=1) if text.strip()]


def _source_lines(source: Path, rows: Sequence[int], left_out: set[int]) -> list[tuple[int, str]] | None:
    """Return (number, text) of the lines of these rows; None where the file has no lines, or a row spans several."""
    if not rows:
        return None
    lines = [line for line in _read_csv_lines(source) if line[0] not in left_out]
    if rows[-1] + 1 >= len(lines):
        return None
    return [lines[row + 1] for row in rows]


def _bad_timestamps(stamps: pd.Series) -> list[tuple[np.ndarray, str]]:
    """Find rows whose time is empty or cannot be read in the format of most rows."""
    found = [(np.flatnonzero(stamps.isna()), "timestamp is empty")]
    if pd.api.types.is_datetime64_any_dtype(stamps.dtype) or pd.api.types.is_numeric_dtype(stamps.dtype):
        return found
    text = stamps.astype(str).str.strip().reset_index(drop=True)
    epoch = text.str.fullmatch(_EPOCH)
    if epoch.mean() > 0.5:
        return [*found, (np.flatnonzero(~epoch), "timestamp cannot be read")]
    least = np.ones(len(text), bool)
    for form in TEXT_FORMATS:
        for ending in ("", "%z") if form != "ISO8601" else ("",):
            bad = pd.to_datetime(text, format=form + ending, errors="coerce", utc=True).isna().to_numpy()
            least = bad if bad.sum() < least.sum() else least
        if not least.any():
            break
    return [*found, (np.flatnonzero(least), "timestamp cannot be read")]


def _bad_values(columns: dict[str, pd.Series], decimal: str | None) -> list[tuple[np.ndarray, str]]:
    """Find rows with text for a number, with impossible prices, or with a negative volume."""
    found, values = [], {}
    text = {
        name: clean_number_text(column) for name, column in columns.items() if not pd.api.types.is_numeric_dtype(column)
    }
    numbers = {name: column[column.str.fullmatch(r"[+-]?[\d.,]+(?:[eE][+-]?\d+)?")] for name, column in text.items()}
    mark = (decimal or infer_decimal_mark(numbers, None, "bars")) if text else "."
    for name, column in columns.items():
        if name not in text:
            values[name] = column.to_numpy(np.float64, na_value=np.nan)
            continue
        word = text[name].str.lower().isin(NUMBER_WORDS).to_numpy()
        good = text[name].str.fullmatch(GROUPED[mark]).to_numpy(bool) & ~word
        found.append((np.flatnonzero(~word & ~good), f"{name} is not a number"))
        thousands = "," if mark == "." else "."
        plain = text[name].str.replace(thousands, "", regex=False).str.replace(mark, ".", regex=False)
        values[name] = pd.to_numeric(plain.where(good), errors="coerce").to_numpy(np.float64)
    prices = {name: values[name] for name in PRICES}
    for name, price in prices.items():
        found.append((np.flatnonzero(~np.isfinite(price)), f"{name} is empty, not a number or infinite"))
        found.append((np.flatnonzero(price <= 0), f"{name} is zero or negative"))
    body = np.stack([prices["open"], prices["close"]])
    broken = (prices["high"] < body.max(0)) | (prices["low"] > body.min(0))
    found.append((np.flatnonzero(broken), "high is not the highest or low not the lowest"))
    if "volume" in values:
        wrong = (values["volume"] < 0) | np.isinf(values["volume"])
        found.append((np.flatnonzero(wrong), "volume is negative or infinite"))
    return found
