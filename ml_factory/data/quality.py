"""Quality of valid bars: gaps with their reasons, a wrong clock, spikes, jumps of level, stale prices; never repaired.

Bars are compared with their own market (its calendar, tick, typical move, typical silence); no constant is of one
symbol. Real markets do most of these things sometimes: the report says how often and where. It may use the whole file,
also bars after a row: it is made for people, and no number of a model depends on it.

A fault that is found is corrected for what follows (first the time zone, then the unit, then the level), so that it is
reported once. The bars themselves are not changed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarFinding, pluralize_count
from ml_factory.data.sessions import (
    MINUTE_NS,
    TRADING_HOURS,
    ExchangeSessions,
    MarketSpec,
    assign_sessions,
    calendar_table,
    distinct_in_order,
    scheduled_session_pauses,
)

LEGAL = ("session", "weekend", "holiday", "early_close", "no_trade")
GAP_KINDS = (*LEGAL, "missing", "download_hole")
RUN_NATS = 60.0  # a run of silent or repeated bars less likely than exp(-60), given their share in this market
RUN_CAP = 30  # bars at most that one run adds to that share
HOLE_SHARE = 0.5  # of a session's open minutes: not a pause of trading, a part of the file is absent
HALT_SHARE, HALT_DAYS = 0.5, 10  # a pause at one time of day on most days, and on ten at least, is a halt
SPARSE_SHARE = 0.25  # more absent minutes than this, holes apart
ADJACENT_BARS = 5  # bars at most this far apart are neighbours
OUTSIDE_SHARE = 0.005  # of the bars outside the sessions: closing prints are 0.003, an hour's shift 0.04
CORRECTED_SHARE = 0.25  # a shift of the clock must leave at most this part of them outside
MOVE_WINDOW = 240  # bars on each side of the usual move: most of a session
SPIKE_MOVES = 25.0  # usual moves beyond both neighbours
FLASH_MOVES = 40.0  # usual moves away from the bar before; NQ has 4 in 700,000, on news days
JUMP_MOVES, JUMP_RANGES = 20.0, 5.0  # usual moves, and largest ranges of the bars around: real rolls have 37 and 15
RATIO_JUMP = np.log(1.2)  # from here on it is a split or another adjustment, not a roll
PERSISTING_SHARE = 0.6  # of a move that remains five bars later
VIOLENT_RETURN, VIOLENT_DAYS = 0.10, 0.07  # within one bar; share of days with one: 0.03 in 2013, 0.2 on a test network
TICK_ERROR = 1e-3  # of a tick
ON_SHARE, OFF_SHARE = 0.05, 0.5  # of a session's bars: below it is on the tick, above it is off
_TEN = np.log(10.0)
# n for 1, and the fractions that companies use: with all ratios of small numbers every fall of 20 to 50 % would match
_SPLITS = np.log([6 / 5, 5 / 4, 4 / 3, 3 / 2, 2, 5 / 2, *range(3, 11), 15, 20, 25, 30, 50])
_NO_ROWS = np.empty(0, np.int64)
_WORDS = {
    "session": "over the daily close or a scheduled pause",
    "weekend": "over a weekend",
    "holiday": "over a day on which the exchange is closed",
    "early_close": "after an early close",
    "no_trade": "of {open} min in all without a trade, as this market has them",
}
_ABSENT = {"missing": ("silence", "longer than this market's own"), "download_hole": ("hole", "in the file")}


def find_quality_issues(
    start_ns: np.ndarray,
    prices: dict[str, np.ndarray],
    volume: np.ndarray | None,
    market: MarketSpec,
    minutes: int,
    stamp: str,
) -> list[BarFinding]:
    """Return the findings on checked bars, with rows as positions in `start_ns`.

    start_ns : int64[N], increasing.
    prices : open, high, low, close -> float64[N], checked.
    volume : float64[N], NaN where unknown; None without volume.
    minutes : length of a bar.
    stamp : "start" or "end", as the file was read.
    """
    sessions = assign_sessions(start_ns, market.calendar)
    shift, corrected = _time_zone_shift(start_ns, sessions, market.calendar), start_ns
    if shift:
        corrected = start_ns + shift * MINUTE_NS
        sessions = assign_sessions(corrected, market.calendar)
    gaps, edge = find_gaps(corrected, market.calendar, minutes), sessions.session_start_mask()
    step = np.diff(corrected, prepend=corrected[0]) // (minutes * MINUTE_NS)
    # The bar follows its predecessor within a few bars' time, in the same session; midnight is no break at 24 hours.
    adjacent = (step > 0) & (step <= ADJACENT_BARS) & (~edge | (step == 1))
    log = {name: np.log(values) for name, values in prices.items()}
    unit = _unit_of_bars(log)
    log = {name: values - unit * _TEN for name, values in log.items()}
    usual = _usual_move(log["close"], adjacent)
    jumps = _level_jumps(log, adjacent, edge, usual)
    repeats = (prices["high"] == prices["low"]) & adjacent
    repeats[1:] &= prices["close"][1:] == prices["close"][:-1]
    stale = _rows_of_long_runs(repeats)
    joined = adjacent.copy()
    joined[jumps] = False
    joined[stale] = joined[np.minimum(stale + 1, len(joined) - 1)] = False  # the price catches up after it
    silent = _NO_ROWS if volume is None else _rows_of_long_runs(volume == 0)
    findings = [
        *_gap_findings(gaps, corrected, minutes),
        *_clock_findings(start_ns, shift, sessions, market, minutes, stamp),
        *_level_findings(unit, jumps, log),
        *_spike_findings(log, joined, usual, sessions.id, minutes),
        BarFinding("stale_run", "reported", stale, _describe_runs(stale, "that repeat one price")),
        BarFinding("zero_volume", "reported", silent, _describe_runs(silent, "without volume")),
    ]
    if market.tick is not None:
        scale = 10.0**-unit
        findings += _tick_findings([values * scale for values in prices.values()], sessions.id, market.tick)
    return [found for found in findings if len(found.rows)]


def _describe_runs(rows: np.ndarray, what: str) -> str:
    lengths = np.diff(np.flatnonzero(np.append(np.diff(rows, prepend=-2) != 1, True)))
    return f"{pluralize_count(len(lengths), 'run')} of bars {what}, the longest of {lengths.max(initial=0)}"


# ---- runs ------------------------------------------------------------------------------------------------------------


def find_runs_of_true(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, length) of each run of True."""
    edge = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    first = np.flatnonzero(edge == 1)
    return first, np.flatnonzero(edge == -1) - first


def _too_long(length: np.ndarray, bars: int) -> np.ndarray:
    """Return bool[R]: runs of bars that chance does not explain, by the share of the other runs in the file."""
    counted = np.minimum(length, RUN_CAP)
    share = (counted.sum() - counted + 1) / (bars + counted.sum() - counted + 2)
    return -length * np.log(share) > RUN_NATS


def _rows_of_long_runs(mask: np.ndarray) -> np.ndarray:
    """Return the rows (int64) of the runs of True that chance does not explain."""
    _, length = find_runs_of_true(mask)
    return np.flatnonzero(mask)[np.repeat(_too_long(length, len(mask)), length)]


# ---- gaps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaps:
    """The G gaps of a file: places where the next bar does not begin when the last one ends.

    row : int64[G], the bar after each gap.
    length, open : int64[G], minutes; those in which the market is open by the calendar.
    kind : str[G], one of GAP_KINDS.
    """

    row: np.ndarray
    length: np.ndarray
    open: np.ndarray
    kind: np.ndarray


def find_gaps(start_ns: np.ndarray, calendar: str, minutes: int) -> Gaps:
    """Find every gap of the bars (int64 ns, increasing) and its single reason.

    A holiday on which the market traded all the same counts as open from its first bar to its last.
    """
    sessions, table = assign_sessions(start_ns, calendar), calendar_table(calendar)
    row = np.flatnonzero(np.diff(start_ns) > minutes * MINUTE_NS) + 1
    begin, end = start_ns[row - 1] + minutes * MINUTE_NS, start_ns[row]
    length, day, until = (end - begin) // MINUTE_NS, sessions.id[row - 1] - table.first, sessions.id[row] - table.first
    off = table.weekday & ~table.held
    opens, closes = table.opens.copy(), np.where(table.held, table.early, table.opens)
    rows = np.flatnonzero(sessions.inside & off[sessions.id - table.first])
    traded, at, count = np.unique(sessions.id[rows] - table.first, return_index=True, return_counts=True)
    opens[traded], closes[traded] = start_ns[rows[at]], start_ns[rows[at + count - 1]] + minutes * MINUTE_NS
    opened = _minutes_within(opens, closes, begin, end)
    opened -= _minutes_within(*scheduled_session_pauses(calendar), begin, end)

    def between(days: np.ndarray) -> np.ndarray:
        """Return whether one of these days lies between those of the two bars."""
        before = np.concatenate([[0], np.cumsum(days)])
        return before[np.maximum(until, day + 1)] > before[day + 1]

    offset = np.where(opened == length, (begin - sessions.open_ns[row - 1]) // MINUTE_NS, -1)
    number = np.cumsum(np.diff(sessions.id, prepend=sessions.id[0]) != 0)[row - 1]  # of the session with bars
    _, first, which, times = np.unique(offset, return_index=True, return_inverse=True, return_counts=True)
    last = np.zeros(len(first), np.int64)
    last[which] = number  # the latest of each
    share = times / (last - number[first] + 1)
    halt = (offset >= 0) & (times >= HALT_DAYS)[which] & (share >= HALT_SHARE)[which]
    absent = np.zeros(len(row), bool)
    absent[opened > 0] = _too_long(opened[opened > 0] // minutes, len(start_ns))
    absent &= ~halt
    regular = table.opens[day] + (TRADING_HOURS[calendar][2] - TRADING_HOURS[calendar][1]) * MINUTE_NS
    rest = off[day] & (begin < regular) & ((begin < opens[day]) | (begin >= closes[day]))
    early = table.held[day] & (table.early[day] < np.minimum(regular, end)) & (begin < regular)
    usual = (table.early[day] - table.opens[day]).max(initial=0) // MINUTE_NS
    kind = np.select(
        [absent & (opened >= HOLE_SHARE * usual), absent, between(off) | rest, early,
         between(~table.weekday) | ~table.weekday[day], halt],
        ["download_hole", "missing", "holiday", "early_close", "weekend", "session"],
        default=np.where(opened < length, "session", "no_trade"),
    )  # fmt: skip
    return Gaps(row, length, opened, kind)


def _minutes_within(begin: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return int64[G]: minutes of [since, until) within the spans, which increase and do not overlap."""
    if not len(begin):
        return np.zeros(len(since), np.int64)
    before = np.concatenate([[0], np.cumsum(end - begin)])

    def elapsed(moment: np.ndarray) -> np.ndarray:
        k = np.searchsorted(begin, moment, side="right") - 1
        return np.where(k >= 0, before[k] + np.minimum(moment, end[k]) - begin[k], 0)

    return (elapsed(until) - elapsed(since)) // MINUTE_NS


def _gap_findings(gaps: Gaps, start_ns: np.ndarray, minutes: int) -> Iterator[BarFinding]:
    """Yield one finding for each kind: expected gaps as "info", absent data as "reported"."""
    for kind in GAP_KINDS:
        rows, opened = gaps.row[gaps.kind == kind], gaps.open[gaps.kind == kind]
        if kind in LEGAL:
            message = f"{pluralize_count(len(rows), 'gap')} {_WORDS[kind].format(open=f'{int(opened.sum()):,}')}"
            yield BarFinding(kind, "info", rows, message)
        elif len(rows):
            noun, where = _ABSENT[kind]
            yield BarFinding(
                kind, "reported", rows,
                f"{pluralize_count(len(rows), noun)} {where}, {int(opened.sum()):,} min of trading in all; the longest,"
                f" of {int(opened.max()):,} min, ends at {pd.Timestamp(start_ns[rows[opened.argmax()]], tz='UTC')}",
            )  # fmt: skip
    silent = np.isin(gaps.kind, ("no_trade", "missing"))
    minutes_silent = int(gaps.open[silent].sum())
    share = minutes_silent / (minutes_silent + len(start_ns) * minutes)
    rows = gaps.row[silent & (share > SPARSE_SHARE)]
    yield BarFinding("sparse", "reported", rows, f"{share:.0%} of the market's open minutes have no bar, holes apart")


# ---- the clock -------------------------------------------------------------------------------------------------------


def _time_zone_shift(start_ns: np.ndarray, sessions: ExchangeSessions, calendar: str) -> int:
    """Return the minutes to add to every time so that the bars fit the sessions; 0 where they do, or none does.

    sessions : of the times as they are.

    A file read in the wrong zone puts bars into the daily halt and the weekend; a market that never closes shows
    nothing of this.
    """
    if len(start_ns) < 200 or (~sessions.inside).sum() <= OUTSIDE_SHARE * len(start_ns):  # fewer bars are no evidence
        return 0
    sample = start_ns[:: max(1, len(start_ns) // 20_000)]
    quarters = sorted(range(-14 * 60, 14 * 60 + 1, 15), key=abs)  # of an hour, as zones are apart; 0 first
    left = [int((~assign_sessions(sample + minutes * MINUTE_NS, calendar).inside).sum()) for minutes in quarters]
    return quarters[int(np.argmin(left))] if min(left) < CORRECTED_SHARE * left[0] else 0


def _clock_findings(
    start_ns: np.ndarray, shift: int, sessions: ExchangeSessions, market: MarketSpec, minutes: int, stamp: str
) -> Iterator[BarFinding]:
    """Yield the findings on the clock; `sessions` are those of the corrected times."""
    if shift:
        outside = int((~assign_sessions(start_ns, market.calendar).inside).sum())
        message = f"the clock of all {len(start_ns):,} bars looks mislabelled: {shift / 60:+g} h would put them into "
        message += f"the {market.calendar} sessions; as it is, {outside:,} stand outside"
        yield BarFinding("zone_mislabel", "reported", np.arange(len(start_ns)), message, "give the right zone (--zone)")
    start_ns, step = start_ns + shift * MINUTE_NS, minutes * MINUTE_NS
    outside = np.flatnonzero(~sessions.inside)
    on_open, on_close = start_ns == sessions.open_ns, start_ns == sessions.close_ns
    message = f"{len(outside):,} bars ({len(outside) / len(start_ns):.2%}) outside the {market.calendar} sessions "
    message += f"({int(on_close[outside].sum()):,} of them on the close itself) " if on_close[outside].any() else ""
    yield BarFinding("outside_session", "reported", outside, message + "are left out of all frames")
    days = len(distinct_in_order(sessions.id))
    last, early = start_ns == sessions.close_ns - step, np.isin(start_ns + step, distinct_in_order(sessions.open_ns))
    seen = {"open": on_open, "close": on_close, "last": last, "early": early}
    share = {name: len(distinct_in_order(sessions.id[mask])) / days for name, mask in seen.items()}
    if days >= 3 and share["close"] > 0.5 and share["open"] < 0.1:
        message = "bars stand on the session's close and none on its open: they look stamped at their end, "
        message += "and then every bar is known one bar later than its stamp: give stamp='end' (--stamp end)"
        yield BarFinding("stamp_side", "reported", np.flatnonzero(on_close), message, "give stamp='end' (--stamp end)")
    if stamp == "end" and days >= 3 and share["early"] > 0.5 and share["last"] < 0.1:
        message = "read as end-stamped, bars begin before the session's open and none reaches its close: they look "
        yield BarFinding(
            "stamp_side", "reported", np.flatnonzero(early), message + "stamped at their start: give stamp='start'"
        )


# ---- the price -------------------------------------------------------------------------------------------------------


def _usual_move(close: np.ndarray, adjacent: np.ndarray) -> np.ndarray:
    """Return the mean absolute log return of the bars around each bar, each capped at 20 medians: float64[N] > 0."""
    size = np.where(adjacent, np.abs(np.diff(close, prepend=close[:1])), 0.0)
    if not size.any():
        return np.full(len(size), np.inf)
    typical = float(np.median(size[size > 0]))

    def around(values: np.ndarray) -> np.ndarray:
        """Return the sum of MOVE_WINDOW values on each side of each value and of itself."""
        total = np.pad(np.cumsum(np.append(0.0, values)), MOVE_WINDOW, mode="edge")
        return total[2 * MOVE_WINDOW + 1 :] - total[: -2 * MOVE_WINDOW - 1]

    return np.maximum(around(np.minimum(size, 20 * typical)) / np.maximum(around(adjacent), 1), 0.25 * typical)


def _persists(close: np.ndarray, rows: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Return bool[R]: whether a move persists, by the median of the five closes from its row on and the five before."""
    ahead = close[np.minimum(rows[:, None] + np.arange(5), len(close) - 1)]
    behind = close[np.maximum(rows[:, None] - 1 - np.arange(5), 0)]
    left = np.median(ahead, axis=1) - np.median(behind, axis=1)
    return left * np.sign(move) > PERSISTING_SHARE * np.abs(move)


def _jumps(log: dict[str, np.ndarray]) -> np.ndarray:
    """Return the jump before each bar, float64[N]."""
    return np.append(0.0, log["open"][1:] - log["close"][:-1])


def _ranges_around(log: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return the largest range of the three bars before and from each of these rows on, float64[rows]."""
    near = rows[:, None] + np.arange(-3, 3)
    inside = (near >= 0) & (near < len(log["high"]))
    near[~inside] = 0
    return np.where(inside, log["high"][near] - log["low"][near], 0.0).max(axis=1)


def _unit_of_bars(log: dict[str, np.ndarray]) -> np.ndarray:
    """Return int64[N]: the power of ten between a jump by it and the jump back."""
    gap = _jumps(log)
    power = np.rint(gap / _TEN).astype(np.int64)
    rows = np.flatnonzero((power != 0) & (np.abs(power) <= 3) & (np.abs(gap - power * _TEN) < 0.05))
    rows = rows[_ranges_around(log, rows) < 0.1 * _TEN]
    unit, begun = np.zeros(len(gap), np.int64), -1
    for row in rows.tolist():
        if begun >= 0 and power[row] == -power[begun]:
            unit[begun:row], begun = power[begun], -1
        else:
            begun = row
    return unit


def _level_jumps(log: dict[str, np.ndarray], adjacent: np.ndarray, edge: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return the rows (int64) before which the price jumps between calm bars, and stays.

    A trade moves the price through the bars around it; a change of contract, a split or another adjustment does not.
    Overnight it must be a split's ratio, beyond what this market does overnight.

    log : column -> float64[N], log prices. adjacent : bool[N], the bar follows its predecessor within the session.
    edge : bool[N], first bar of a session. usual : float64[N], as of `_usual_move`.
    """
    gap = _jumps(log)
    size, night = np.abs(gap), edge & ~adjacent
    usual_night = 8 * np.minimum(size[night], 20 * np.median(size[night])).mean()  # the file's first bar is one
    limit = np.where(night, np.maximum(RATIO_JUMP, usual_night), JUMP_MOVES * usual)
    rows = np.flatnonzero((adjacent | night) & (size > limit))
    rows = rows[size[rows] > JUMP_RANGES * _ranges_around(log, rows)]
    traded = np.concatenate([[0], np.cumsum(log["high"] > log["low"])])  # without trades the quote jumps
    after, first = np.minimum(rows + 10, len(gap)), np.maximum(rows - 10, 0)
    rows = rows[(traded[after] - traded[first] > 0.5 * (after - first)) | (size[rows] >= RATIO_JUMP)]
    as_split = (np.abs(size[rows, None] - _SPLITS) < 0.03).any(axis=1)
    rows = rows[~night[rows] | as_split]
    return rows[_persists(log["close"], rows, gap[rows])]


def _level_findings(unit: np.ndarray, jumps: np.ndarray, log: dict[str, np.ndarray]) -> Iterator[BarFinding]:
    rows = np.flatnonzero(unit)
    factors = ", ".join(f"{10.0**k:g}" for k in np.unique(unit[rows]).tolist())
    message = f"{pluralize_count(len(rows), 'bar')} in another unit: {factors} times the prices around them"
    yield BarFinding("unit", "reported", rows, message, "divide them at the source")
    move = log["open"][jumps] - log["close"][jumps - 1]
    for kind, chosen, cause in (
        ("adjustment", np.abs(move) >= RATIO_JUMP, "a split, or prices adjusted in another way from there on"),
        ("roll", np.abs(move) < RATIO_JUMP, "a roll"),
    ):
        shown = ", ".join(f"{value:.4g}" for value in np.exp(move[chosen][:3]))
        message = f"the price level jumps between two calm bars in {pluralize_count(int(chosen.sum()), 'place')} "
        message += f"(by {shown}{', ...' if chosen.sum() > 3 else ''}): it looks like {cause}"
        yield BarFinding(kind, "reported", jumps[chosen], message)


def _spike_findings(
    log: dict[str, np.ndarray], joined: np.ndarray, usual: np.ndarray, day: np.ndarray, minutes: int
) -> Iterator[BarFinding]:
    """Yield findings on spikes, flash moves and prices of no market.

    joined : bool[N], the bar follows its predecessor, and its level and price are not broken off before it.
    day : int[N], the exchange day.
    """
    high, low, close = log["high"], log["low"], log["close"]
    follows = np.append(joined[1:], False)
    beyond = np.zeros(len(close))
    for values, sign in ((high, 1.0), (-low, -1.0)):
        # A missing neighbour is replaced by the bar's own open or close.
        before = np.where(joined, np.roll(values, 1), sign * log["open"])
        after = np.where(follows, np.roll(values, -1), sign * close)
        beyond = np.maximum(beyond, values - np.maximum(before, after))
    spike = beyond > SPIKE_MOVES * usual
    message = f"{pluralize_count(int(spike.sum()), 'bar')} with a price more than {SPIKE_MOVES:.0f} usual moves "
    yield BarFinding("spike", "reported", np.flatnonzero(spike), message + "beyond both neighbours")
    last = close[np.maximum.accumulate(np.where(spike, 0, np.arange(len(close))))]  # the last close of no spike
    before, calm = np.append(last[:1], last[:-1]), joined & ~spike
    reach = np.where(calm, np.maximum(high - before, before - low), 0.0)
    flash = np.flatnonzero(reach > FLASH_MOVES * usual)
    message = f"{pluralize_count(len(flash), 'bar')} with a move of more than {FLASH_MOVES:.0f} usual ones that "
    message += f"does not come straight back (up to {np.expm1(reach.max()):.1%})"
    yield BarFinding("flash_move", "reported", flash, message)
    move = np.where(calm, close - before, 0.0)
    violent = np.flatnonzero(np.abs(move) > VIOLENT_RETURN)
    violent = violent[_persists(close, violent, move[violent])]
    share = len(distinct_in_order(day[violent])) / len(distinct_in_order(day))
    if minutes <= 5 and len(violent) > 10 and share > VIOLENT_DAYS:
        message = f"on {share:.0%} of the days a bar closes more than {VIOLENT_RETURN:.0%} away from the one before "
        message += f"and the price stays there ({len(violent)} bars): a test network or a broken feed makes such prices"
        yield BarFinding("not_a_market", "reported", violent, message)


def off_tick_rows(prices: Iterable[np.ndarray], tick: float) -> np.ndarray:
    """Return bool[N]: bars of which one price, float64[N] each, is no multiple of the tick."""
    return np.any([np.abs(values / tick - np.round(values / tick)) > TICK_ERROR for values in prices], axis=0)


def _tick_findings(prices: list[np.ndarray], day: np.ndarray, tick: float) -> Iterator[BarFinding]:
    """Yield findings on prices off the tick, and on sessions from which prices are adjusted in another way."""
    off = off_tick_rows(prices, tick)
    message = f"{int(off.sum()):,} bars ({off.mean():.2%}) hold prices off the tick of {tick:g}"
    message += ", as ratio back-adjusted series do" if off.mean() > 0.9 else ""
    yield BarFinding("off_tick", "reported", np.flatnonzero(off), message)
    _, first, count = np.unique(day, return_index=True, return_counts=True)
    share = np.add.reduceat(off.astype(float), first) / count
    clear = np.flatnonzero((share < ON_SHARE) | (share > OFF_SHARE))
    changes = clear[1:][np.diff((share > OFF_SHARE)[clear]) != 0]
    if len(changes) <= 20 and (share > OFF_SHARE).sum() >= 3:  # more changes are no change of adjustment
        message = f"sessions change between on and off the tick {len(changes)} times: "
        message += "prices are adjusted in another way from there on"
        yield BarFinding("adjustment", "reported", first[changes], message)
