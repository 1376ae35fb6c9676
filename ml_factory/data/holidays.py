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

import exchange_calendars
import numpy as np
import pandas as pd
from pandas.tseries.holiday import nearest_workday

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
    kinds = {day: _kind_of_short_day(day) for day in book.early_closes}
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


def _kind_of_short_day(day: pd.Timestamp) -> str:
    if day.month == 12:
        return "christmas eve"
    return "thanksgiving friday" if day.month == 11 and day.day_of_week == 4 else "holiday"
