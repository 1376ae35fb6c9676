"""Check the file's clock against the exchange's: a mislabelled zone, bars outside the sessions, start or end stamps.

A week read in the wrong zone, or converted without daylight saving, puts bars into the daily halt and the weekend. The
shift that moves (almost) all of them out again identifies the fault, and the other detectors use the corrected clock,
so that one fault is reported once. A market that never closes shows nothing of this.
"""

from collections.abc import Iterator

import numpy as np

from ml_factory.data.bar_report import BarFinding
from ml_factory.data.sessions import MINUTE_NS, TRADING_HOURS, ExchangeSessions, MarketSpec, assign_sessions

SLOT = 15  # minutes: every zone of the world is a multiple of it away from UTC
SHIFTS = sorted(range(-14 * 60, 14 * 60 + SLOT, SLOT), key=lambda minutes: (abs(minutes), minutes))
OUTSIDE_SHARE = 0.005  # of a week's bars outside the sessions: closing prints are 0.003, an hour's shift 0.04
CORRECTED_SHARE = 0.25  # a shift must leave at most this part of them outside
WEEK_MINUTES = 200  # a week with fewer is no evidence
_WEEK = 7 * 1440 // SLOT
_NO_ROWS = np.empty(0, np.int64)


def infer_time_zone_shifts(start_ns: np.ndarray, sessions: ExchangeSessions, calendar: str, minutes: int) -> np.ndarray:
    """Return int64[N], the minutes to add to each bar's time so that its week fits the sessions; 0 where it fits.

    start_ns : int64 ns, increasing. Weeks are cut in the middle of the weekend; each is checked separately
    """
    zone, open_minute, close_minute = TRADING_HOURS[calendar]
    if zone == "UTC":
        return np.zeros(len(start_ns), np.int64)
    since_open = sessions.id.astype(np.int64) * 1440 + (start_ns - sessions.open_ns) // MINUTE_NS
    week_of_bar = (since_open + 4 * 1440) // (7 * 1440)  # day 0 was a Thursday: weeks begin on Sunday
    weeks, week = np.unique(week_of_bar, return_inverse=True)
    slot = (since_open + 4 * 1440) % (7 * 1440) // SLOT
    count = np.bincount(week * _WEEK + slot, minlength=len(weeks) * _WEEK).reshape(len(weeks), _WEEK).astype(float)
    day, minute = np.divmod(np.arange(_WEEK) * SLOT, 1440)
    closed = ((day == 0) | (day == 6) | (minute >= close_minute - open_minute)).astype(float)
    moved = np.stack([np.roll(closed, -shift // SLOT) for shift in SHIFTS], axis=1)
    outside = count @ moved  # weeks x shifts
    bars = count.sum(1)
    wrong = (outside[:, 0] > OUTSIDE_SHARE * bars) & (bars * minutes >= WEEK_MINUTES)
    # an incomplete week fits several shifts equally well: the one that fits the other wrong weeks best is taken
    best = np.argmin(outside + 1e-9 * outside[wrong].sum(0), axis=1)
    wrong &= outside[np.arange(len(weeks)), best] < CORRECTED_SHARE * outside[:, 0]
    shift = np.where(wrong, np.array(SHIFTS)[best], 0)[week]
    corrected = start_ns + shift * MINUTE_NS
    return shift if (np.diff(corrected) > 0).all() else np.zeros(len(start_ns), np.int64)


def time_zone_findings(
    start_ns: np.ndarray, shift: np.ndarray, sessions: ExchangeSessions, market: MarketSpec, minutes: int, stamp: str
) -> Iterator[BarFinding]:
    """Yield the findings on the clock; `sessions` are those of the corrected times (start_ns + shift)."""
    if market.calendar == "24h":
        return
    wrong = np.flatnonzero(shift)
    if len(wrong):
        hours = ", ".join(f"{minutes / 60:+g} h" for minutes in np.unique(shift[wrong]).tolist())
        part = "all" if len(wrong) == len(shift) else f"{len(wrong):,} of"
        inside = assign_sessions(start_ns, market.calendar).inside
        message = f"the clock looks mislabelled in {part} {len(shift):,} bars: {hours} would put them into the "
        message += f"{market.calendar} sessions; as it is, {int((~inside[wrong]).sum()):,} stand outside"
        step = "give the right zone (--zone)"
        yield BarFinding("zone_mislabel", "reported", wrong, message, step)
    outside = np.flatnonzero(~sessions.inside)
    if len(outside):
        message = f"{len(outside):,} bars ({len(outside) / len(start_ns):.2%}) outside the {market.calendar} sessions "
        late = (start_ns + shift * MINUTE_NS)[outside] - sessions.close_ns[outside]
        on_close = int((late == 0).sum())
        message += f"({on_close:,} of them on the close itself) " if on_close else ""
        yield BarFinding("outside_session", "reported", outside, message + "are left out of all frames")
    yield from _stamp_side(start_ns + shift * MINUTE_NS, sessions, minutes, stamp)


def _stamp_side(start_ns: np.ndarray, sessions: ExchangeSessions, minutes: int, stamp: str) -> Iterator[BarFinding]:
    """Yield a finding where start stamps look like end stamps (a bar on the close, none on the open) or reverse."""
    days = np.unique(sessions.id)
    step = minutes * MINUTE_NS
    marks = {
        "open": start_ns == sessions.open_ns,
        "close": start_ns == sessions.close_ns,
        "last": start_ns == sessions.close_ns - step,
    }
    seen = {name: len(np.unique(sessions.id[mask])) / len(days) for name, mask in marks.items()}
    before = np.isin(start_ns + step, np.unique(sessions.open_ns)).sum() / len(days)
    if len(days) >= 3 and seen["close"] > 0.5 and seen["open"] < 0.1:
        message = "bars stand on the session's close and none on its open: they look stamped at their end, "
        message += "and then every bar is known one bar later than its stamp: give stamp='end' (--stamp end)"
        rows = np.flatnonzero(marks["close"])
        yield BarFinding("stamp_side", "reported", rows, message, "give stamp='end' (--stamp end)")
    if stamp == "end" and len(days) >= 3 and before > 0.5 and seen["last"] < 0.1:
        message = "read as end-stamped, bars begin before the session's open and none reaches its close: they look "
        yield BarFinding("stamp_side", "reported", _NO_ROWS, message + "stamped at their start: give stamp='start'")
