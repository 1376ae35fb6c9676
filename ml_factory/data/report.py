"""What was found in raw bars: one report, each finding with its kind, severity and rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError

SEVERITIES = ("info", "mapped", "reported", "refused")


@dataclass(frozen=True)
class Finding:
    """One thing about the bars.

    kind : a stable name such as "hole" or "conflict".
    severity : "info" (a legal gap), "mapped" (another spelling of the same bars, put right), "reported" (the run
        goes on, `strict` refuses) or "refused".
    rows : int64, positions in the table as it was read, from 0; empty when the whole file is meant.
    message : a sentence for the user.
    """

    kind: str
    severity: str
    rows: np.ndarray
    message: str
    next_step: str = ""

    def __post_init__(self):
        assert self.severity in SEVERITIES, self.severity

    def to_dict(self, limit: int | None = 20) -> dict:
        """JSON-able, with the number of rows, which they are in words, and the first `limit` of them (None: all)."""
        facts = {"kind": self.kind, "severity": self.severity, "count": len(self.rows), "which": row_ranges(self.rows)}
        return facts | {"rows": [int(row) for row in self.rows[:limit]], "message": self.message}


@dataclass(frozen=True)
class BarReport:
    """What `check_bars` found, and the bars in numbers.

    rows : bars kept.  first, last : starts of the first and last bar (UTC).  minutes : length of a bar.
    fingerprint : hash of the bars kept.  facts : further figures, JSON-able (sessions, missing minutes, ...).
    """

    findings: tuple[Finding, ...]
    rows: int
    first: pd.Timestamp | None
    last: pd.Timestamp | None
    minutes: int = 1
    fingerprint: str = ""
    facts: dict = field(default_factory=dict)

    def of(self, kind: str) -> Finding | None:
        """The finding of this kind, if there is one."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was found, legal gaps apart."""
        return tuple(finding.kind for finding in self.findings if finding.severity != "info")

    def to_dict(self, limit: int | None = 20) -> dict:
        """JSON-able; of each finding the first `limit` rows, or all of them (None)."""
        bounds = {name: None if when is None else when.isoformat() for name, when in self._bounds()}
        numbers = {"rows": self.rows, **bounds, "minutes": self.minutes, "fingerprint": self.fingerprint}
        return numbers | {"facts": dict(self.facts), "findings": [found.to_dict(limit) for found in self.findings]}

    def to_frame(self) -> pd.DataFrame:
        """One line a finding, for a notebook: kind, severity, rows (how many), which of them, message."""
        table = [(f.kind, f.severity, len(f.rows), row_ranges(f.rows), f.message) for f in self.findings]
        return pd.DataFrame(table, columns=["kind", "severity", "rows", "which", "message"])

    def summary(self) -> str:
        """A few lines of text."""
        head = f"{self.rows:,} bars of {self.minutes} min" + (f", {self.first} to {self.last}" if self.rows else "")
        return "\n".join([head, *(f"  {f.severity:8} {f.kind}: {f.message}" for f in self.findings)])

    def _bounds(self) -> tuple:
        return ("first", self.first), ("last", self.last)


def refuse(findings: Sequence[Finding], where: object) -> None:
    """Raise one BarsError that tells every finding here, the first with its next step; nothing if there is none.

    The error's `findings` holds them all.
    """
    if not findings:
        return
    first, others = findings[0], findings[1:]
    what = first.message + "".join(f"; also: {finding.message}" for finding in others)
    step = first.next_step or "mend the file at its source and import it again"
    error = BarsError(what, where=where or "bars", next_step=step)
    error.findings = tuple(findings)
    raise error


def count_of(number: int, noun: str, plural: str = "") -> str:
    """'1 run', '1,200 runs'."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def row_ranges(rows: np.ndarray, limit: int = 4) -> str:
    """'0-9, 17, 20-22, ...': rows in increasing order, stretches of them joined."""
    rows = np.sort(rows)
    edge = np.flatnonzero(np.diff(rows) != 1) + 1
    spans = (
        zip(rows[np.append(0, edge)][:limit], rows[np.append(edge, len(rows)) - 1], strict=False) if len(rows) else ()
    )
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(shown + ["..."] * (len(edge) + 1 > limit))


def name_rows(rows: np.ndarray, stamps: Sequence | None = None, limit: int = 3) -> str:
    """'row 17 (2024-01-02 10:31:00+00:00)' or '12 rows, first 17 (…), 18 (…)'; `stamps` by position in the file."""
    named = [f"{row}" if stamps is None else f"{row} ({stamps[row]})" for row in np.asarray(rows)[:limit].tolist()]
    return f"row {named[0]}" if len(rows) == 1 else f"{len(rows):,} rows, first {', '.join(named)}"
