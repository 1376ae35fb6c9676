"""What is strange about bars that keep the contract: reported, never repaired.

Every detector compares bars with their own market's habit (its calendar, tick, usual move, usual silence), so none
knows a symbol or a file. Real markets do most of these things sometimes; the report says how often and where.

The report may look at the whole file, also ahead of a bar: it is made to be read by people. Nothing downstream
reads it, so no feature or label can learn from it.

What one detector finds is put right for those that look after it (the clock, then the unit, then the level), so
that one fault is told once. The bars themselves stay as they are.
"""

import numpy as np

from ml_factory.data.gaps import LEGAL, Gaps, find_gaps, gap_findings
from ml_factory.data.level_shifts import find_levels, level_findings
from ml_factory.data.report import Finding
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, sessions_of
from ml_factory.data.spikes import find_spikes
from ml_factory.data.stale_prices import find_repeats
from ml_factory.data.tick_grid import find_off_tick
from ml_factory.data.time_zone_check import clock_findings, clock_shifts

BESIDE_BARS = 5  # bars at most this far apart are neighbours


def find_blemishes(
    start_ns: np.ndarray,
    prices: dict[str, np.ndarray],
    volume: np.ndarray | None,
    market: MarketSpec,
    minutes: int,
    stamp: str,
) -> tuple[list[Finding], dict]:
    """Findings (rows are positions in `start_ns`) and figures about the whole.

    start_ns : int64[N], increasing. prices : open, high, low, close, float64[N], checked.
    volume : float64[N] with NaN where unknown, or None.
    """
    if not len(start_ns):
        return [], {}
    shift = clock_shifts(start_ns, sessions_of(start_ns, market.calendar), market.calendar, minutes)
    mended = start_ns + shift * MINUTE_NS
    sessions = sessions_of(mended, market.calendar)
    gaps = find_gaps(mended, sessions, market.calendar, minutes)
    edge = sessions.edges()
    beside = follow_closely(mended, edge, minutes)
    log = {name: np.log(values) for name, values in prices.items()}
    levels = find_levels(log, beside, edge)
    findings = [
        *gap_findings(gaps, mended, minutes),
        *clock_findings(start_ns, shift, sessions, market, minutes, stamp),
        *level_findings(levels, log),
    ]
    if levels.unit.any():
        log = {name: values - levels.unit * np.log(10.0) for name, values in log.items()}
    repeats = list(find_repeats(prices, volume, beside))
    joined = beside.copy()
    joined[levels.roll] = joined[levels.adjustment] = False
    for stale in (found.rows for found in repeats if found.kind == "stale_run"):
        joined[stale] = joined[np.minimum(stale + 1, len(joined) - 1)] = False  # the price catches up after it
    findings += [
        *find_spikes(log, joined, edge, sessions.id, minutes),
        *repeats,
        *find_off_tick(prices, levels.unit, sessions.id, market.tick),
    ]
    return merge_kinds(findings), _facts(gaps, sessions.inside, sessions.id, minutes)


def follow_closely(start_ns: np.ndarray, edge: np.ndarray, minutes: int) -> np.ndarray:
    """bool[N]: the bar comes a few bars' time after its predecessor, in the same session."""
    step = np.diff(start_ns) // (minutes * MINUTE_NS)
    beside = np.zeros(len(start_ns), bool)
    beside[1:] = (step <= BESIDE_BARS) & (~edge[1:] | (step == 1))  # midnight parts no 24-hour market
    return beside


def merge_kinds(findings: list[Finding]) -> list[Finding]:
    """One finding a kind: a change of adjustment may show in the level and in the tick."""
    merged: dict[str, Finding] = {}
    for found in findings:
        other = merged.get(found.kind)
        if other is not None:
            rows = np.union1d(other.rows, found.rows)
            found = Finding(found.kind, found.severity, rows, f"{other.message}; {found.message}", other.next_step)
        merged[found.kind] = found
    return list(merged.values())


def _facts(gaps: Gaps, inside: np.ndarray, day: np.ndarray, minutes: int) -> dict:
    """Sessions with bars, minutes the calendar calls open and those of them that have no bar, and gaps by kind."""
    halts = (gaps.kind == "session") & (gaps.open == gaps.length)  # open by the calendar, closed by habit
    absent = int(gaps.open[~halts].sum())
    total = absent + int(inside.sum()) * minutes
    return {
        "sessions": len(np.unique(day[inside])),
        "absent_minutes": absent,
        "open_minutes": total,
        "absent_share": round(absent / total, 6) if total else 0.0,
        "gaps": {kind: int((gaps.kind == kind).sum()) for kind in LEGAL if (gaps.kind == kind).any()},
    }
