"""Gaps between bars, each with its single reason.

A gap is a place where the next bar does not begin when the last one ends; it is named by the row after it. The calendar
gives the minutes in which the market was open; the market's own frequency of silences decides how many of these may
pass without a trade. Only the report uses the result.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarFinding, pluralize_count
from ml_factory.data.price_anomalies import run_length_surprisal
from ml_factory.data.sessions import (
    DAY_NS,
    MINUTE_NS,
    TRADING_HOURS,
    ExchangeSessions,
    assign_sessions,
    scheduled_session_days,
    scheduled_session_pauses,
)

LEGAL = ("session", "weekend", "holiday", "early_close", "no_trade")
KINDS = (*LEGAL, "missing", "download_hole")
MISSING_NATS = 60.0  # a silence less likely than exp(-60) given this market's silences is missing data
LARGE_SHARE = 0.5  # of a session's open minutes: not a trading pause, a part of the file is absent
PAGES = 4  # this many holes of equal length and distance are pages of a download
PAGE_TOLERANCE = 0.05
HALT_SHARE, HALT_DAYS = 0.5, 10  # a pause at one time of day on most days, and on ten at least, is a halt
SPARSE_SHARE = 0.25  # more absent minutes than this, holes apart
_NO_ROWS = np.empty(0, np.int64)
_WORDS = {
    "session": "over the daily close or a scheduled pause",
    "weekend": "over a weekend",
    "holiday": "over a day on which the exchange is closed",
    "early_close": "after an early close",
    "no_trade": "of {open} min in all without a trade, as this market has them",
}


@dataclass(frozen=True)
class Gaps:
    """The G gaps of a file.

    row : int64[G], the bar after each gap
    length : int64[G], minutes
    open : int64[G], minutes of the gap in which the market is open by the calendar
    score : float64[G], surprisal of the open minutes in nats (`run_length_surprisal`)
    kind : str[G], one of KINDS
    paged : bool[G], part of a series of holes of equal length and distance
    """

    row: np.ndarray
    length: np.ndarray
    open: np.ndarray
    score: np.ndarray
    kind: np.ndarray
    paged: np.ndarray


def find_gaps(start_ns: np.ndarray, sessions: ExchangeSessions, calendar: str, minutes: int) -> Gaps:
    """Find every gap of the bars (int64 ns, increasing) and its kind."""
    row = np.flatnonzero(np.diff(start_ns) > minutes * MINUTE_NS) + 1
    begin, end = start_ns[row - 1] + minutes * MINUTE_NS, start_ns[row]
    hours = _calendar_spans(calendar, sessions, start_ns, minutes)
    opened, weekend, holiday, early = (_overlap(*spans, begin, end) for spans in hours)
    opened = opened - _overlap(
        *scheduled_session_pauses(calendar, int(sessions.id[0]) - 1, int(sessions.id[-1]) + 1), begin, end
    )
    at = _overlap(*hours[0], np.full(len(row), start_ns[0]), begin)  # open minutes since the file's first bar
    length = (end - begin) // MINUTE_NS
    silent = opened > 0

    def surprisals(excluded: np.ndarray) -> np.ndarray:
        found = np.zeros(len(row))
        found[silent] = run_length_surprisal(row[silent], opened[silent] // minutes, len(start_ns), excluded[silent])
        return found

    halt = _daily_halts(begin, row, opened == length, sessions)
    usual = np.median(scheduled_session_days(calendar, int(sessions.id[0]) - 7, int(sessions.id[-1]) + 7)[1])
    paged = np.zeros(len(row), bool)
    absent = (surprisals(paged) > MISSING_NATS) & ~halt
    paged[absent] = _paged(at[absent], opened[absent])
    score = surprisals(paged)  # holes of a download are no silences of the market and excuse no other gap
    absent = (score > MISSING_NATS) & ~halt
    kind = np.select(
        [absent & (paged | (opened >= LARGE_SHARE * usual)), absent, holiday > 0, early > 0, weekend > 0, halt],
        ["download_hole", "missing", "holiday", "early_close", "weekend", "session"],
        default=np.where(opened < length, "session", "no_trade"),
    )
    return Gaps(row, length, opened, score, kind, paged)


def gap_findings(gaps: Gaps, start_ns: np.ndarray, minutes: int) -> list[BarFinding]:
    """Return one finding for each kind: expected gaps as "info", absent data as "reported"."""
    findings = []
    for kind in KINDS:
        of_kind = gaps.kind == kind
        if not of_kind.any():
            continue
        if kind in LEGAL:
            minutes_open = f"{int(gaps.open[of_kind].sum()):,}"
            message = f"{pluralize_count(int(of_kind.sum()), 'gap')} {_WORDS[kind].format(open=minutes_open)}"
            findings.append(BarFinding(kind, "info", gaps.row[of_kind], message))
        else:
            findings.append(BarFinding(kind, "reported", gaps.row[of_kind], _absence(gaps, of_kind, kind, start_ns)))
    thin = np.isin(gaps.kind, ("no_trade", "missing"))
    silent = int(gaps.open[thin].sum())
    share = silent / (silent + len(start_ns) * minutes)
    if share > SPARSE_SHARE:
        message = f"{share:.0%} of the market's open minutes have no bar, holes apart"
        findings.append(BarFinding("sparse", "reported", _NO_ROWS, message))
    return findings


def _absence(gaps: Gaps, of_kind: np.ndarray, kind: str, start_ns: np.ndarray) -> str:
    rows, opened = gaps.row[of_kind], gaps.open[of_kind]
    worst = int(np.argmax(opened))
    at = pd.Timestamp(start_ns[rows[worst]], tz="UTC")
    many = len(rows) > 1
    what = pluralize_count(len(rows), "hole" if kind == "download_hole" else "silence")
    message = what + (" in the file" if kind == "download_hole" else " longer than this market's own")
    message += f", {int(opened.sum()):,} min of trading" + (" in all" if many else "")
    message += f"; the longest, of {int(opened[worst]):,} min, ends at {at}" if many else f", until {at}"
    paged = gaps.paged & of_kind
    if paged.any():
        message += f"; {int(paged.sum())} of them have one length ({int(np.median(gaps.open[paged])):,} min) and one "
        message += "distance: a download kept only a part of each page"
    return message


def _calendar_spans(
    calendar: str, sessions: ExchangeSessions, start_ns: np.ndarray, minutes: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return spans (begin, end; int64 ns, increasing): open, weekend, full holiday, and after an early close.

    A closed day on which the market traded all the same (a Good Friday with a short session, a day of mourning) counts
    as open from its first bar to its last.
    """
    first, last = int(sessions.id[0]) - 1, int(sessions.id[-1]) + 1
    days = np.arange(first, last + 1)
    day = assign_sessions(days * DAY_NS + 15 * 60 * MINUTE_NS, calendar)  # 9 or 10 in Chicago: before any early close
    held_days, open_minutes = scheduled_session_days(calendar, first, last)
    held = np.isin(days, held_days)
    closes = day.open_ns[held] + open_minutes * MINUTE_NS
    _, open_minute, close_minute = TRADING_HOURS[calendar]
    regular = np.maximum(closes, day.open_ns[held] + (close_minute - open_minute) * MINUTE_NS)
    short = regular > closes
    weekday = (days + 3) % 7 < 5  # day 0 was a Thursday
    off = ~held & weekday
    began, ended = day.open_ns.copy(), day.open_ns.copy()  # of the trading on days closed by the calendar
    inside = np.flatnonzero(sessions.inside)
    traded, at, count = np.unique(sessions.id[inside], return_index=True, return_counts=True)
    began[traded - first] = start_ns[inside[at]]
    ended[traded - first] = start_ns[inside[at + count - 1]] + minutes * MINUTE_NS
    return (
        _merge_spans(day.open_ns[held], closes, began[off], ended[off]),
        (day.open_ns[~held & ~weekday], day.close_ns[~held & ~weekday]),
        _merge_spans(day.open_ns[off], began[off], ended[off], day.close_ns[off]),
        (closes[short], regular[short]),
    )


def _merge_spans(begin: np.ndarray, end: np.ndarray, more_begin: np.ndarray, more_end: np.ndarray):
    order = np.argsort(np.concatenate([begin, more_begin]), kind="stable")
    return np.concatenate([begin, more_begin])[order], np.concatenate([end, more_end])[order]


def _overlap(begin: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return int64[G]: minutes of [since, until) within the spans, which increase and do not touch."""
    if not len(begin):
        return np.zeros(len(since), np.int64)
    before = np.concatenate([[0], np.cumsum(end - begin)])

    def elapsed(moment: np.ndarray) -> np.ndarray:
        k = np.searchsorted(begin, moment, side="right")
        inside = np.minimum(moment, end[k - 1]) - begin[k - 1]
        return np.where(k > 0, before[k - 1] + inside, 0)

    return (elapsed(until) - elapsed(since)) // MINUTE_NS


def _daily_halts(begin: np.ndarray, row: np.ndarray, within: np.ndarray, sessions: ExchangeSessions) -> np.ndarray:
    """Return bool[G]: gaps that begin at the same minute of most sessions between their first and last time."""
    day = sessions.id[row - 1]
    minute = np.where(within, (begin - sessions.open_ns[row - 1]) // MINUTE_NS, -1)
    halt = np.zeros(len(row), bool)
    present = np.unique(sessions.id)
    offsets, times = np.unique(minute[within], return_counts=True)
    for offset in offsets[times >= HALT_DAYS].tolist():
        of_kind = np.flatnonzero(minute == offset)
        since, until = np.searchsorted(present, (day[of_kind[0]], day[of_kind[-1]] + 1))
        halt[of_kind] = len(of_kind) >= HALT_SHARE * (until - since)
    return halt


def _paged(at: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return bool: holes that belong to at least PAGES consecutive ones of equal length and distance.

    at : int64, open minutes before each hole, increasing
    length : int64, open minutes of each hole
    """
    distance = np.diff(at)
    paged = np.zeros(len(at), bool)
    similar = np.abs(np.diff(length)) <= PAGE_TOLERANCE * length[1:]
    even = np.zeros(len(at), bool)  # hole k stands as far from k-1 as k+1 stands from it, and all three are as long
    even[1:-1] = similar[1:] & similar[:-1] & (np.abs(np.diff(distance)) <= PAGE_TOLERANCE * distance[1:])
    edge = np.flatnonzero(np.diff(np.concatenate([[False], even, [False]]).astype(np.int8)))
    for first, after in zip(edge[::2].tolist(), edge[1::2].tolist(), strict=True):
        if after - first + 2 >= PAGES:
            paged[first - 1 : after + 1] = True
    return paged
