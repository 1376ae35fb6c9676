"""What is strange about bars that keep the contract: reported, never repaired.

Every detector compares bars with their own market's habit (its calendar, tick, usual minute), so none knows a
symbol or a file. Real markets do most of these things sometimes; the report says how often and where.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ml_factory.data.findings import Finding
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, Sessions, session_days, sessions_of

_NONE = np.empty(0, np.int64)
SPIKE_TIMES = 25.0  # a move this many times the usual minute; NQ has 30 in 700,000, index futures on news days
STALE_BARS = 15  # this many equal flat bars in a row; the longest in a year of real BTC is 13
SPARSE_SHARE = 0.25  # more absent minutes than this; real BTC of 2017 misses 4 %
VIOLENT_RETURN, VIOLENT_SHARE = 0.10, 0.002  # 10 % within a minute, twice in a thousand; crashes of 2013: 0.0008
SHIFT_HOURS = range(-14, 15)


def find_blemishes(
    start_ns: np.ndarray, prices: dict[str, np.ndarray], market: MarketSpec, minutes: int, stamp: str
) -> tuple[list[Finding], dict]:
    """Findings (rows are positions in `start_ns`) and figures about the whole.

    start_ns : int64[N], increasing. prices : open, high, low, close, float64[N], checked.
    """
    if not len(start_ns):
        return [], {}
    sessions = sessions_of(start_ns, market.calendar)
    contiguous = np.zeros(len(start_ns), bool)
    contiguous[1:] = (np.diff(start_ns) <= 5 * minutes * MINUTE_NS) & ~sessions.edges()[1:]
    findings, facts = _gaps(start_ns, sessions, market, minutes)
    findings += [
        *_clock(start_ns, sessions, market, minutes, stamp),
        *_spikes(prices, contiguous, minutes),
        *_stale(prices, contiguous),
        *_ticks(prices, sessions, market),
    ]
    return findings, facts


def _gaps(start_ns: np.ndarray, sessions: Sessions, market: MarketSpec, minutes: int) -> tuple[list[Finding], dict]:
    """Holes (silences of more than `hole_minutes` while the market was open) and the share of absent minutes."""
    kept = np.flatnonzero(sessions.inside)
    row, silence = _silences(start_ns[kept], sessions, market.calendar, minutes)
    open_minutes = int(silence.sum()) + len(kept) * minutes
    share = float(silence.sum()) / open_minutes if open_minutes else 0.0
    facts = {"sessions": len(np.unique(sessions.id[kept])), "absent_minutes": int(silence.sum())}
    facts["absent_share"] = round(share, 6)
    row = kept[row]
    hole = silence > market.hole_minutes
    findings = []
    if hole.any():
        worst = int(np.argmax(silence))
        at = pd.Timestamp(start_ns[row[worst]], tz="UTC")
        message = f"{int(hole.sum())} holes of more than {market.hole_minutes} min while the market was open, "
        message += f"{int(silence[hole].sum()):,} min in all; the longest, of {int(silence[worst]):,} min, ends at {at}"
        findings.append(Finding("hole", "reported", row[hole], message))
        findings += _paging(start_ns, row[hole])
    if share > SPARSE_SHARE:
        message = f"{share:.0%} of the market's open minutes have no bar"
        findings.append(Finding("sparse", "reported", _NONE, message))
    return findings, facts


def _silences(start_ns: np.ndarray, sessions: Sessions, calendar: str, minutes: int) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of open time without a bar: the row after each, and its open minutes.

    Between bars of one session it is the time between them. Across sessions it is the rest of the first (until its
    scheduled close), the sessions without any bar that the exchange did hold, and the beginning of the second.
    `start_ns` are the bars inside sessions.
    """
    kept = sessions.inside
    ids, opens, closes = sessions.id[kept], sessions.open_ns[kept], sessions.close_ns[kept]
    if len(ids) < 2:
        return _NONE, _NONE
    end_ns = start_ns + minutes * MINUTE_NS
    days, day_minutes = session_days(calendar, int(ids[0]), int(ids[-1]))
    held = np.isin(ids, days)
    same = np.diff(ids) == 0
    silence = np.zeros(len(ids), np.int64)  # by the row after it
    inner = np.flatnonzero(same & (closes[1:] == closes[:-1]))
    silence[inner + 1] = start_ns[inner + 1] - end_ns[inner]
    last = np.flatnonzero(~same)
    first_close = np.minimum.reduceat(closes, np.append(0, last + 1))[:-1]  # the early one, where there is one
    tail = held[last] & (closes[last] == first_close)
    silence[last[tail] + 1] += closes[last[tail]] - end_ns[last[tail]]
    head = last[held[last + 1]] + 1
    silence[head] += start_ns[head] - opens[head]
    silence //= MINUTE_NS
    absent = np.setdiff1d(days, ids)
    np.add.at(silence, np.searchsorted(ids, absent), day_minutes[np.searchsorted(days, absent)])
    row = np.flatnonzero(silence > 0)
    return row, silence[row]


def _paging(start_ns: np.ndarray, rows: np.ndarray) -> Iterator[Finding]:
    """A download that kept only the first part of each page leaves holes of one length at one distance."""
    if len(rows) < 20:
        return
    lengths = (start_ns[rows] - start_ns[rows - 1]) // MINUTE_NS
    runs = np.diff(rows)
    length, kept = np.median(lengths), np.median(runs)
    if (lengths == length).mean() > 0.9 and (runs == kept).mean() > 0.9:
        message = f"{len(rows)} holes of {length - 1:.0f} min, each after {kept:.0f} bars: "
        message += "a download kept only a part of each page"
        yield Finding("paging", "reported", rows, message)


def _clock(start_ns: np.ndarray, sessions: Sessions, market: MarketSpec, minutes: int, stamp: str) -> Iterator[Finding]:
    """Bars when the calendar says closed, and what would explain them: another zone, or stamps at the bar's end."""
    outside = np.flatnonzero(~sessions.inside)
    if market.calendar == "24h":
        return
    if len(outside):
        share = len(outside) / len(start_ns)
        message = (
            f"{len(outside):,} bars ({share:.2%}) outside the {market.calendar} sessions are left out of all frames"
        )
        yield Finding("outside_session", "reported", outside, message)
        hours = _better_shift(start_ns, market.calendar) if share > 0.005 else 0
        if hours:
            message = (
                f"the clock looks mislabelled: {hours:+d} h would put the bars into the {market.calendar} sessions"
            )
            yield Finding("zone", "reported", _NONE, message)
    yield from _stamp_side(start_ns, sessions, minutes, stamp)


def _better_shift(start_ns: np.ndarray, calendar: str) -> int:
    """Hours to add so that (almost) no bar stands outside the sessions, or 0 if no shift is clearly better."""
    sample = start_ns[:: max(1, len(start_ns) // 20_000)]
    outside = {h: 1 - sessions_of(sample + h * 60 * MINUTE_NS, calendar).inside.mean() for h in SHIFT_HOURS}
    best = min(outside, key=lambda h: (round(outside[h], 4), abs(h)))
    return best if outside[best] < 0.25 * outside[0] else 0


def _stamp_side(start_ns: np.ndarray, sessions: Sessions, minutes: int, stamp: str) -> Iterator[Finding]:
    """End stamps put a bar on the close and none on the open; start stamps read as ends do the reverse."""
    days = np.unique(sessions.id)
    step = minutes * MINUTE_NS
    offset_open, offset_close = start_ns - sessions.open_ns, start_ns - sessions.close_ns
    marks = {
        "open": offset_open == 0,
        "close": offset_close == 0,
        "last": offset_close == -step,
    }
    seen = {name: len(np.unique(sessions.id[mask])) / len(days) for name, mask in marks.items()}
    before = np.isin(start_ns + step, np.unique(sessions.open_ns)).sum() / len(days)
    if len(days) >= 3 and seen["close"] > 0.5 and seen["open"] < 0.1:
        message = "bars stand on the session's close and none on its open: they look stamped at their end, "
        message += "and then every one is known a bar later than it says: give stamp='end' (--stamp end)"
        yield Finding(
            "stamp_side", "reported", np.flatnonzero(marks["close"]), message, "give stamp='end' (--stamp end)"
        )
    if stamp == "end" and len(days) >= 3 and before > 0.5 and seen["last"] < 0.1:
        message = "read as end-stamped, bars begin before the session's open and none reaches its close: they look "
        yield Finding("stamp_side", "reported", _NONE, message + "stamped at their start: give stamp='start'")


def _spikes(prices: dict[str, np.ndarray], contiguous: np.ndarray, minutes: int) -> Iterator[Finding]:
    """Moves far beyond the usual minute, and the share of them that came straight back."""
    close, high, low = (np.log(prices[name]) for name in ("close", "high", "low"))
    before = np.concatenate([close[:1], close[:-1]])
    after = np.concatenate([close[1:], close[-1:]])
    move = np.where(contiguous, np.abs(close - before), 0.0)
    usual = pd.Series(move).rolling(1441, center=True, min_periods=1).mean().to_numpy()
    reach = np.where(contiguous, np.maximum(high - before, before - low), 0.0)
    spike = np.flatnonzero(reach > SPIKE_TIMES * np.maximum(usual, 1e-12))
    if len(spike):
        kept = np.abs(after[spike] - before[spike])
        back = int((kept < 0.2 * reach[spike]).sum())
        worst = float(np.expm1(reach[spike].max()))
        message = f"{len(spike)} bars move more than {SPIKE_TIMES:.0f} times the usual bar (up to {worst:.1%}), "
        yield Finding("spike", "reported", spike, message + f"{back} of them come straight back")
    violent = np.flatnonzero(move > VIOLENT_RETURN)
    if minutes <= 5 and len(violent) > max(10, VIOLENT_SHARE * len(move)):
        message = f"{len(violent)} bars close more than {VIOLENT_RETURN:.0%} away from the one before (up to "
        message += f"{np.expm1(move.max()):.0%}): prices like these come from a test network or a broken feed"
        yield Finding("not_a_market", "reported", violent, message)


def _stale(prices: dict[str, np.ndarray], contiguous: np.ndarray) -> Iterator[Finding]:
    """Long runs of equal flat bars: the feed repeats its last price."""
    close = prices["close"]
    flat = (prices["high"] == prices["low"]) & (prices["open"] == close) & contiguous
    flat[1:] &= close[1:] == close[:-1]
    edge = np.diff(np.concatenate([[False], flat, [False]]).astype(np.int8))
    begin, end = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    long = end - begin >= STALE_BARS
    if long.any():
        rows = np.concatenate([np.arange(b, e) for b, e in zip(begin[long], end[long], strict=True)])
        longest = int((end - begin).max())
        message = f"{int(long.sum())} runs of {STALE_BARS} or more bars that repeat one price, the longest of {longest}"
        yield Finding("stale", "reported", rows, message)


def _ticks(prices: dict[str, np.ndarray], sessions: Sessions, market: MarketSpec) -> Iterator[Finding]:
    """Prices between ticks, and a change from sessions on tick to sessions off tick (another adjustment)."""
    if market.tick is None:
        return
    off = np.zeros(len(sessions.id), bool)
    for values in prices.values():
        steps = values / market.tick
        off |= np.abs(steps - np.round(steps)) > 1e-3
    if not off.any():
        return
    rows = np.flatnonzero(off)
    message = f"{len(rows):,} bars ({off.mean():.2%}) hold prices off the tick of {market.tick:g}"
    message += ", as ratio back-adjusted series do" if off.mean() > 0.9 else ""
    yield Finding("off_tick", "reported", rows, message)
    _, first, count = np.unique(sessions.id, return_index=True, return_counts=True)
    share = np.add.reduceat(off.astype(float), first) / count
    kind = np.where(share < 0.05, 0, np.where(share > 0.5, 1, -1))
    clear = np.flatnonzero(kind >= 0)
    turn = clear[1:][np.diff(kind[clear]) != 0]
    if len(turn) and len(turn) <= 20 and (kind[clear] == 1).sum() >= 3:
        message = (
            f"sessions change between on and off the tick {len(turn)} times: the adjustment of prices changes there"
        )
        yield Finding("regime", "reported", first[turn], message)
