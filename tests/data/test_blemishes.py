"""What is reported: each blemish put in on purpose, and the real files named for what they are."""

import time

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.bars import BarSpec, check_bars
from ml_factory.data.blemishes import STALE_BARS
from ml_factory.data.sessions import MarketSpec, market_for, sessions_of
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError

MARKET = MarketSpec("TEST", "cme", 0.25, True)


@pytest.fixture(scope="module")
def clean() -> pd.DataFrame:
    return synthetic_bars(20, "null", seed=4, start="2024-02-26").reset_index()


def report_of(raw, market=MARKET, **spec):
    return check_bars(raw, BarSpec(**spec), market=market)[1]


def test_clean_market_has_nothing_to_report(clean):
    report = report_of(clean)
    assert report.findings == () and report.facts["sessions"] == 20
    # brute force: the minutes of the grid that have no bar
    grid = pd.date_range(clean["timestamp"].iloc[0], clean["timestamp"].iloc[-1], freq="1min")
    inside = sessions_of(grid.as_unit("ns").asi8, "cme").inside
    assert report.facts["absent_minutes"] == inside.sum() - len(clean)


def test_hole_inside_a_session(clean):
    report = report_of(clean.drop(index=range(5000, 5120)))
    assert report.kinds == ("hole",) and report.of("hole").rows.tolist() == [5000]
    assert "1 holes of more than 60 min" in report.of("hole").message


def test_hole_at_a_sessions_edge_and_a_day_without_bars(clean):
    day = clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")
    ids = day.dt.strftime("%Y-%m-%d")
    first_rows = ids.drop_duplicates().index
    late = clean.drop(index=range(first_rows[3], first_rows[3] + 90))
    assert report_of(late).of("hole").rows.tolist() == [first_rows[3]]
    early = clean.drop(index=range(first_rows[4] - 90, first_rows[4]))
    assert report_of(early).of("hole").rows.tolist() == [first_rows[4] - 90]
    absent = clean.drop(index=range(first_rows[5], first_rows[6]))
    report = report_of(absent)
    assert report.of("hole").rows.tolist() == [first_rows[5]] and "1,380 min" in report.of("hole").message


def test_exchange_holiday_is_no_hole():
    bars = synthetic_bars(10, "null", start="2024-03-25").reset_index()
    good_friday = (bars["timestamp"] + pd.Timedelta("2h")).dt.strftime("%Y-%m-%d") == "2024-03-29"
    assert good_friday.sum() > 1300
    assert "hole" not in report_of(bars[~good_friday].reset_index(drop=True)).kinds


def test_trading_on_after_a_scheduled_early_close_is_no_hole():
    bars = synthetic_bars(5, "null", start="2024-01-11", missing=0.0).reset_index()
    last = bars.index[bars["timestamp"] == pd.Timestamp("2024-01-15 17:59", tz="UTC")]  # Martin Luther King day
    assert len(last) == 1 and bars["timestamp"].iloc[last[0] + 1] == pd.Timestamp("2024-01-15 23:00", tz="UTC")
    more = pd.DataFrame([bars.iloc[last[0]]] * 30)
    more["timestamp"] += pd.to_timedelta(np.arange(1, 31), unit="min")
    report = report_of(pd.concat([bars, more]).sort_values("timestamp"))
    assert "hole" not in report.kinds and report.facts["absent_minutes"] == 0


def test_rows_of_the_report_are_those_of_the_file(clean):
    newest_first = clean.drop(index=range(5000, 5120)).iloc[::-1].reset_index(drop=True)
    row = newest_first.index[newest_first["timestamp"] == clean["timestamp"].iloc[5120]]
    assert report_of(newest_first).of("hole").rows.tolist() == row.tolist()


def test_spike_that_comes_straight_back(clean):
    raw = clean.copy()
    raw.loc[7777, "low"] *= 0.9
    report = report_of(raw)
    assert report.of("spike").rows.tolist() == [7777] and "1 of them come straight back" in report.of("spike").message


def test_stale_run(clean):
    raw = clean.copy()
    raw.loc[3000 : 3000 + STALE_BARS, ["open", "high", "low", "close"]] = raw.loc[2999, "close"]
    report = report_of(raw)
    assert report.of("stale").rows.tolist() == list(range(3000, 3001 + STALE_BARS))


def test_mislabelled_zone(clean):
    raw = clean.assign(timestamp=clean["timestamp"] + pd.Timedelta("2h"))
    report = report_of(raw)
    assert "-2 h" in report.of("zone").message and len(report.of("outside_session").rows) > 1000


def test_end_stamps_are_suspected_from_the_sessions_edges(clean):
    late = clean.assign(timestamp=clean["timestamp"] + pd.Timedelta("1min"))
    found = report_of(late).of("stamp_side")
    assert "stamped at their end" in found.message and "stamp='end'" in found.message
    assert report_of(late, stamp="end").kinds == ("end_stamped",)
    found = report_of(clean, stamp="end").of("stamp_side")
    assert "stamped at their start" in found.message


def test_end_stamps_of_a_share_market():
    bars = synthetic_bars(20, "null", calendar="us_equity").reset_index()
    market = MarketSpec("T", "us_equity", 0.25, True)
    assert report_of(bars, market).findings == ()
    late = bars.assign(timestamp=bars["timestamp"] + pd.Timedelta("1min"))
    assert "stamp_side" in report_of(late, market).kinds


def test_off_tick_and_a_change_of_adjustment(clean):
    raw = clean.copy()
    prices = ["open", "high", "low", "close"]
    raw.loc[:9999, prices] *= 1.000123
    report = report_of(raw)
    assert report.of("off_tick").rows.tolist() == list(range(10_000)) and len(report.of("regime").rows) == 1
    whole = clean.copy()
    whole[prices] *= 1.000123
    assert report_of(whole).kinds == ("off_tick",) and "back-adjusted" in report_of(whole).of("off_tick").message


def test_paging_holes(clean):
    day = synthetic_bars(30, "null", calendar="24h", missing=0.0).reset_index()
    paged = day[np.arange(len(day)) % 1000 < 200].reset_index(drop=True)
    report = report_of(paged, MarketSpec("T", "24h", 0.25, True))
    assert "800 min, each after 200 bars" in report.of("paging").message and "sparse" in report.kinds


def test_reported_rows_do_not_change_the_bars(clean):
    raw = clean.copy()
    raw.loc[7777, "low"] *= 0.9
    bars, _ = check_bars(raw, market=MARKET)
    assert bars["low"].iloc[7777] == raw.loc[7777, "low"]


NAMED = {
    "bars/NQ_1m": {"no_volume", "hole", "spike", "off_tick"},
    "bars/ES_1m": {"no_volume", "hole", "spike"},
    "bars/SPY_1m": {"outside_session", "spike", "off_tick"},
    "bars/XAUUSD_1m": {"hole", "spike"},
    "bars/BTCUSD_1m": {"spike", "off_tick"},
    "bars/ETHUSD_1m": {"hole", "spike", "off_tick"},
    "bars/FILUSDT_1m": {"hole", "spike", "stale"},
    "bars_5m/ES_5m": {"hole", "spike"},
    "bars_5m/MNQ_5m": {"hole", "spike", "stale"},
    "defects/XAUUSD_1m_broker_time_labelled_utc": {"hole", "outside_session", "zone", "spike"},
    "defects/BTCUSD_2013_1m": {"hole", "sparse", "spike", "stale"},
    "defects/LINKUSDT_1m_paging_holes": {"hole", "paging", "sparse", "spike"},
    "defects/BTCUSDT_1m_testnet_not_market": {"hole", "paging", "sparse", "spike", "not_a_market", "stale"},
}


@pytest.mark.parametrize("name", NAMED)
def test_real_files_are_named_for_what_they_are(shared_data, name):
    raw = pd.read_parquet(shared_data / f"{name}.parquet")
    symbol = name.split("/")[1].split("_")[0]
    began = time.perf_counter()
    bars, report = check_bars(raw, BarSpec(minutes=5 if "5m" in name else 1), where=name, symbol=symbol)
    assert time.perf_counter() - began < 3
    assert set(report.kinds) == NAMED[name]
    assert len(bars) == len(raw) and report.facts["calendar"] == market_for(symbol, bars).calendar


def test_figures_of_real_files(shared_data):
    es = check_bars(pd.read_parquet(shared_data / "bars" / "ES_1m.parquet"), symbol="ES")[1]
    assert len(es.of("hole").rows) == 8  # seven Wednesdays, and the day of mourning of 9 January 2025
    fil = check_bars(pd.read_parquet(shared_data / "bars" / "FILUSDT_1m.parquet"), symbol="FILUSDT")[1]
    assert len(fil.of("hole").rows) == 2 and "44,640 min" in fil.of("hole").message
    spy = check_bars(pd.read_parquet(shared_data / "bars" / "SPY_1m.parquet"), symbol="SPY")[1]
    assert len(spy.of("outside_session").rows) == 587  # closing prints, and the afternoons of half-days


@pytest.mark.parametrize("name", ["ES", "GC"])
def test_files_of_several_contracts_are_refused_by_name(shared_data, name):
    raw = pd.read_parquet(shared_data / "bars" / f"{name}_contracts_lean_1m.parquet")
    with pytest.raises(BarsError, match="several values of 'contract'"):
        check_bars(raw, symbol=name)
    one = raw[raw["contract"] == raw["contract"].iloc[0]]
    assert len(check_bars(one, symbol=name)[0]) == len(one)
