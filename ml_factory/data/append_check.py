"""Check appended bars: only the new ones, with the preceding bars as context for the detectors.

A bar is refused exactly where a check of the whole file refuses it. The report may differ: an outlier among the new
bars is measured by the market's scale in the last `LOOK_BACK` bars before it, where a check of the whole file uses the
scale of the file, so the two may name other bars. Only the report uses these findings.
"""

import numpy as np
import pandas as pd

from ml_factory.data.bar_columns import PRICES
from ml_factory.data.bar_report import BarFinding, BarReport, format_row_ranges, pluralize_count
from ml_factory.data.prefix_hash import PrefixHasher
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import FEW_BARS, RawBarSpec, validate_bars
from ml_factory.errors import BarsError

LOOK_BACK = 20_000  # bars; detectors use 720 on each side, and the typical behaviour of days
SEAM = 7 * 1440  # bars before the new ones whose findings may change: time zones are checked by the week
SHOWN_ROWS, SHOWN_RANGES = 20, 4
_NO_ROWS = np.empty(0, np.int64)
_SINCE = "; in bars added since: "


def canonicalize_for_append(table: pd.DataFrame) -> pd.DataFrame | None:
    """Return the table in the form of checked bars, or None where a column would have to be mapped."""
    columns = list(table.columns)
    if columns not in (["timestamp", *PRICES], ["timestamp", *PRICES, "volume"]):
        return None
    stamps = table["timestamp"]
    zoned = isinstance(stamps.dtype, pd.DatetimeTZDtype) and str(stamps.dtype.tz) == "UTC"
    if not zoned or any(table[name].dtype.kind not in "iuf" for name in columns[1:]):
        return None
    values = {name: table[name].to_numpy(float) for name in columns[1:]}
    if "volume" in values and not (np.nan_to_num(values["volume"]) != 0).any():
        del values["volume"]  # empty or zero throughout: left out, as `validate_bars` does
    if any(np.isnan(column).any() for column in values.values()):
        return None
    return pd.DataFrame(values, index=pd.DatetimeIndex(stamps, name="timestamp").as_unit("ns"), copy=False)


def check_appended_bars(prefixes: PrefixHasher, old: int, report: dict, market: MarketSpec) -> dict | None:
    """Return the report on all bars (as `BarReport.to_dict`), of which the first `old` were checked before.

    Parameters
    ----------
    prefixes : hasher of all bars, in the form of `canonicalize_for_append`
    old : number of bars checked before
    report : the report on these, as `BarReport.to_dict`
    market : the market

    Returns
    -------
    None where new bars must be mapped or refused: a check of the whole file then gives the reason
    """
    bars, low = prefixes.bars, max(0, old - LOOK_BACK)
    try:
        known, before = validate_bars(bars.iloc[low:old].reset_index(), RawBarSpec(), market=market)
        combined, after = validate_bars(bars.iloc[low:].reset_index(), RawBarSpec(), market=market)
    except BarsError:
        return None
    if not (combined.equals(bars.iloc[low:]) and len(known) == old - low):
        return None
    return {
        **report,
        "rows": len(bars),
        "last": bars.index[-1].isoformat(),
        "fingerprint": prefixes.total_hash,
        "facts": _facts(report["facts"], before.facts, after.facts),
        "findings": _findings(report["findings"], before, after, low, old, len(bars)),
    }


def _facts(report: dict, before: dict, after: dict) -> dict:
    """Return the figures of all bars: the previous ones plus the difference that the new bars make."""
    facts = dict(report)
    for name in ("sessions", "absent_minutes", "open_minutes"):
        facts[name] = report[name] + after[name] - before[name]
    facts["absent_share"] = round(facts["absent_minutes"] / max(facts["open_minutes"], 1), 6)
    gaps = {kind: after["gaps"].get(kind, 0) - before["gaps"].get(kind, 0) for kind in after["gaps"]}
    both = {kind: report["gaps"].get(kind, 0) + gaps.get(kind, 0) for kind in (report["gaps"] | gaps)}
    return facts | {"gaps": both}


def _findings(report: list[dict], before: BarReport, after: BarReport, low: int, old: int, rows: int) -> list[dict]:
    """Merge the previous findings with those on the new bars, one for each kind.

    before, after : reports on the bars from `low` on, without and with the new bars. The last bars checked before may
        change their finding: a price far from the others looks like a lasting move until the next bar shows that it was
        a spike
    """
    by_kind = {one["kind"]: one for one in report if one["kind"] != "few_bars" or rows < FEW_BARS}
    seam = old - SEAM
    then = {found.kind: found.rows + low for found in before.findings}
    for found in after.findings:
        now, known = found.rows + low, then.pop(found.kind, _NO_ROWS)
        _remove_rows(by_kind, found.kind, _only_in_first(known, now, seam))
        new = np.union1d(now[now >= old], _only_in_first(now[now < old], known, seam))
        if len(new):
            _add_rows(by_kind, found, new, rows - low)
    for kind, known in then.items():
        _remove_rows(by_kind, kind, _only_in_first(known, _NO_ROWS, seam))
    return list(by_kind.values())


def _only_in_first(these: np.ndarray, others: np.ndarray, seam: int) -> np.ndarray:
    """Return the rows from `seam` on that `others` lacks."""
    return np.setdiff1d(these[these >= seam], others)


def _add_rows(by_kind: dict[str, dict], found: BarFinding, new: np.ndarray, counted: int) -> None:
    shown, before = [int(row) for row in new[:SHOWN_ROWS]], by_kind.get(found.kind)
    one = {"kind": found.kind, "severity": found.severity, "count": len(new), "which": format_row_ranges(new)}
    if before is None:
        message = f"{found.message} (counted over the last {counted:,} bars)"
        by_kind[found.kind] = one | {"rows": shown, "message": message, "added": 0}
        return
    added = before.get("added", 0) + len(new)
    one["count"] += before["count"]
    one["which"] = _join_ranges(before["which"], one["which"])
    one["rows"] = (before["rows"] + shown)[:SHOWN_ROWS]
    one["message"] = before["message"].partition(_SINCE)[0] + _SINCE + pluralize_count(added, "row")
    by_kind[found.kind] = one | {"added": added}


def _remove_rows(by_kind: dict[str, dict], kind: str, gone: np.ndarray) -> None:
    """Remove rows that are no longer of this kind, given the bars after them."""
    if not len(gone) or kind not in by_kind:
        return
    one = by_kind[kind]
    rows = [row for row in one["rows"] if row not in gone]
    left = {"count": one["count"] - len(gone), "rows": rows, "which": _remove_from_ranges(one["which"], gone)}
    by_kind[kind] = one | left
    if not left["count"]:
        del by_kind[kind]


def _join_ranges(before: str, new: str) -> str:
    """Return the union of both ranges as text; a shortened one stays shortened."""
    if before.endswith("..."):
        return before
    cut_short = new.endswith("...")
    spans = sorted(_parse_ranges(before) + _parse_ranges(new.removesuffix(", ...")))
    joined = spans[:1]
    for first, last in spans[1:]:
        if first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in joined[:SHOWN_RANGES]]
    return ", ".join(shown + ["..."] * (cut_short or len(joined) > SHOWN_RANGES))


def _remove_from_ranges(which: str, gone: np.ndarray) -> str:
    """Return the ranges as text without these late rows; unchanged where the text is shortened."""
    if which.endswith("..."):
        return which
    early = [(first, min(last, gone[0] - 1)) for first, last in _parse_ranges(which) if first < gone[0]]
    late = [np.arange(max(first, gone[0]), last + 1) for first, last in _parse_ranges(which) if last >= gone[0]]
    kept = format_row_ranges(np.setdiff1d(np.concatenate([_NO_ROWS, *late]), gone))
    return _join_ranges(", ".join(f"{first}-{last}" for first, last in early), kept)


def _parse_ranges(which: str) -> list[tuple[int, int]]:
    """Parse the text of `format_row_ranges` to (first, last) of each range."""
    edges = [[int(edge) for edge in span.split("-")] for span in which.split(", ") if span]
    return [(span[0], span[-1]) for span in edges]
