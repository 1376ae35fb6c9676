"""Closed and short days of the exchanges, by product group where CME has several.

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

import warnings
from functools import lru_cache

import exchange_calendars
import numpy as np
import pandas as pd

DAY_NS = 86_400_000_000_000
YEARS = ("1970-01-01", "2099-12-31")
EXCHANGE = {"us_equity": "XNYS"} | dict.fromkeys(("cme", "nymex", "comex", "cme_crypto", "cme_fx", "cme_rates"), "CMES")
_NOON, _QUARTER, _LATER, _AFTERNOON = 12 * 60, 12 * 60 + 15, 12 * 60 + 45, 13 * 60 + 30
_REGULAR = None
# kind of short day -> (first year, minute of the exchange day at which it ends), from the earliest year on
_NYMEX = {
    "holiday": ((1970, _REGULAR), (2013, _QUARTER), (2017, _NOON), (2022, _AFTERNOON)),
    "thanksgiving friday": ((1970, _LATER),),
    "christmas eve": ((1970, _LATER),),
}
_SHORT_DAYS = {
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
_SINGLE_DAYS = {
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


@lru_cache(maxsize=2)
def _exchange_calendar(name: str) -> exchange_calendars.ExchangeCalendar:
    """Load the calendar from `exchange_calendars`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by the package's own use of pandas
        return exchange_calendars.get_calendar(name, start=YEARS[0], end=YEARS[1])


def days_without_holidays(calendar: str) -> np.ndarray:
    """Return the days since 1970-01-01 (int64, increasing) on which the exchange trades."""
    held = _exchange_calendar(EXCHANGE[calendar]).sessions.as_unit("ns").asi8 // DAY_NS
    if calendar not in _SHORT_DAYS:
        return held
    more = [_day(text) for text, groups in _SINGLE_DAYS.items() if calendar in groups]
    return np.union1d(held, more).astype(np.int64)


def holiday_early_closes(calendar: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (days since 1970-01-01, increasing; minute on the exchange's clock of each early close)."""
    calendar_table = _exchange_calendar(EXCHANGE[calendar])
    if calendar not in _SHORT_DAYS:
        closes = pd.DatetimeIndex(calendar_table.closes[calendar_table.early_closes]).tz_convert(calendar_table.tz)
        minutes = (closes.hour * 60 + closes.minute).to_numpy(np.int64)
        return calendar_table.early_closes.as_unit("ns").asi8 // DAY_NS, minutes
    found = {}
    for day, kind in _kinds_of_short_days(calendar_table).items():
        found[day] = _minute(_SHORT_DAYS[calendar].get(kind, ()), day)
    found |= {_day(text): groups[calendar] for text, groups in _SINGLE_DAYS.items() if calendar in groups}
    found = {day: minute for day, minute in sorted(found.items()) if minute is not None}
    return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)


def _kinds_of_short_days(calendar_table: exchange_calendars.ExchangeCalendar) -> dict[int, str]:
    """Return the kind of each short day at CME by day since 1970-01-01."""
    kinds = {}
    for stamp in calendar_table.early_closes:
        eve = stamp.month == 12
        friday = stamp.month == 11 and stamp.day_of_week == 4
        kinds[stamp.value // DAY_NS] = "christmas eve" if eve else "thanksgiving friday" if friday else "holiday"
    for year in range(1970, 2100):
        third = _day(f"{year}-07-03")
        if (third + 3) % 7 < 4:  # Monday to Thursday; day 0 was a Thursday. On a Friday it is the holiday itself
            kinds[third] = "3 july"
        if year >= 2022:
            kinds[_observed(_day(f"{year}-06-19"))] = "holiday"
    return kinds


def _minute(hours: tuple[tuple[int, int | None], ...], day: int) -> int | None:
    """Return the closing minute that is valid in the day's year; None for the regular close."""
    year = int(str(np.datetime64(day, "D"))[:4])
    return next((minute for since, minute in reversed(hours) if year >= since), _REGULAR)


def _observed(day: int) -> int:
    """Return the weekday on which a holiday is observed: Friday for a Saturday, Monday for a Sunday."""
    weekday = (day + 3) % 7
    return day - (weekday == 5) + (weekday == 6)


def _day(text: str) -> int:
    return int(np.datetime64(text, "D").astype(np.int64))
