"""Trading calendars: sessions, holidays and daylight saving.

A session is one exchange day. CME index and metal futures open at 17:00 Chicago the evening before and halt at 16:00;
US equities trade 9:30 to 16:00 New York; currency pairs trade from Sunday to Friday 17:00 New York and their day ends
at that hour; 24-hour markets are cut at 00:00 UTC. Clock times are the exchange's, so a session's UTC edges move with
daylight saving.

CME hours of earlier years (CME notices): the day ended at 16:15 before trade date 21 September 2015, that of index
futures at 16:30 before 19 November 2012, and index futures halted from 15:15 to 15:30 until 28 June 2021. That halt is
no edge of a session but a pause that explains a silence. Before November 2012 the index futures' trade date began at
15:30, which is not modelled.

Closed days are those of `exchange_calendars` (XNYS, CMES). Hours of short days at CME differ by group and year:

    group (calendar)   U.S. holiday                        3 July   day after Thanksgiving   24 December
    cme                10:30, since 2014 12:00             12:15    12:15                    12:15
    nymex, comex       12:15 (2013), 12:00 (2017), 13:30   -        12:45                    12:45
                       since 2022
    cme_crypto         12:00, none since 2022              12:15,   12:15, since 2021        12:15, since 2021
                                                           - 2022   12:45                    12:45
    cme_fx             12:00, none since 2022              -        12:15                    12:15
    cme_rates          12:00                               -        12:15                    12:15

Minutes are Chicago's. A U.S. holiday is Martin Luther King, Presidents', Memorial and Labor Day, Independence Day as
observed, Thanksgiving, and Juneteenth since 2022. 3 July is short where 4 July is a Tuesday to Friday.

Sources: CME Globex holiday schedules as brokers and data vendors passed them on (TransAct, July 2013; RanSquawk,
24 December 2013; DTN, Presidents' Day 2023 and July 2024); CME Group, press release of 30 December 2024 on the day of
mourning; NYMEX notices of 2008 (no early close on holidays); `pandas_market_calendars` for the changes of 2021 and
2022; and bars of ES, NQ and MNQ of 2021 to 2025, whose last minutes agree. Where notices disagree or none was found,
the later close stands: a session then simply ends with its last bar.
"""

import re
import warnings
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import exchange_calendars
import numpy as np
import pandas as pd
from pandas.tseries.holiday import nearest_workday

from ml_factory.argument_checks import CALENDARS, check_settings
from ml_factory.errors import BarsError, SettingsError

DAY_NS = 86_400_000_000_000
MINUTE_NS = 60_000_000_000
PRICES = ("open", "high", "low", "close")
INFER_SESSIONS = 20
YEARS = ("1970-01-01", "2099-12-31")
CME_CALENDARS = ("cme", "nymex", "comex", "cme_crypto", "cme_fx", "cme_rates")
EXCHANGE = {"us_equity": "XNYS"} | dict.fromkeys(CME_CALENDARS, "CMES")
_NOON, _QUARTER, _LATER, _AFTERNOON = 12 * 60, 12 * 60 + 15, 12 * 60 + 45, 13 * 60 + 30
_REGULAR = None
# kind of short day -> (first year, minute of the exchange day at which it ends), from the earliest year on
_NYMEX: dict[str, tuple[tuple[int, int | None], ...]] = {
    "holiday": ((1970, _REGULAR), (2013, _QUARTER), (2017, _NOON), (2022, _AFTERNOON)),
    "thanksgiving friday": ((1970, _LATER),),
    "christmas eve": ((1970, _LATER),),
}
_SHORT_DAYS: dict[str, dict[str, tuple[tuple[int, int | None], ...]]] = {
    "cme": {
        "holiday": ((1970, 10 * 60 + 30), (2014, _NOON)),
        "3 july": ((1970, _REGULAR), (2013, _QUARTER)),
        "thanksgiving friday": ((1970, _QUARTER),),
        "christmas eve": ((1970, _QUARTER),),
    },
    "nymex": _NYMEX,
    "comex": _NYMEX,
    "cme_crypto": {
        "holiday": ((1970, _NOON), (2022, _REGULAR)),
        "3 july": ((1970, _QUARTER), (2022, _REGULAR)),
        "thanksgiving friday": ((1970, _QUARTER), (2021, _LATER)),
        "christmas eve": ((1970, _QUARTER), (2021, _LATER)),
    },
    "cme_fx": {
        "holiday": ((1970, _NOON), (2022, _REGULAR)),
        "thanksgiving friday": ((1970, _QUARTER),),
        "christmas eve": ((1970, _QUARTER),),
    },
    "cme_rates": {
        "holiday": ((1970, _NOON),),
        "thanksgiving friday": ((1970, _QUARTER),),
        "christmas eve": ((1970, _QUARTER),),
    },
}
# Days on which shares do not trade and some groups do: Good Fridays with an employment report, days of mourning.
_MORNING, _AFTER_REPORT = 8 * 60 + 15, 10 * 60 + 15
_SINGLE_DAYS: dict[str, dict[str, int | None]] = {
    "2010-04-02": {"cme": _MORNING},
    "2012-04-06": {"cme": _MORNING},
    "2015-04-03": {"cme": _MORNING},
    "2021-04-02": {"cme": _MORNING, "cme_crypto": _MORNING, "cme_fx": _AFTER_REPORT, "cme_rates": _AFTER_REPORT},
    "2023-04-07": {"cme": _MORNING, "cme_crypto": _AFTER_REPORT, "cme_fx": _AFTER_REPORT, "cme_rates": _AFTER_REPORT},
    "2026-04-03": {"cme": _MORNING, "cme_crypto": _AFTER_REPORT, "cme_fx": _AFTER_REPORT, "cme_rates": _AFTER_REPORT},
    "2018-12-05": {"cme": 8 * 60 + 30} | dict.fromkeys(("nymex", "comex", "cme_crypto", "cme_fx", "cme_rates")),
    "2025-01-09": {"cme": 8 * 60 + 30, "cme_rates": _QUARTER}
    | dict.fromkeys(("nymex", "comex", "cme_crypto", "cme_fx")),
}
# calendar -> (zone, minutes from the exchange day's midnight to open and to close)
TRADING_HOURS = {
    **dict.fromkeys(CME_CALENDARS, ("America/Chicago", -7 * 60, 16 * 60)),
    "us_equity": ("America/New_York", 9 * 60 + 30, 16 * 60),
    "fx": ("America/New_York", -7 * 60, 17 * 60),
    "24h": ("UTC", 0, 24 * 60),
}
assert tuple(TRADING_HOURS) == CALENDARS
# (first trade date of the next hours, minutes by which the day was longer before)
_LATER_CLOSES = {
    "cme": (("2015-09-21", 15), ("2012-11-19", 15)),
    **dict.fromkeys(("nymex", "comex"), (("2015-09-21", 15),)),
}
# (first trade date without it, minutes of the exchange day from and to) of a pause inside the session
_PAUSES = {"cme": ("2021-06-28", 15 * 60 + 15, 15 * 60 + 30)}


HOLE_MINUTES = 60  # a longer silence inside a session is a hole


@dataclass(frozen=True)
class MarketSpec:
    """Facts of a market that hold for every file: stored once, never derived again from a whole file.

    calendar : "cme" (index futures, 17:00-16:00 Chicago), with the holidays of other CME product groups "nymex"
        (energy), "comex" (metals), "cme_crypto", "cme_fx" and "cme_rates"; "us_equity" (9:30-16:00 New York), "fx"
        (spot, 17:00-17:00 New York, Sunday to Friday) or "24h" (UTC days)
    tick : price step, or None where prices follow none
    has_volume : whether volume is meaningful
    bar_minutes : length of the raw bars, of which frames are made and with which labels are resolved
    learn_since : the first exchange day whose rows may be used for training, days since 1970-01-01: where calendar or
        tick were inferred, the day after the sessions they were inferred from; else 0
    source : field -> "given" | "lookup" | "inferred"
    """

    symbol: str
    calendar: str
    tick: float | None
    has_volume: bool
    bar_minutes: int = 1
    learn_since: int = 0
    source: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_settings(self, calendar=CALENDARS, tick="(0, inf)")
        if isinstance(self.tick, np.number):
            object.__setattr__(self, "tick", self.tick.item())  # a manifest holds Python's numbers

    def inferred_fact_warnings(self) -> list[str]:
        """Return one warning for each fact that was inferred from the bars instead of being given or looked up."""
        return [
            f"{field} = {getattr(self, field)!r} was inferred from the first {INFER_SESSIONS} sessions; "
            f"give {field}= (prepare --{field}) to fix it"
            for field, how in self.source
            if how == "inferred"
        ]

    def to_dict(self) -> dict:
        """Return plain values for a manifest; `from_dict` inverts it."""
        return asdict(self) | {"source": dict(self.source)}

    @classmethod
    def from_dict(cls, stored: dict) -> "MarketSpec":
        return cls(**{**stored, "source": tuple(sorted(stored.get("source", {}).items()))})


@dataclass(frozen=True)
class ExchangeSessions:
    """The session of each of N moments.

    id : int32[N], the exchange day as days since 1970-01-01
    open_ns, close_ns : int64[N], the session's edges in UTC. On a day with an early close the CME calendar is only a
        schedule by product group: moments after it still belong to the day, with the regular close
    inside : bool[N], False in the daily halt, at weekends and outside regular hours
    """

    id: np.ndarray
    open_ns: np.ndarray
    close_ns: np.ndarray
    inside: np.ndarray

    def session_start_mask(self) -> np.ndarray:
        """Return bool[N], True where a moment's session differs from the previous one's (True for the first)."""
        changed = np.ones(len(self.id), bool)
        changed[1:] = (np.diff(self.id) != 0) | (np.diff(self.close_ns) != 0)
        return changed


@dataclass(frozen=True)
class CalendarTable:
    """Every exchange day of 1970 to 2099, one entry a day (UTC nanoseconds).

    first : the first day, days since 1970-01-01
    begin : when the day's moments begin
    opens, closes : regular hours
    early : the scheduled close where it is earlier, else `closes`
    weekday : the market is open on that day of the week
    held : and the day is no holiday
    """

    first: int
    begin: np.ndarray
    opens: np.ndarray
    closes: np.ndarray
    early: np.ndarray
    weekday: np.ndarray
    held: np.ndarray


def exchange_days(calendar: str) -> tuple[np.ndarray, dict[int, int]]:
    """Return the days (since 1970-01-01, increasing) on which the exchange trades, and the minute of each early close.

    Minutes are those of the exchange's clock.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by the package's own use of pandas
        book = exchange_calendars.get_calendar(EXCHANGE[calendar], start=YEARS[0], end=YEARS[1])
    held = book.sessions.as_unit("ns").asi8 // DAY_NS
    if calendar not in _SHORT_DAYS:
        closes = book.closes[book.early_closes].dt.tz_convert(book.tz)
        minutes = (closes.dt.hour * 60 + closes.dt.minute).tolist()
        return held, {day.value // DAY_NS: minute for day, minute in zip(closes.index, minutes, strict=True)}
    eve, friday = {12: "christmas eve"}, (11, 4)  # month and day of the week
    kinds = {
        day: eve.get(day.month, "thanksgiving friday" if (day.month, day.day_of_week) == friday else "holiday")
        for day in book.early_closes
    }
    for year in range(1970, 2100):
        third = pd.Timestamp(year, 7, 3)
        if third.day_of_week < 4:  # Monday to Thursday: on a Friday it is the holiday itself
            kinds[third] = "3 july"
        if year >= 2022:
            kinds[nearest_workday(pd.Timestamp(year, 6, 19))] = "holiday"
    closes = {}
    for day, kind in kinds.items():
        valid = [minute for since, minute in _SHORT_DAYS[calendar].get(kind, ()) if day.year >= since]
        closes[day] = valid[-1] if valid else _REGULAR
    single = {pd.Timestamp(day): groups[calendar] for day, groups in _SINGLE_DAYS.items() if calendar in groups}
    short = {day.value // DAY_NS: minute for day, minute in (closes | single).items() if minute is not None}
    return np.union1d(held, [day.value // DAY_NS for day in single]).astype(np.int64), short


def _clock_to_utc(zone: str, days: np.ndarray, minute: np.ndarray | int) -> np.ndarray:
    """Convert `minute` of each local day to UTC ns; no clock change falls on an exchange's open or close."""
    wall = pd.DatetimeIndex((days * DAY_NS + minute * MINUTE_NS).astype("datetime64[ns]"))
    return wall.tz_localize(zone).as_unit("ns").asi8


@lru_cache(maxsize=len(TRADING_HOURS))
def calendar_table(calendar: str) -> CalendarTable:
    """Build the calendar day by day; closed and short days by `exchange_days`.

    For currencies only Christmas and New Year are off, from 17:00 New York the evening before: reduced trading around
    them follows no rule.
    """
    zone, open_minute, close_minute = TRADING_HOURS[calendar]
    first, last = (int(np.datetime64(day).astype(int)) + edge for day, edge in zip(YEARS, (-30, 30), strict=True))
    days = np.arange(first, last + 1)
    minutes = np.full(len(days), close_minute)
    for until, longer in _LATER_CLOSES.get(calendar, ()):
        minutes[days < int(np.datetime64(until).astype(int))] += longer
    opens, closes = _clock_to_utc(zone, days, open_minute), _clock_to_utc(zone, days, minutes)
    weekday = np.ones(len(days), bool) if calendar == "24h" else (days + 3) % 7 < 5  # day 0 was a Thursday
    early, held = closes.copy(), weekday.copy()
    if calendar in EXCHANGE:
        traded, short = exchange_days(calendar)
        held, which = np.isin(days, traded), np.array(list(short), np.int64)
        ends = _clock_to_utc(zone, which, np.array(list(short.values()), np.int64))
        early[which - first] = np.minimum(early[which - first], ends)
    if calendar == "fx":
        day = pd.DatetimeIndex(days.astype("datetime64[D]"))
        held &= ~(((day.month == 12) & (day.day == 25)) | ((day.month == 1) & (day.day == 1)))
    if calendar == "us_equity":
        closes = early  # the exchange itself closes: no regular trading after it
    return CalendarTable(first, _clock_to_utc(zone, days, min(open_minute, 0)), opens, closes, early, weekday, held)


def scheduled_session_pauses(calendar: str) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and end (UTC ns) of the scheduled pauses inside the sessions."""
    if calendar not in _PAUSES:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    (until, *minutes), zone = _PAUSES[calendar], TRADING_HOURS[calendar][0]
    days, table = np.arange(int(np.datetime64(until).astype(int))), calendar_table(calendar)
    begin, end = (_clock_to_utc(zone, days, minute) for minute in minutes)
    kept = table.held[days - table.first] & (end <= table.early[days - table.first])
    return begin[kept], end[kept]


def scheduled_session_days(calendar: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the trading days by the calendar from `first` to `last`, and their open minutes."""
    table = calendar_table(calendar)
    rows = np.arange(first - table.first, last + 1 - table.first)
    rows = rows[table.held[rows]]
    return rows + table.first, (table.early[rows] - table.opens[rows]) // MINUTE_NS


def distinct_in_order(values: np.ndarray) -> np.ndarray:
    """Return the distinct ones of values that do not decrease; `np.unique` hashes them, 50 times as slow."""
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values


def assign_sessions(start_ns: np.ndarray, calendar: str) -> ExchangeSessions:
    """Return the session of each bar start (int64 ns, UTC, in any order)."""
    start_ns, table = np.asarray(start_ns, np.int64), calendar_table(calendar)
    row = np.searchsorted(table.begin, start_ns, side="right") - 1
    if len(row) and not 0 <= row.min() <= row.max() < len(table.begin) - 1:
        got = f"{pd.Timestamp(start_ns.min())} to {pd.Timestamp(start_ns.max())}"
        raise BarsError("Moments outside the calendar", where="timestamp", got=got, wanted="1970 to 2099")
    opens, closes, early = table.opens[row], table.closes[row], table.early[row]
    inside = table.weekday[row] & (start_ns >= opens) & (start_ns < closes)
    closes = np.where(start_ns < early, early, closes)
    return ExchangeSessions((row + table.first).astype(np.int32), opens, closes, inside)


# Symbol roots: calendar and tick. Contract sizes share the tick of their parent (MES as ES).
_ROOTS = {
    **dict.fromkeys(("MES", "ES", "MNQ", "NQ", "DEMO"), ("cme", 0.25)),
    **dict.fromkeys(("YM", "MYM"), ("cme", 1.0)),
    **dict.fromkeys(("RTY", "M2K"), ("cme", 0.10)),
    **dict.fromkeys(("GC", "MGC"), ("comex", 0.10)),
    **dict.fromkeys(("SI", "SIL", "HG", "XAUUSD", "XAGUSD"), ("comex", None)),
    **dict.fromkeys(("PL", "PA"), ("nymex", None)),
    **dict.fromkeys(("CL", "MCL"), ("nymex", 0.01)),
    **dict.fromkeys(("NG", "QG", "RB", "HO", "QM"), ("nymex", None)),
    **dict.fromkeys(("MBT", "MET"), ("cme_crypto", None)),
    **dict.fromkeys(("6E", "6B", "6J", "6A", "6C", "6S", "6N", "6M", "M6E", "M6B", "M6A"), ("cme_fx", None)),
    **dict.fromkeys(("ZN", "ZB", "ZF", "ZT", "TN", "UB", "SR3"), ("cme_rates", None)),
    **dict.fromkeys(("SPY", "QQQ", "IWM", "DIA", "GLD", "AAPL", "MSFT", "NVDA", "TSLA"), ("us_equity", 0.01)),
}
_COIN_FUTURE = re.compile(r"^(BTC|ETH|SOL|XRP)[FGHJKMNQUVXZ]\d{1,4}$")  # a CME contract: BTCZ4, never the coin itself
_COINS = "BTC|XBT|ETH|SOL|XRP|ADA|DOGE|LTC|BNB|LINK|FIL|AVAX|DOT|BCH|MATIC|TRX"
_CRYPTO = re.compile(rf"^({_COINS})([-_.].*|USD.*|EUR.*|GBP.*)?$|USD[TC]$")
_MONEY = "EUR|USD|GBP|JPY|CHF|AUD|NZD|CAD|SEK|NOK|DKK|PLN|CZK|HUF|TRY|ZAR|MXN|SGD|HKD|CNH"
_PAIR = re.compile(rf"^({_MONEY})[-_.]?({_MONEY})([-_.].*)?$")
_CONTRACT = re.compile(r"^([A-Z0-9]{1,4}?)([FGHJKMNQUVXZ]\d{1,4}|[-_.].*|\d+)$")  # ESZ4, ES-202412, NQ.C.0, ES1


def _lookup(symbol: str) -> tuple[str | None, float | None]:
    """Return (calendar, tick) known for this symbol, None where unknown."""
    if symbol in _ROOTS:
        return _ROOTS[symbol]
    contract = _CONTRACT.match(symbol)
    if contract and contract[1] in _ROOTS:
        return _ROOTS[contract[1]]
    if _COIN_FUTURE.match(symbol):
        return "cme_crypto", None
    if _PAIR.match(symbol):
        return "fx", None
    return ("24h", None) if _CRYPTO.search(symbol) else (None, None)


def _infer_calendar(start_ns: np.ndarray, bar_minutes: int = 1) -> str:
    """Infer the calendar with almost every bar inside: weekends traded -> 24h; regular hours only -> us_equity.

    Currencies differ from CME hours by the missing halt, and from 24-hour markets by a weekend without bars.
    """
    days = distinct_in_order(start_ns // DAY_NS)
    head = start_ns[start_ns // DAY_NS <= days[min(INFER_SESSIONS, len(days)) - 1]]
    for calendar in ("us_equity", "cme"):
        if len(days) >= 2 and _share_inside(head, calendar, bar_minutes) >= 0.99:
            return calendar
    # a daily halt at the wrong hour: CME hours under a mislabelled zone, which the bars' report will name
    for hours in (*range(1, 15), *range(-14, 0)) if len(days) >= 5 else ():
        moved = head + hours * 60 * MINUTE_NS
        inside = (
            assign_sessions(moved, "cme").inside.mean()
            if bar_minutes == 1
            else _share_inside(moved, "cme", bar_minutes)
        )
        if inside >= 0.998:
            return "cme"
    if days[-1] - days[0] >= 7 and assign_sessions(head, "fx").inside.mean() >= 0.99:
        return "fx"
    return "24h"


def _share_inside(start_ns: np.ndarray, calendar: str, bar_minutes: int) -> float:
    """Return the share of bars inside the sessions.

    One closing print a day may fall on the close itself. Of longer bars the one at the open counts too, as a session
    has few; hourly bars may not fall on the close, which is the halt.
    """
    before = assign_sessions(start_ns - MINUTE_NS, calendar).inside
    if bar_minutes == 1:
        return before.mean()
    inside = assign_sessions(start_ns, calendar).inside
    return (inside if bar_minutes == 60 else inside | before).mean()


_TICKS = sorted(step * 10.0**power for power in range(-8, 3) for step in (1.0, 2.5, 5.0))[::-1]


def _infer_tick(prices: np.ndarray) -> float | None:
    """Return the largest usual step of which every price is a multiple, or None."""
    for tick in _TICKS:
        steps = prices / tick
        if len(prices) and np.abs(steps - np.round(steps)).max() < 1e-4 and steps.max() < 1e9:
            return float(f"{tick:.9g}")
    return None


def resolve_market_spec(
    symbol: str,
    bars: pd.DataFrame | None = None,
    *,
    calendar: str | None = None,
    tick: float | None = None,
    bar_minutes: int = 1,
) -> MarketSpec:
    """Return the market's facts: given, else looked up by symbol, else inferred from the first 20 sessions only.

    `MarketSpec.inferred_fact_warnings()` lists the inferred facts. Without bars an unknown calendar is an error, an
    unknown tick None, and volume counts as absent.

    bars : checked bars (index UTC)
    """
    known_calendar, known_tick = _lookup(symbol)
    source = {"calendar": "given" if calendar else "lookup", "tick": "given" if tick is not None else "lookup"}
    calendar, tick, since = calendar or known_calendar, known_tick if tick is None else tick, 0
    start_ns = np.empty(0, np.int64) if bars is None else bars.index.as_unit("ns").asi8
    if calendar is None:
        if not len(start_ns):
            step = "give calendar= one of " + ", ".join(TRADING_HOURS)
            raise SettingsError("No calendar is known for this symbol", where="calendar", got=symbol, next_step=step)
        calendar, source["calendar"] = _infer_calendar(start_ns, bar_minutes), "inferred"
    spec, has_volume = MarketSpec(symbol, calendar, tick, False, bar_minutes), False
    if bars is not None and len(bars):
        session = assign_sessions(start_ns, calendar).id
        last = distinct_in_order(session)[:INFER_SESSIONS][-1]
        head = bars.iloc[: np.searchsorted(session, last, side="right")]
        if tick is None:
            tick = _infer_tick(np.unique(head[list(PRICES)].to_numpy(float)))
            source["tick"] = "inferred"
        has_volume = "volume" in head and bool((head["volume"].to_numpy(float) > 0).any())
        since = int(last) + 1 if "inferred" in (source["calendar"], source["tick"]) else 0
    return replace(spec, tick=tick, has_volume=has_volume, learn_since=since, source=tuple(sorted(source.items())))
