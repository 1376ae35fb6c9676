"""Data-quality checks of bars that are valid: reported, never repaired.

Every detector compares bars with their own market (its calendar, tick, typical move, typical silence); none holds a
constant of one symbol or file. Real markets do most of these things sometimes; the report lists how often and where.

The checks may use the whole file, also bars after a row: the report is made for people. Nothing downstream reads it, so
no feature or label can learn from it.

A fault that one detector finds is corrected for the next ones (first the time zone, then the unit, then the level), so
that it is reported once. The bars themselves are not changed.
"""

import numpy as np

from ml_factory.data.bar_report import BarFinding
from ml_factory.data.gaps import LEGAL, Gaps, find_gaps, gap_findings
from ml_factory.data.level_shifts import find_level_shifts, level_shift_findings
from ml_factory.data.price_anomalies import find_off_tick_prices, find_price_spikes, find_stale_prices
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, assign_sessions
from ml_factory.data.time_zone_check import infer_time_zone_shifts, time_zone_findings

ADJACENT_BARS = 5  # bars at most this far apart are neighbours


def find_quality_issues(
    start_ns: np.ndarray,
    prices: dict[str, np.ndarray],
    volume: np.ndarray | None,
    market: MarketSpec,
    minutes: int,
    stamp: str,
) -> tuple[list[BarFinding], dict]:
    """Run every detector on checked bars.

    Parameters
    ----------
    start_ns : int64[N], increasing
    prices : open, high, low, close -> float64[N], checked
    volume : float64[N], NaN where unknown; None without volume
    market : calendar and tick
    minutes : length of a bar
    stamp : "start" or "end", as the file was read

    Returns
    -------
    (findings, figures) : rows are positions in `start_ns`; figures about the whole file
    """
    if not len(start_ns):
        return [], {}
    shift = infer_time_zone_shifts(start_ns, assign_sessions(start_ns, market.calendar), market.calendar, minutes)
    corrected = start_ns + shift * MINUTE_NS
    sessions = assign_sessions(corrected, market.calendar)
    gaps = find_gaps(corrected, sessions, market.calendar, minutes)
    edge = sessions.session_start_mask()
    adjacent = adjacent_bars_mask(corrected, edge, minutes)
    log = {name: np.log(values) for name, values in prices.items()}
    levels = find_level_shifts(log, adjacent, edge)
    findings = [
        *gap_findings(gaps, corrected, minutes),
        *time_zone_findings(start_ns, shift, sessions, market, minutes, stamp),
        *level_shift_findings(levels, log),
    ]
    if levels.unit.any():
        log = {name: values - levels.unit * np.log(10.0) for name, values in log.items()}
    repeats = list(find_stale_prices(prices, volume, adjacent))
    joined = adjacent.copy()
    joined[levels.roll] = joined[levels.adjustment] = False
    for stale in (found.rows for found in repeats if found.kind == "stale_run"):
        joined[stale] = joined[np.minimum(stale + 1, len(joined) - 1)] = False  # the price catches up after it
    findings += [
        *find_price_spikes(log, joined, edge, sessions.id, minutes),
        *repeats,
        *find_off_tick_prices(prices, levels.unit, sessions.id, market.tick),
    ]
    return merge_findings_by_kind(findings), _facts(gaps, sessions.inside, sessions.id, minutes)


def adjacent_bars_mask(start_ns: np.ndarray, edge: np.ndarray, minutes: int) -> np.ndarray:
    """Return bool[N]: the bar follows its predecessor within a few bars' time, in the same session."""
    step = np.diff(start_ns) // (minutes * MINUTE_NS)
    adjacent = np.zeros(len(start_ns), bool)
    adjacent[1:] = (step <= ADJACENT_BARS) & (~edge[1:] | (step == 1))  # midnight is no break in a 24-hour market
    return adjacent


def merge_findings_by_kind(findings: list[BarFinding]) -> list[BarFinding]:
    """Merge findings of one kind: a change of adjustment may show in the level and in the tick."""
    merged: dict[str, BarFinding] = {}
    for found in findings:
        other = merged.get(found.kind)
        if other is not None:
            rows = np.union1d(other.rows, found.rows)
            found = BarFinding(found.kind, found.severity, rows, f"{other.message}; {found.message}", other.next_step)
        merged[found.kind] = found
    return list(merged.values())


def _facts(gaps: Gaps, inside: np.ndarray, day: np.ndarray, minutes: int) -> dict:
    """Return figures: sessions with bars, open minutes, open minutes without a bar, and gaps by kind."""
    halts = (gaps.kind == "session") & (gaps.open == gaps.length)  # open by the calendar, closed on most days
    absent = int(gaps.open[~halts].sum())
    total = absent + int(inside.sum()) * minutes
    return {
        "sessions": len(np.unique(day[inside])),
        "absent_minutes": absent,
        "open_minutes": total,
        "absent_share": round(absent / total, 6) if total else 0.0,
        "gaps": {kind: int((gaps.kind == kind).sum()) for kind in LEGAL if (gaps.kind == kind).any()},
    }
