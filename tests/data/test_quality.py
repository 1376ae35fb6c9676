"""What is reported: each blemish put in on purpose, and the real files named for what they are."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.quality import GAP_KINDS
from ml_factory.data.sessions import MarketSpec, assign_sessions, resolve_market_spec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.data.validation import RawBarSpec, validate_bars
from ml_factory.errors import BarsError

MARKET = MarketSpec("TEST", "cme", 0.25, True)


@pytest.fixture(scope="module")
def clean() -> pd.DataFrame:
    return synthetic_bars(20, "null", seed=4, start="2024-02-26").reset_index()


def report_of(raw, market=MARKET, **spec):
    return validate_bars(raw, RawBarSpec(**spec), market=market)[1]


def test_check_bars_clean_bars_report_no_findings(clean):
    report = report_of(clean)
    assert report.kinds == () and report.facts["sessions"] == 20
    # brute force: the minutes of the grid that have no bar
    grid = pd.date_range(clean["timestamp"].iloc[0], clean["timestamp"].iloc[-1], freq="1min")
    inside = assign_sessions(grid.as_unit("ns").asi8, "cme").inside
    assert report.facts["absent_minutes"] == inside.sum() - len(clean)


def test_check_bars_hole_inside_session_reports_missing(clean):
    report = report_of(clean.drop(index=range(5000, 5120)))
    assert report.kinds == ("missing",) and report.get_finding("missing").rows.tolist() == [5000]
    assert "1 silence longer than this market's own, 121 min of trading" in report.get_finding("missing").message


def test_check_bars_hole_at_session_edge_is_missing_and_absent_day_download_hole(clean):
    day = clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")
    ids = day.dt.strftime("%Y-%m-%d")
    first_rows = ids.drop_duplicates().index
    late = clean.drop(index=range(first_rows[3], first_rows[3] + 90))
    assert report_of(late).get_finding("missing").rows.tolist() == [first_rows[3]]
    early = clean.drop(index=range(first_rows[4] - 90, first_rows[4]))
    assert report_of(early).get_finding("missing").rows.tolist() == [first_rows[4] - 90]
    absent = clean.drop(index=range(first_rows[5], first_rows[6]))
    report = report_of(absent)
    found = report.get_finding("download_hole")
    assert found.rows.tolist() == [first_rows[5]] and "1,380 min" in found.message


def test_check_bars_exchange_holiday_is_no_missing_gap():
    bars = synthetic_bars(10, "null", start="2024-03-25").reset_index()
    good_friday = (bars["timestamp"] + pd.Timedelta("2h")).dt.strftime("%Y-%m-%d") == "2024-03-29"
    assert good_friday.sum() > 1300
    report = report_of(bars[~good_friday].reset_index(drop=True))
    assert report.kinds == () and len(report.get_finding("holiday").rows) == 1


def test_check_bars_bars_after_scheduled_early_close_report_no_findings():
    bars = synthetic_bars(5, "null", start="2024-01-11", missing=0.0).reset_index()
    last = bars.index[bars["timestamp"] == pd.Timestamp("2024-01-15 17:59", tz="UTC")]  # Martin Luther King day
    assert len(last) == 1 and bars["timestamp"].iloc[last[0] + 1] == pd.Timestamp("2024-01-15 23:00", tz="UTC")
    more = pd.DataFrame([bars.iloc[last[0]]] * 30)
    more["timestamp"] += pd.to_timedelta(np.arange(1, 31), unit="min")
    report = report_of(pd.concat([bars, more]).sort_values("timestamp"))
    assert report.kinds == () and report.facts["absent_minutes"] == 0


def test_check_bars_newest_first_file_reports_row_numbers_of_file(clean):
    newest_first = clean.drop(index=range(5000, 5120)).iloc[::-1].reset_index(drop=True)
    row = newest_first.index[newest_first["timestamp"] == clean["timestamp"].iloc[5120]]
    assert report_of(newest_first).get_finding("missing").rows.tolist() == row.tolist()


def test_check_bars_spike_that_reverts_reports_spike_row(clean):
    raw = clean.copy()
    raw.loc[7777, "low"] -= 500.0
    report = report_of(raw)
    assert report.get_finding("spike").rows.tolist() == [7777] and report.kinds == ("spike",)


def test_check_bars_repeated_prices_report_stale_run(clean):
    raw = clean.copy()
    raw.loc[3000:3015, ["open", "high", "low", "close"]] = raw.loc[2999, "close"]
    report = report_of(raw)
    assert report.get_finding("stale_run").rows.tolist() == list(range(3000, 3016))
    raw.loc[3016:, ["open", "high", "low", "close"]] += 100.0  # the feed comes back far away: the same fault
    assert report_of(raw).kinds == ("stale_run",)


def test_check_bars_single_price_bars_that_change_report_no_stale_run(clean):
    raw = clean.copy()
    for column in ("open", "high", "low"):
        raw.loc[3000:3040, column] = raw.loc[3000:3040, "close"]
    assert report_of(raw).kinds == ()


def test_check_bars_run_of_zero_volume_reports_zero_volume(clean):
    raw = clean.copy()
    raw.loc[3000:3015, "volume"] = 0.0
    assert report_of(raw).get_finding("zero_volume").rows.tolist() == list(range(3000, 3016))
    raw.loc[3000:3015, "volume"] = np.nan  # unknown is told as unknown
    assert report_of(raw).kinds == ("partial_volume",)


@pytest.mark.parametrize("hours", [2, -1, -7, 5.5, 12.75])
def test_check_bars_shifted_timestamps_report_zone_mislabel_with_hours(clean, hours):
    raw = clean.assign(timestamp=clean["timestamp"] + pd.Timedelta(hours=hours))
    report = report_of(raw)
    found = report.get_finding("zone_mislabel")
    assert report.kinds == ("zone_mislabel",) and len(found.rows) == len(raw)  # one fault, told once
    assert f"{-hours:+g} h would put them" in found.message


def test_check_bars_24h_bars_on_cme_calendar_report_outside_session_only():
    always = synthetic_bars(14, "null", seed=4, calendar="24h", start="2024-02-26", missing=0.05).reset_index()
    assert "outside_session" in report_of(always).kinds and "zone_mislabel" not in report_of(always).kinds
    short = always[(always["timestamp"] >= "2024-03-05 22:00Z") & (always["timestamp"] < "2024-03-05 23:30Z")]
    assert "outside_session" in report_of(short).kinds and "zone_mislabel" not in report_of(short).kinds


NO_TICK = MarketSpec("TEST", "cme", None, True)
PRICES = ["open", "high", "low", "close"]


def test_check_bars_overnight_price_jump_is_adjustment_only_at_split_ratio(clean):
    day = (clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")).dt.date
    first = int(day.drop_duplicates().index[9])
    for ratio, reported in ((2.0, [first]), (2.15, None)):
        raw = clean.copy()
        raw.loc[first:, PRICES] *= ratio
        found = report_of(raw, NO_TICK).get_finding("adjustment")
        assert (None if found is None else found.rows.tolist()) == reported


def test_check_bars_tenth_of_price_after_a_fall_is_not_unit_change(clean):
    raw = clean.copy()
    raw.loc[7777:7787, PRICES] *= 0.1
    assert report_of(raw, NO_TICK).get_finding("unit").rows.tolist() == list(range(7777, 7788))
    raw.loc[7776, "low"] *= 0.5  # the bar before was on its way there
    assert "unit" not in report_of(raw, NO_TICK).kinds


@pytest.mark.parametrize(("days", "network"), [(3, False), (12, True)])
def test_check_bars_violent_moves_are_not_a_market_on_12_days_but_not_on_3(clean, days, network):
    raw = clean.copy()
    for k in range(days):
        row = 700 + 1380 * k
        raw.loc[row, ["high", "close"]] = raw.loc[row, "high"] * 1.15
        raw.loc[row + 1 :, PRICES] *= 1.15
    kinds = report_of(raw, NO_TICK).kinds
    assert "flash_move" in kinds and ("not_a_market" in kinds) == network


def test_check_bars_price_off_by_tenth_of_tick_reports_off_tick(clean):
    raw = clean.copy()
    raw.loc[4000, "high"] += 0.025
    assert report_of(raw).kinds == ("off_tick",) and report_of(raw).get_finding("off_tick").rows.tolist() == [4000]


@pytest.mark.parametrize(("length", "reported"), [(2, False), (10, True)])
def test_check_bars_scale_alternating_every_2_sessions_is_not_adjustment(length, reported):
    raw = synthetic_bars(50, "null", seed=4, calendar="us_equity").reset_index()
    number = raw["timestamp"].dt.date.factorize()[0]
    raw.loc[number // length % 2 == 1, PRICES] *= 1.000123
    report = report_of(raw, MarketSpec("TEST", "us_equity", 0.25, True))
    assert "off_tick" in report.kinds and ("adjustment" in report.kinds) == reported


def test_check_bars_mid_session_step_is_roll_and_overnight_halving_is_adjustment(clean):
    prices = ["open", "high", "low", "close"]
    raw = clean.copy()
    raw.loc[7000:, prices] += 60.0
    assert report_of(raw).get_finding("roll").rows.tolist() == [7000] and report_of(raw).kinds == ("roll",)
    overnight = clean["timestamp"].diff() > pd.Timedelta("50min")
    first = overnight[overnight].index[4]
    raw = clean.copy()
    raw.loc[first:, prices] /= 2
    raw[prices] = (raw[prices] / 0.25).round() * 0.25
    assert report_of(raw).get_finding("adjustment").rows.tolist() == [first] and report_of(raw).kinds == ("adjustment",)


def test_check_bars_24h_market_step_at_midnight_reports_roll():
    raw = synthetic_bars(10, "null", calendar="24h", missing=0.0).reset_index()
    midnight = raw.index[raw["timestamp"].dt.strftime("%H:%M") == "00:00"][5]
    raw.loc[midnight:, ["open", "high", "low", "close"]] += 100.0
    report = report_of(raw, MarketSpec("T", "24h", 0.25, True))
    assert report.get_finding("roll").rows.tolist() == [midnight] and report.kinds == ("roll",)


def test_check_bars_contract_column_change_reports_roll_with_contract(clean):
    raw = clean.assign(contract=np.where(clean.index < 9000, "ESH4", "ESM4"))
    found = report_of(raw).get_finding("roll")
    assert found.rows.tolist() == [9000] and "changes 1 time (to ESM4)" in found.message


def test_check_bars_temporary_scale_is_unit_and_permanent_scale_is_adjustment(clean):
    prices = ["open", "high", "low", "close"]
    raw = clean.copy()
    raw.loc[500:599, prices] /= 100
    report = report_of(raw)
    assert report.get_finding("unit").rows.tolist() == list(range(500, 600)) and report.kinds == ("unit",)
    raw = clean.copy()
    raw.loc[7000:, prices] *= 10  # and never back: two changes of level
    raw.loc[9000:, prices] *= 10
    assert report_of(raw).get_finding("adjustment").rows.tolist() == [7000, 9000] and report_of(raw).kinds == (
        "adjustment",
    )


def test_check_bars_end_stamped_cme_bars_report_stamp_side(clean):
    late = clean.assign(timestamp=clean["timestamp"] + pd.Timedelta("1min"))
    found = report_of(late).get_finding("stamp_side")
    assert "stamped at their end" in found.message and "stamp='end'" in found.message
    assert report_of(late, stamp="end").kinds == ("end_stamped",)
    found = report_of(clean, stamp="end").get_finding("stamp_side")
    assert "stamped at their start" in found.message


def test_check_bars_end_stamped_us_equity_bars_report_stamp_side():
    bars = synthetic_bars(20, "null", calendar="us_equity").reset_index()
    market = MarketSpec("T", "us_equity", 0.25, True)
    assert report_of(bars, market).kinds == ()
    late = bars.assign(timestamp=bars["timestamp"] + pd.Timedelta("1min"))
    assert "stamp_side" in report_of(late, market).kinds


def test_check_bars_scaled_first_part_reports_off_tick_and_adjustment(clean):
    raw = clean.copy()
    prices = ["open", "high", "low", "close"]
    raw.loc[:9999, prices] *= 1.000123
    report = report_of(raw)
    assert (
        report.get_finding("off_tick").rows.tolist() == list(range(10_000))
        and len(report.get_finding("adjustment").rows) == 1
    )
    whole = clean.copy()
    whole[prices] *= 1.000123
    assert (
        report_of(whole).kinds == ("off_tick",) and "back-adjusted" in report_of(whole).get_finding("off_tick").message
    )


def test_check_bars_regular_paging_holes_report_download_hole(clean):
    day = synthetic_bars(30, "null", calendar="24h", missing=0.0).reset_index()
    paged = day[np.arange(len(day)) % 1000 < 200].reset_index(drop=True)
    report = report_of(paged, MarketSpec("T", "24h", 0.25, True))
    found = report.get_finding("download_hole")
    assert len(found.rows) == 43 and report.kinds == ("download_hole",)


def test_check_bars_reported_spike_keeps_price_unchanged(clean):
    raw = clean.copy()
    raw.loc[7777, "low"] *= 0.9
    bars, _ = validate_bars(raw, market=MARKET)
    assert bars["low"].iloc[7777] == raw.loc[7777, "low"]


NAMED = {
    "bars/NQ_1m": {"no_volume", "missing", "flash_move", "off_tick"},
    "bars/ES_1m": {"no_volume", "download_hole", "flash_move"},
    "bars/SPY_1m": {"outside_session", "off_tick"},
    "bars/XAUUSD_1m": {"missing"},
    "bars/BTCUSD_1m": {"missing", "spike", "flash_move", "off_tick"},
    "bars/ETHUSD_1m": {"missing", "spike", "flash_move", "off_tick"},
    "bars/FILUSDT_1m": {"download_hole", "spike", "flash_move", "stale_run", "zero_volume"},
    "bars_5m/ES_5m": {"download_hole", "roll", "flash_move"},
    "bars_5m/MNQ_5m": {"missing", "download_hole", "roll", "spike", "flash_move", "stale_run", "zero_volume"},
    "defects/XAUUSD_1m_broker_time_labelled_utc": {"missing", "zone_mislabel"},
    "defects/BTCUSD_2013_1m": {"missing", "sparse", "unit", "spike", "flash_move"},
    "defects/LINKUSDT_1m_paging_holes": {"download_hole"},
    # two defects: the same paging bug, and prices of no market (which break what else looks at prices too)
    "defects/BTCUSDT_1m_testnet_not_market": {
        *("download_hole", "not_a_market", "adjustment", "spike", "flash_move", "stale_run", "zero_volume"),
    },
}


@pytest.mark.parametrize("name", NAMED)
def test_check_bars_real_file_reports_expected_kinds(shared_data, name):
    raw = pd.read_parquet(shared_data / f"{name}.parquet")
    symbol = name.split("/")[1].split("_")[0]
    bars, report = validate_bars(raw, RawBarSpec(minutes=5 if "5m" in name else 1), where=name, symbol=symbol)
    assert set(report.kinds) == NAMED[name]
    assert len(bars) == len(raw) and report.facts["calendar"] == resolve_market_spec(symbol, bars).calendar


def report_on(shared_data, name, **spec):
    raw = pd.read_parquet(shared_data / f"{name}.parquet")
    return raw, validate_bars(raw, RawBarSpec(**spec), symbol=name.split("/")[1].split("_")[0])[1]


def raw_days(raw, rows) -> list[str]:
    """The exchange's dates of these rows."""
    return raw["timestamp"].iloc[rows].dt.tz_convert("America/Chicago").dt.strftime("%Y-%m-%d").tolist()


def gap_counts(report) -> dict[str, int]:
    return {kind: len(report.get_finding(kind).rows) for kind in GAP_KINDS if report.get_finding(kind)}


def test_check_bars_real_files_gap_counts_equal_hand_counts(shared_data):
    """Counted by hand from the files' own times."""
    raw, es = report_on(shared_data, "bars/ES_1m")
    counts = {"session": 110, "weekend": 29, "holiday": 3, "early_close": 5, "no_trade": 26}
    assert gap_counts(es) == counts | {"download_hole": 7}
    holes = raw["timestamp"].iloc[es.get_finding("download_hole").rows].dt.tz_convert("America/New_York")
    assert set(holes.dt.day_name()) == {"Wednesday"} and set(holes.dt.hour) == {16}
    nq_raw, nq = report_on(shared_data, "bars/NQ_1m")  # 121 of its daily gaps are the halt at 15:15 until June 2021
    assert gap_counts(nq) == counts | {
        "session": 521,
        "weekend": 97,
        "holiday": 3,
        "early_close": 16,  # 2021-04-02, a Good Friday with a jobs report, closed at 08:15 Chicago
        "no_trade": 83,
        "missing": 1,
    }
    closed = raw_days(nq_raw, nq.get_finding("holiday").rows)
    assert closed == ["2021-12-26", "2022-04-17", "2022-12-26"]  # a Good Friday and two Christmases
    _, fil = report_on(shared_data, "bars/FILUSDT_1m")
    assert gap_counts(fil) == {"download_hole": 2} and "44,640 min" in fil.get_finding("download_hole").message
    _, btc = report_on(shared_data, "bars/BTCUSD_1m")
    assert gap_counts(btc) == {"no_trade": 14200, "missing": 3}
    for name in ("LINKUSDT_1m_paging_holes", "BTCUSDT_1m_testnet_not_market"):
        _, paged = report_on(shared_data, f"defects/{name}")
        assert gap_counts(paged) == {"download_hole": 524}


def test_check_bars_real_files_finding_figures_equal_hand_counts(shared_data):
    _, spy = report_on(shared_data, "bars/SPY_1m")
    assert len(spy.get_finding("outside_session").rows) == 587  # closing prints, and the afternoons of half-days
    assert "194 of them on the close itself" in spy.get_finding("outside_session").message
    _, true = report_on(shared_data, "bars/XAUUSD_1m")
    raw, shifted = report_on(shared_data, "defects/XAUUSD_1m_broker_time_labelled_utc")
    assert (
        len(shifted.get_finding("zone_mislabel").rows) == len(raw)
        and "-2 h would" in shifted.get_finding("zone_mislabel").message
    )
    assert gap_counts(shifted) == gap_counts(true)  # on the mended clock
    for name in ("ES_5m", "MNQ_5m"):
        raw, report = report_on(shared_data, f"bars_5m/{name}", minutes=5)
        rolls = raw["timestamp"].iloc[report.get_finding("roll").rows].dt.strftime("%Y-%m-%d").tolist()
        assert rolls == ["2024-06-17", "2024-09-16", "2024-12-16", "2025-03-17", "2025-06-16"]  # the third Mondays


@pytest.mark.parametrize("name", ["ES", "GC"])
def test_check_bars_several_contracts_in_file_raises_bars_error(shared_data, name):
    raw = pd.read_parquet(shared_data / "bars" / f"{name}_contracts_lean_1m.parquet")
    with pytest.raises(BarsError, match="several values of 'contract'"):
        validate_bars(raw, symbol=name)
    one = raw[raw["contract"] == raw["contract"].iloc[0]]
    assert len(validate_bars(one, symbol=name)[0]) == len(one)


@pytest.mark.parametrize("fall", [0.30, 1 / 3, 0.40, 0.45])
def test_check_bars_overnight_fall_of_30_to_45_percent_is_not_adjustment(clean, fall):
    day = (clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")).dt.date
    first = int(day.drop_duplicates().index[9])
    raw = clean.copy()
    raw.loc[first:, PRICES] *= 1 - fall
    for row, wide in ((first, 0.05), (first + 1, 0.03)):  # and its first minutes are wild
        raw.loc[row, "high"] *= 1 + wide
        raw.loc[row, "low"] *= 1 - wide
    found = report_of(raw, NO_TICK).get_finding("adjustment")
    assert found is None or first not in found.rows
    if fall != 1 / 3:  # nor where they are calm, unless a split has just that ratio
        calm = clean.copy()
        calm.loc[first:, PRICES] *= 1 - fall
        assert report_of(calm, NO_TICK).get_finding("adjustment") is None


@pytest.mark.parametrize("ratio", [1.25, 1.5, 2.0, 3.0, 10.0])
def test_check_bars_overnight_split_at_usual_ratio_reports_adjustment(clean, ratio):
    day = (clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")).dt.date
    first = int(day.drop_duplicates().index[9])
    raw = clean.copy()
    raw.loc[first:, PRICES] /= ratio
    assert report_of(raw, NO_TICK).get_finding("adjustment").rows.tolist() == [first]
