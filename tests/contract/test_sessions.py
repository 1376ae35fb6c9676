"""Sessions against hand-worked UTC times, the exchange's own schedule and real bars."""

import json

import exchange_calendars
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError
from tests.contract import doors


def ns(*stamps: str) -> np.ndarray:
    return pd.DatetimeIndex(pd.to_datetime(list(stamps), utc=True)).as_unit("ns").asi8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of exchange_calendars itself
@pytest.mark.parametrize(("calendar", "name"), [("cme", "CMES"), ("us_equity", "XNYS")])
def test_session_days_holidays_and_early_closes_equal_exchange_calendars(calendar, name):
    book = exchange_calendars.get_calendar(name, start="2010-01-01", end="2026-12-31")
    first, last = (int(day.value // doors.DAY_NS) for day in (book.first_session, book.last_session))
    days, minutes = doors.scheduled_session_days(calendar, first, last)
    sessions, early = book.sessions.as_unit("s"), book.early_closes.as_unit("s")
    if calendar == "cme":  # which calls the mornings of some Good Fridays and days of mourning closed
        mornings = ["2010-04-02", "2012-04-06", "2015-04-03", "2018-12-05", "2021-04-02", "2023-04-07", "2025-01-09"]
        mornings = pd.DatetimeIndex([*mornings, "2026-04-03"]).as_unit("s")
        sessions, early = sessions.union(mornings), early.union(mornings)
    assert pd.DatetimeIndex(days.astype("datetime64[D]")).equals(sessions)
    short = pd.DatetimeIndex(days[minutes < np.median(minutes)].astype("datetime64[D]"))
    if calendar == "cme":  # which lacks Juneteenth and 3 July
        extra = ["2022-06-20", "2023-06-19", "2024-06-19", "2025-06-19", "2026-06-19"]
        extra += [f"{year}-07-03" for year in (2013, 2014, 2017, 2018, 2019, 2023, 2024, 2025)]
        early = early.union(pd.DatetimeIndex(extra).as_unit("s"))
    assert short.equals(early)
    good_friday, thanksgiving = (
        pd.Timestamp("2024-03-29").value // doors.DAY_NS,
        pd.Timestamp("2024-11-28").value // doors.DAY_NS,
    )
    assert good_friday not in days and (thanksgiving in days) == (calendar == "cme")


@pytest.mark.parametrize(
    ("day", "close"),
    [  # the last trade dates of the old hours and the first of the new ones, in UTC
        ("2012-11-16", "2012-11-16 22:30"),
        ("2012-11-19", "2012-11-19 22:15"),
        ("2015-09-18", "2015-09-18 21:15"),
        ("2015-09-21", "2015-09-21 21:00"),
    ],
)
def test_sessions_of_cme_in_earlier_years_close_at_historical_times(day, close):
    got = doors.assign_sessions(ns(f"{day} 15:00"), "cme")
    assert got.close_ns[0] == ns(close)[0]
    last = doors.assign_sessions(ns(close) - doors.MINUTE_NS, "cme"), doors.assign_sessions(ns(close), "cme")
    assert [bool(at.inside[0]) for at in last] == [True, False] and last[0].id[0] == last[1].id[0] == got.id[0]


# One hour before the change and one session after it, at the exchange's own clock, in UTC.
@pytest.mark.parametrize(
    ("calendar", "day", "opens", "closes"),
    [
        ("cme", "2024-03-08", "2024-03-07 23:00", "2024-03-08 22:00"),
        ("cme", "2024-03-11", "2024-03-10 22:00", "2024-03-11 21:00"),
        ("cme", "2024-11-01", "2024-10-31 22:00", "2024-11-01 21:00"),
        ("cme", "2024-11-04", "2024-11-03 23:00", "2024-11-04 22:00"),
        ("us_equity", "2024-03-08", "2024-03-08 14:30", "2024-03-08 21:00"),
        ("us_equity", "2024-03-11", "2024-03-11 13:30", "2024-03-11 20:00"),
        ("us_equity", "2024-11-01", "2024-11-01 13:30", "2024-11-01 20:00"),
        ("us_equity", "2024-11-04", "2024-11-04 14:30", "2024-11-04 21:00"),
        ("fx", "2024-03-08", "2024-03-07 22:00", "2024-03-08 22:00"),
        ("fx", "2024-03-11", "2024-03-10 21:00", "2024-03-11 21:00"),
        ("fx", "2024-11-01", "2024-10-31 21:00", "2024-11-01 21:00"),
        ("fx", "2024-11-04", "2024-11-03 22:00", "2024-11-04 22:00"),
        ("24h", "2024-03-10", "2024-03-10 00:00", "2024-03-11 00:00"),
        ("24h", "2024-11-03", "2024-11-03 00:00", "2024-11-04 00:00"),
    ],
)
def test_sessions_of_days_around_dst_changes_open_and_close_on_local_clock(calendar, day, opens, closes):
    edges = np.concatenate([ns(opens) - doors.MINUTE_NS, ns(opens), ns(closes) - doors.MINUTE_NS, ns(closes)])
    got = doors.assign_sessions(edges, calendar)
    mine = got.id == pd.Timestamp(day).value // doors.DAY_NS
    assert (mine & got.inside).tolist() == [False, True, True, False]
    assert set(got.open_ns[1:3]) == set(ns(opens)) and set(got.close_ns[1:3]) == set(ns(closes))


@settings(max_examples=60, deadline=None)
@given(
    calendar=st.sampled_from(sorted(doors.TRADING_HOURS)),
    first=st.integers(0, 130 * 365).map(lambda day: day * doors.DAY_NS),
    seed=st.integers(0, 2**32 - 1),
)
def test_sessions_of_random_minutes_belong_to_at_most_one_session(calendar, first, seed):
    minutes = first + np.arange(0, 9 * doors.DAY_NS, 7 * doors.MINUTE_NS)
    got = doors.assign_sessions(minutes, calendar)
    assert (np.diff(got.id) >= 0).all() and (got.open_ns < got.close_ns).all()
    assert (got.inside <= ((got.open_ns <= minutes) & (minutes < got.close_ns))).all()
    _, rows = np.unique(got.id[got.inside], return_index=True)
    opens, closes = got.open_ns[got.inside], got.close_ns[got.inside]
    last = np.maximum.reduceat(closes, rows)
    assert (opens[rows][1:] >= last[:-1]).all()  # a day's close is not after the next day's open
    assert (np.maximum.reduceat(opens, rows) == opens[rows]).all()  # one open a day
    order = np.random.default_rng(seed).permutation(len(minutes))
    again = doors.assign_sessions(minutes[order], calendar)
    for field in ("id", "open_ns", "close_ns", "inside"):
        assert (getattr(again, field) == getattr(got, field)[order]).all()


def test_sessions_of_year_outside_1970_to_2099_raises_bars_error():
    assert len(doors.assign_sessions(np.empty(0, np.int64), "cme").id) == 0
    with pytest.raises(BarsError, match="1970 to 2099"):
        doors.assign_sessions(ns("1969-06-01"), "cme")


@pytest.mark.parametrize(
    ("symbol", "calendar", "tick"),
    [
        ("MES", "cme", 0.25),
        ("ESZ4", "cme", 0.25),
        ("NQ-202412", "cme", 0.25),
        ("MGC", "comex", 0.10),
        ("SPY", "us_equity", 0.01),
        ("BTC-USDT", "24h", None),
        ("FILUSDT", "24h", None),
        ("EURUSD", "fx", None),
        ("USD-JPY", "fx", None),
        ("GBPUSD.PRO", "fx", None),
        ("XAUUSD", "comex", None),
        ("GCG25", "comex", 0.10),
        ("CL", "nymex", 0.01),
        ("CLF6", "nymex", 0.01),
        ("NG", "nymex", None),
        ("6EZ4", "cme_fx", None),
        ("ZN", "cme_rates", None),
        ("MBT", "cme_crypto", None),
        ("BTCZ4", "cme_crypto", None),
        ("BTC", "24h", None),
        ("EURUSDT", "24h", None),
    ],
)
def test_market_for_known_symbol_returns_calendar_and_tick(symbol, calendar, tick):
    market = doors.resolve_market_spec(symbol)
    assert (market.calendar, market.tick) == (calendar, tick) and dict(market.source)["calendar"] == "lookup"


@pytest.mark.parametrize("tick", [np.float32(0.25), np.float64(0.25), np.int64(1), 1])
def test_market_for_numpy_tick_stores_python_number(tick):
    stored = doors.resolve_market_spec("ES", calendar="24h", tick=tick).tick
    assert stored == tick and json.dumps(stored)


@pytest.mark.parametrize("tick", [True, np.bool_(True), np.float32("nan"), "1", np.int64(0)])
def test_market_for_invalid_tick_raises_settings_error(tick):
    with pytest.raises(SettingsError, match="tick"):
        doors.resolve_market_spec("ES", calendar="24h", tick=tick)


def test_market_for_given_values_override_lookup_and_unknown_symbol_raises():
    market = doors.resolve_market_spec("ES", calendar="24h", tick=0.5)
    assert (market.calendar, market.tick, market.inferred_fact_warnings()) == ("24h", 0.5, [])
    with pytest.raises(SettingsError, match="calendar="):
        doors.resolve_market_spec("FOO")


def test_market_for_changes_after_20_sessions_keep_inferred_market(make_raw):
    days = pd.bdate_range("2024-01-08", periods=30)
    parts = [make_raw(300, f"{day:%Y-%m-%d} 10:00", seed=i) for i, day in enumerate(days)]
    bars = pd.concat(parts).set_index("timestamp")
    spoiled = bars.copy()
    later = spoiled.index >= pd.Timestamp(days[20], tz="UTC")
    spoiled.loc[later, ["open", "high", "low", "close"]] *= 1.00007
    spoiled.loc[later, "volume"] = 0.0
    first, second = doors.resolve_market_spec("FOO", bars), doors.resolve_market_spec("FOO", spoiled)
    assert first == second and first.tick == 0.25 and first.has_volume and first.calendar == "cme"
    assert not doors.resolve_market_spec("FOO", bars.assign(volume=bars["volume"].where(later, 0.0))).has_volume
    warnings = first.inferred_fact_warnings()
    assert len(warnings) == 2 and "first 20 sessions" in warnings[0]


@pytest.mark.parametrize("calendar", ["24h", "cme", "fx", "us_equity"])  # other CME groups differ on holidays alone
def test_market_for_unknown_symbol_infers_calendar_from_bars(calendar):
    bars = synthetic_bars(25, "null", calendar=calendar, missing=0.02)
    market = doors.resolve_market_spec("FOO", bars)
    assert market.calendar == calendar and dict(market.source)["calendar"] == "inferred"
    assert market.inferred_fact_warnings()


def test_market_for_calendar_change_after_20_sessions_keeps_inferred_calendar():
    bars = synthetic_bars(25, "null", calendar="us_equity", missing=0.02)
    later = synthetic_bars(300, "null", calendar="24h", start=f"{bars.index[-1] + pd.Timedelta('1D'):%Y-%m-%d}")
    assert doors.resolve_market_spec("FOO", pd.concat([bars, later])) == doors.resolve_market_spec("FOO", bars)


def test_market_for_3_weekdays_of_24h_bars_infers_24h_not_fx():
    bars = synthetic_bars(3, "null", calendar="24h", start="2024-01-09")  # Tuesday to Thursday
    assert doors.resolve_market_spec("FOO", bars).calendar == "24h"


@pytest.mark.parametrize(
    ("name", "calendar"), [("ES_1m", "cme"), ("XAUUSD_1m", "cme"), ("SPY_1m", "us_equity"), ("FILUSDT_1m", "24h")]
)
def test_market_for_real_bars_infers_calendar_that_contains_bars(shared_data, name, calendar):
    bars = pd.read_parquet(shared_data / "bars" / f"{name}.parquet").set_index("timestamp")
    market = doors.resolve_market_spec("FOO", bars)
    inside = doors.assign_sessions(bars.index.as_unit("ns").asi8, market.calendar).inside
    assert market.calendar == calendar and inside.mean() > 0.99


def test_pauses_cme_index_futures_at_1515_until_june_2021():
    begin, end = doors.scheduled_session_pauses("cme")
    assert (end - begin == 15 * doors.MINUTE_NS).all() and len(doors.scheduled_session_pauses("us_equity")[0]) == 0
    last = ns(*(f"2021-06-{day} 20:15" for day in (21, 22, 23, 24, 25)))  # 15:15 Chicago; the last on Friday the 25th
    assert begin[begin >= last[0]].tolist() == last.tolist()
    winter = begin[(begin >= ns("2020-11-25")[0]) & (begin < ns("2020-12-01")[0])]
    assert winter.tolist() == ns("2020-11-25 21:15", "2020-11-30 21:15").tolist()  # none on the two short days between
