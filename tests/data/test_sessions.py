"""Sessions against hand-worked UTC times, the exchange's own schedule and real bars."""

import exchange_calendars
import numpy as np
import pandas as pd
import pytest

from ml_factory.data.sessions import DAY_NS, MarketSpec, market_for, session_days, sessions_of
from ml_factory.errors import SettingsError


def ns(*stamps: str) -> np.ndarray:
    return pd.DatetimeIndex(pd.to_datetime(list(stamps), utc=True)).as_unit("ns").asi8


def test_cme_edges_move_with_daylight_saving():
    # Chicago changed its clocks on Sunday 10 March 2024: 17:00 is 23:00 UTC before and 22:00 UTC after.
    got = sessions_of(ns("2024-03-08 12:00", "2024-03-10 21:59", "2024-03-10 22:00", "2024-03-11 20:59"), "cme")
    assert got.inside.tolist() == [True, False, True, True]
    day = pd.Timestamp("2024-03-11").value // DAY_NS
    assert got.id[[0, 2, 3]].tolist() == [day - 3, day, day]
    assert got.open_ns[0] == ns("2024-03-07 23:00")[0] and got.close_ns[0] == ns("2024-03-08 22:00")[0]
    assert got.open_ns[3] == ns("2024-03-10 22:00")[0] and got.close_ns[3] == ns("2024-03-11 21:00")[0]


def test_cme_halt_and_weekend_are_outside():
    stamps = ns("2024-01-10 21:59", "2024-01-10 22:00", "2024-01-10 22:59", "2024-01-10 23:00", "2024-01-13 12:00")
    assert sessions_of(stamps, "cme").inside.tolist() == [True, False, False, True, False]


def test_early_closes():
    # the day after Thanksgiving 2024: index futures stop at 12:15 Chicago, shares at 13:00 New York
    cme = sessions_of(ns("2024-11-29 18:14", "2024-11-29 18:15"), "cme")
    assert cme.close_ns.tolist() == ns("2024-11-29 18:15", "2024-11-29 22:00").tolist()
    assert cme.inside.all() and cme.edges().tolist() == [True, True]  # a product that trades on is kept, cut apart
    shares = sessions_of(ns("2024-11-29 17:59", "2024-11-29 18:00"), "us_equity")
    assert shares.inside.tolist() == [True, False] and (shares.close_ns == ns("2024-11-29 18:00")[0]).all()
    holiday = sessions_of(ns("2025-01-20 17:59"), "cme")  # Martin Luther King day: 12:00 Chicago
    assert holiday.close_ns[0] == ns("2025-01-20 18:00")[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of exchange_calendars itself
def test_us_equity_equals_the_exchange_schedule():
    book = exchange_calendars.get_calendar("XNYS", start="2023-01-01", end="2024-12-31")
    minutes = pd.date_range("2023-01-02", "2024-12-30", freq="30min", tz="UTC")
    ours = sessions_of(minutes.as_unit("ns").asi8, "us_equity")
    days = pd.DatetimeIndex(ours.id[ours.inside].astype("datetime64[D]"))
    held = np.isin(days, book.sessions)  # bars on an exchange holiday are kept, if a file has them
    opens = book.opens.reindex(days[held]).dt.as_unit("ns").astype("int64")
    closes = book.closes.reindex(days[held]).dt.as_unit("ns").astype("int64")
    assert held.mean() > 0.95
    assert (ours.open_ns[ours.inside][held] == opens).all() and (ours.close_ns[ours.inside][held] == closes).all()
    listed, length = session_days("us_equity", int(ours.id[0]), int(ours.id[-1]))
    assert pd.DatetimeIndex(listed.astype("datetime64[D]")).equals(book.sessions[:-2].as_unit("s"))
    assert sorted(set(length.tolist())) == [210, 390]


def test_24h_is_the_utc_day():
    got = sessions_of(ns("2024-02-03 00:00", "2024-02-03 23:59"), "24h")
    assert got.inside.all() and got.id[0] == got.id[1] == pd.Timestamp("2024-02-03").value // DAY_NS
    assert got.close_ns[0] - got.open_ns[0] == DAY_NS


def test_unknown_calendar_is_named():
    with pytest.raises(SettingsError, match="us_equity"):
        sessions_of(ns("2024-01-01"), "us_equities")
    with pytest.raises(SettingsError, match="cme"):
        MarketSpec("X", "cmee", 0.25, True)


@pytest.mark.parametrize(
    ("symbol", "calendar", "tick"),
    [
        ("MES", "cme", 0.25),
        ("ESZ4", "cme", 0.25),
        ("NQ-202412", "cme", 0.25),
        ("MGC", "cme", 0.10),
        ("SPY", "us_equity", 0.01),
        ("BTC-USDT", "24h", None),
        ("FILUSDT", "24h", None),
    ],
)
def test_lookup(symbol, calendar, tick):
    market = market_for(symbol)
    assert (market.calendar, market.tick) == (calendar, tick) and dict(market.source)["calendar"] == "lookup"


def test_given_beats_lookup_and_unknown_asks():
    market = market_for("ES", calendar="24h", tick=0.5, has_volume=True)
    assert (market.calendar, market.tick, market.notes()) == ("24h", 0.5, [])
    with pytest.raises(SettingsError, match="calendar="):
        market_for("FOO")


def test_inference_reads_the_first_twenty_sessions_only(make_raw):
    days = pd.bdate_range("2024-01-08", periods=30)
    parts = [make_raw(300, f"{day:%Y-%m-%d} 10:00", seed=i) for i, day in enumerate(days)]
    bars = pd.concat(parts).set_index("timestamp")
    spoiled = bars.copy()
    later = spoiled.index >= pd.Timestamp(days[20], tz="UTC")
    spoiled.loc[later, ["open", "high", "low", "close"]] *= 1.00007
    spoiled.loc[later, "volume"] = 0.0
    first, second = market_for("FOO", bars), market_for("FOO", spoiled)
    assert first == second and first.tick == 0.25 and first.has_volume and first.calendar == "cme"
    assert len(first.notes()) == 2 and "first 20 sessions" in first.notes()[0]


def test_market_round_trip():
    market = market_for("ES", has_volume=False)
    assert MarketSpec.from_dict(market.to_dict()) == market


@pytest.mark.parametrize(
    ("name", "calendar"), [("ES_1m", "cme"), ("XAUUSD_1m", "cme"), ("SPY_1m", "us_equity"), ("FILUSDT_1m", "24h")]
)
def test_real_bars_stand_inside_the_inferred_calendar(shared_data, name, calendar):
    bars = pd.read_parquet(shared_data / "bars" / f"{name}.parquet").set_index("timestamp")
    market = market_for("FOO", bars)
    inside = sessions_of(bars.index.as_unit("ns").asi8, market.calendar).inside
    assert market.calendar == calendar and inside.mean() > 0.99
