"""Bars that continue checked bars: only the new ones are checked, behind the old ones that detectors look back on.

What is refused is what a check of the whole file refuses. The report goes on: what is strange about a new bar is told
by the market's habit in the last `LOOK_BACK` bars before it, where a check of the whole file takes that of the file,
so the two may name other bars. Nothing but the report reads it.
"""

import numpy as np
import pandas as pd

from ml_factory.data.bars import FEW_BARS, PRICES, BarSpec, bars_fingerprint, check_bars
from ml_factory.data.findings import BarReport, count_of, row_ranges
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import BarsError

LOOK_BACK = 20_000  # bars; detectors look at 720 on each side, and at habits of days
SHOWN_ROWS, SHOWN_RANGES = 20, 4
_SINCE = "; in bars added since: "


def plain_bars(table: pd.DataFrame) -> pd.DataFrame | None:
    """The table as checked bars have it, where it is spelt as we write it and nothing need be mapped; else None."""
    named = list(table.columns)
    if named not in (["timestamp", *PRICES], ["timestamp", *PRICES, "volume"]):
        return None
    stamps = table["timestamp"]
    zoned = isinstance(stamps.dtype, pd.DatetimeTZDtype) and str(stamps.dtype.tz) == "UTC"
    if not zoned or any(table[name].dtype.kind not in "iuf" for name in named[1:]):
        return None
    values = {name: table[name].to_numpy(float) for name in named[1:]}
    if "volume" in values and not (np.nan_to_num(values["volume"]) != 0).any():
        del values["volume"]  # empty or zero throughout: left out, as `check_bars` does
    if any(np.isnan(column).any() for column in values.values()):
        return None
    return pd.DataFrame(values, index=pd.DatetimeIndex(stamps, name="timestamp").as_unit("ns"), copy=False)


def check_more(bars: pd.DataFrame, old: int, told: dict, market: MarketSpec) -> dict | None:
    """The report on all bars, as `BarReport.to_dict`, of which the first `old` were checked and `told` is the report.

    bars : of `plain_bars`.  None where the new ones are to be mapped or refused: a check of all says why.
    """
    low = max(0, old - LOOK_BACK)
    try:
        beside, before = check_bars(bars.iloc[low:old].reset_index(), BarSpec(), market=market)
        more, after = check_bars(bars.iloc[low:].reset_index(), BarSpec(), market=market)
    except BarsError:
        return None
    if not (more.equals(bars.iloc[low:]) and len(beside) == old - low):
        return None
    return {
        **told,
        "rows": len(bars),
        "last": bars.index[-1].isoformat(),
        "fingerprint": bars_fingerprint(bars),
        "facts": _facts(told["facts"], before.facts, after.facts),
        "findings": _findings(told["findings"], after, low, old, len(bars)),
    }


def _facts(told: dict, before: dict, after: dict) -> dict:
    """The figures of all bars: those told, and what the new bars add to those of the bars just before them."""
    facts = dict(told)
    for name in ("sessions", "absent_minutes", "open_minutes"):
        facts[name] = told[name] + after[name] - before[name]
    facts["absent_share"] = round(facts["absent_minutes"] / max(facts["open_minutes"], 1), 6)
    gaps = {kind: after["gaps"].get(kind, 0) - before["gaps"].get(kind, 0) for kind in after["gaps"]}
    both = {kind: told["gaps"].get(kind, 0) + gaps.get(kind, 0) for kind in (told["gaps"] | gaps)}
    return facts | {"gaps": both}


def _findings(told: list[dict], after: BarReport, low: int, old: int, rows: int) -> list[dict]:
    """Each kind once: what was told of it, and the rows among the new bars."""
    merged = {one["kind"]: one for one in told if one["kind"] != "few_bars" or rows < FEW_BARS}
    for found in after.findings:
        new = found.rows[found.rows + low >= old] + low
        if not len(new):
            continue
        shown, before = [int(row) for row in new[:SHOWN_ROWS]], merged.get(found.kind)
        one = {"kind": found.kind, "severity": found.severity, "count": len(new), "which": row_ranges(new)}
        if before is None:
            message = f"{found.message} (counted over the last {rows - low:,} bars)"
            merged[found.kind] = one | {"rows": shown, "message": message, "added": 0}
            continue
        added = before.get("added", 0) + len(new)
        one["count"] += before["count"]
        one["which"] = _ranges(before["which"], one["which"])
        one["rows"] = (before["rows"] + shown)[:SHOWN_ROWS]
        one["message"] = before["message"].partition(_SINCE)[0] + _SINCE + count_of(added, "row")
        merged[found.kind] = one | {"added": added}
    return list(merged.values())


def _ranges(before: str, new: str) -> str:
    spans = [span for span in before.split(", ") + new.split(", ") if span]
    return ", ".join(spans if len(spans) <= SHOWN_RANGES else [*spans[:SHOWN_RANGES], "..."])
