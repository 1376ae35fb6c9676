"""Report on raw bars: findings with kind, severity and rows, and the hash of the bars."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError

SEVERITIES = ("info", "mapped", "reported", "refused")


@dataclass(frozen=True)
class BarFinding:
    """One finding on the bars.

    kind : a stable name such as "hole" or "conflict"
    severity : "info" (an expected gap), "mapped" (another spelling of the same bars, converted), "reported" (the run
        continues, `strict` refuses) or "refused"
    rows : int64, positions in the table as it was read, from 0; empty when the whole file is meant
    message : a sentence for the user
    next_step : advice for the user
    """

    kind: str
    severity: str
    rows: np.ndarray
    message: str
    next_step: str = ""

    def to_dict(self) -> dict:
        """Return JSON values: number of rows, their ranges as text, and the first 20 rows."""
        return {
            "kind": self.kind, "severity": self.severity, "count": len(self.rows),
            "which": _format_row_ranges(self.rows), "rows": self.rows[:20].tolist(), "message": self.message,
        }  # fmt: skip


@dataclass(frozen=True)
class BarReport:
    """Findings of `validate_bars`, and what the bars are.

    findings : the most severe first
    rows : number of bars kept
    first, last : starts of the first and last bar (UTC)
    minutes : length of a bar
    fingerprint : hash of the bars kept
    """

    findings: tuple[BarFinding, ...]
    rows: int
    first: pd.Timestamp
    last: pd.Timestamp
    minutes: int
    fingerprint: str

    def to_dict(self) -> dict:
        """Return JSON values."""
        return {
            "rows": self.rows, "first": self.first.isoformat(), "last": self.last.isoformat(), "minutes": self.minutes,
            "fingerprint": self.fingerprint,
            "findings": [found.to_dict() for found in self.findings],
        }  # fmt: skip


def raise_on_bar_findings(findings: Sequence[BarFinding], where: object) -> None:
    """Raise one BarsError with every finding, the first with its next step; return if there is none.

    The error's `findings` holds them all.
    """
    if not findings:
        return
    step = findings[0].next_step or "correct the file at its source and import it again"
    error = BarsError("; also: ".join(one.message for one in findings), where=where or "bars", next_step=step)
    error.findings = tuple(findings)
    raise error


def pluralize_count(number: int, noun: str) -> str:
    """Format a count: '1 run', '1,200 runs'."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def _format_row_ranges(rows: np.ndarray) -> str:
    """Format rows in increasing order as ranges: '0-9, 17, 20-22, ...'."""
    rows = np.sort(rows)
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)[:5]  # a file may have a million runs
    ends = np.append(first[1:], len(rows))
    shown = [str(rows[i]) if j == i + 1 else f"{rows[i]}-{rows[j - 1]}" for i, j in zip(first, ends, strict=False)]
    return ", ".join(shown[:4] + ["..."] * (len(shown) > 4))


def format_rows_with_times(rows: np.ndarray, stamps: Sequence) -> str:
    """Format rows as 'row 17 (2024-01-02 10:31:00+00:00)' or '12 rows, first 17 (…), 18 (…)'."""
    shown = [f"{row} ({stamps[row]})" for row in rows[:3].tolist()]
    return f"row {shown[0]}" if len(rows) == 1 else f"{len(rows):,} rows, first {', '.join(shown)}"


def hash_bars(bars: pd.DataFrame) -> str:
    """Return the SHA-256 (hex) of the bars: times, columns and every value's bits, whatever file they are read from."""
    digest = hashlib.sha256(",".join(bars.columns).encode())
    # numbers: prices, volume, the code of a contract
    for column in (bars.index.as_unit("ns").asi8, *(bars[name].to_numpy() for name in bars.columns)):
        digest.update(np.ascontiguousarray(column))
    return digest.hexdigest()
