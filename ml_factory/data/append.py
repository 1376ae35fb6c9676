"""Bars that continue checked bars: only the new ones are checked, behind the old ones that detectors look back on.

What is refused is what a check of the whole file refuses. The report goes on: what is strange about a new bar is told
by the market's habit in the last `LOOK_BACK` bars before it, where a check of the whole file takes that of the file,
so the two may name other bars. Nothing but the report reads it.
"""

import numpy as np
import pandas as pd

from ml_factory.data.prefix_hash import PrefixHasher
from ml_factory.data.report import BarReport, Finding, count_of, row_ranges
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import FEW_BARS, PRICES, BarSpec, check_bars
from ml_factory.errors import BarsError

LOOK_BACK = 20_000  # bars; detectors look at 720 on each side, and at habits of days
SEAM = 7 * 1440  # bars before the new ones whose report these may change: a clock is judged by the week
SHOWN_ROWS, SHOWN_RANGES = 20, 4
_NONE = np.empty(0, np.int64)
_SINCE = "; in bars added since: "


def as_canonical(table: pd.DataFrame) -> pd.DataFrame | None:
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


def check_appended(prefixes: PrefixHasher, old: int, told: dict, market: MarketSpec) -> dict | None:
    """The report on all bars, as `BarReport.to_dict`, of which the first `old` were checked and `told` is the report.

    prefixes : of the bars of `as_canonical`. None where new ones are to be mapped or refused: a check of all says why.
    """
    bars, low = prefixes.bars, max(0, old - LOOK_BACK)
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
        "fingerprint": prefixes.whole,
        "facts": _facts(told["facts"], before.facts, after.facts),
        "findings": _findings(told["findings"], before, after, low, old, len(bars)),
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


def _findings(told: list[dict], before: BarReport, after: BarReport, low: int, old: int, rows: int) -> list[dict]:
    """Each kind once: what was told of it, and the rows among the new bars, and those just before that only they show.

    before, after : of the bars from `low` on, without the new ones and with them. A last bar far from the others is a
    move that stays, until the next one tells that it was a spike.
    """
    merged = {one["kind"]: one for one in told if one["kind"] != "few_bars" or rows < FEW_BARS}
    seam = old - SEAM
    then = {found.kind: found.rows + low for found in before.findings}
    for found in after.findings:
        now, known = found.rows + low, then.pop(found.kind, _NONE)
        _take_out(merged, found.kind, _near(known, now, seam))
        new = np.union1d(now[now >= old], _near(now[now < old], known, seam))
        if len(new):
            _put_in(merged, found, new, rows - low)
    for kind, known in then.items():
        _take_out(merged, kind, _near(known, _NONE, seam))
    return list(merged.values())


def _near(these: np.ndarray, others: np.ndarray, seam: int) -> np.ndarray:
    """Those from `seam` on that the others do not have."""
    return np.setdiff1d(these[these >= seam], others)


def _put_in(merged: dict[str, dict], found: Finding, new: np.ndarray, counted: int) -> None:
    shown, before = [int(row) for row in new[:SHOWN_ROWS]], merged.get(found.kind)
    one = {"kind": found.kind, "severity": found.severity, "count": len(new), "which": row_ranges(new)}
    if before is None:
        message = f"{found.message} (counted over the last {counted:,} bars)"
        merged[found.kind] = one | {"rows": shown, "message": message, "added": 0}
        return
    added = before.get("added", 0) + len(new)
    one["count"] += before["count"]
    one["which"] = _ranges(before["which"], one["which"])
    one["rows"] = (before["rows"] + shown)[:SHOWN_ROWS]
    one["message"] = before["message"].partition(_SINCE)[0] + _SINCE + count_of(added, "row")
    merged[found.kind] = one | {"added": added}


def _take_out(merged: dict[str, dict], kind: str, gone: np.ndarray) -> None:
    """Rows that are none of this kind any more, now that what follows them is known."""
    if not len(gone) or kind not in merged:
        return
    one = merged[kind]
    rows = [row for row in one["rows"] if row not in gone]
    left = {"count": one["count"] - len(gone), "rows": rows, "which": _without(one["which"], gone)}
    merged[kind] = one | left
    if not left["count"]:
        del merged[kind]


def _ranges(before: str, new: str) -> str:
    """The rows of both in words; where some are left out already, those that come later are too."""
    if before.endswith("..."):
        return before
    cut_short = new.endswith("...")
    spans = sorted(_spans(before) + _spans(new.removesuffix(", ...")))
    joined = spans[:1]
    for first, last in spans[1:]:
        if first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in joined[:SHOWN_RANGES]]
    return ", ".join(shown + ["..."] * (cut_short or len(joined) > SHOWN_RANGES))


def _without(which: str, gone: np.ndarray) -> str:
    """The rows in words, but for these late ones; unchanged where late rows are not named."""
    if which.endswith("..."):
        return which
    early = [(first, min(last, gone[0] - 1)) for first, last in _spans(which) if first < gone[0]]
    late = [np.arange(max(first, gone[0]), last + 1) for first, last in _spans(which) if last >= gone[0]]
    kept = row_ranges(np.setdiff1d(np.concatenate([_NONE, *late]), gone))
    return _ranges(", ".join(f"{first}-{last}" for first, last in early), kept)


def _spans(which: str) -> list[tuple[int, int]]:
    """(first, last) of each stretch that `row_ranges` named."""
    edges = [[int(edge) for edge in span.split("-")] for span in which.split(", ") if span]
    return [(span[0], span[-1]) for span in edges]
