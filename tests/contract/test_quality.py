"""What is reported: each blemish put in on purpose, and the real files named for what they are."""

from functools import cache

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from tests.contract.doors import GAP_KINDS, MarketSpec, RawBarSpec, assign_sessions, validate_bars
from tests.data.bar_findings import finding_of, kinds_of

MARKET = MarketSpec("TEST", "cme", 0.25, True)


@pytest.fixture(scope="module")
def clean() -> pd.DataFrame:
    return synthetic_bars(20, "null", seed=4, start="2024-02-26").reset_index()


def report_of(raw, market=MARKET, **spec):
    return validate_bars(raw, RawBarSpec(**spec), market=market)[1]


def test_check_bars_clean_bars_report_no_findings(clean):
    report = report_of(clean)
    assert kinds_of(report) == ()
    # brute force: the minutes of the grid that have no bar
    grid = pd.date_range(clean["timestamp"].iloc[0], clean["timestamp"].iloc[-1], freq="1min")
    inside = assign_sessions(grid.as_unit("ns").asi8, "cme").inside
    assert f" of {inside.sum() - len(clean):,} min in all" in finding_of(report, "no_trade").message


def test_check_bars_bars_after_scheduled_early_close_report_no_findings():
    bars = synthetic_bars(5, "null", start="2024-01-11", missing=0.0).reset_index()
    last = bars.index[bars["timestamp"] == pd.Timestamp("2024-01-15 17:59", tz="UTC")]  # Martin Luther King day
    assert len(last) == 1 and bars["timestamp"].iloc[last[0] + 1] == pd.Timestamp("2024-01-15 23:00", tz="UTC")
    more = pd.DataFrame([bars.iloc[last[0]]] * 30)
    more["timestamp"] += pd.to_timedelta(np.arange(1, 31), unit="min")
    report = report_of(pd.concat([bars, more]).sort_values("timestamp"))
    assert kinds_of(report) == () and finding_of(report, "no_trade") is None


def test_check_bars_single_price_bars_that_change_report_no_stale_run(clean):
    raw = clean.copy()
    for column in ("open", "high", "low"):
        raw.loc[3000:3040, column] = raw.loc[3000:3040, "close"]
    assert kinds_of(report_of(raw)) == ()


def test_check_bars_24h_bars_on_cme_calendar_report_outside_session_only():
    always = synthetic_bars(14, "null", seed=4, calendar="24h", start="2024-02-26", missing=0.05).reset_index()
    assert "outside_session" in kinds_of(report_of(always)) and "zone_mislabel" not in kinds_of(report_of(always))
    short = always[(always["timestamp"] >= "2024-03-05 22:00Z") & (always["timestamp"] < "2024-03-05 23:30Z")]
    assert "outside_session" in kinds_of(report_of(short)) and "zone_mislabel" not in kinds_of(report_of(short))


NO_TICK = MarketSpec("TEST", "cme", None, True)
PRICES = ["open", "high", "low", "close"]


def test_check_bars_tenth_of_price_after_a_fall_is_not_unit_change(clean):
    raw = clean.copy()
    raw.loc[7777:7787, PRICES] *= 0.1
    assert finding_of(report_of(raw, NO_TICK), "unit").rows.tolist() == list(range(7777, 7788))
    raw.loc[7776, "low"] *= 0.5  # the bar before was on its way there
    assert "unit" not in kinds_of(report_of(raw, NO_TICK))


@pytest.mark.parametrize(("days", "network"), [(3, False), (12, True)])
def test_check_bars_violent_moves_are_not_a_market_on_12_days_but_not_on_3(clean, days, network):
    raw = clean.copy()
    for k in range(days):
        row = 700 + 1380 * k
        raw.loc[row, ["high", "close"]] = raw.loc[row, "high"] * 1.15
        raw.loc[row + 1 :, PRICES] *= 1.15
    kinds = kinds_of(report_of(raw, NO_TICK))
    assert "flash_move" in kinds and ("not_a_market" in kinds) == network


@pytest.mark.parametrize(("length", "reported"), [(2, False), (10, True)])
def test_check_bars_scale_alternating_every_2_sessions_is_not_adjustment(length, reported):
    raw = synthetic_bars(50, "null", seed=4, calendar="us_equity").reset_index()
    number = raw["timestamp"].dt.date.factorize()[0]
    raw.loc[number // length % 2 == 1, PRICES] *= 1.000123
    report = report_of(raw, MarketSpec("TEST", "us_equity", 0.25, True))
    assert "off_tick" in kinds_of(report) and ("adjustment" in kinds_of(report)) == reported


def test_check_bars_contract_column_change_reports_roll_with_contract(clean):
    raw = clean.assign(contract=np.where(clean.index < 9000, "ESH4", "ESM4"))
    found = finding_of(report_of(raw), "roll")
    assert found.rows.tolist() == [9000] and "changes 1 time (to ESM4)" in found.message


def test_check_bars_end_stamped_cme_bars_report_stamp_side(clean):
    late = clean.assign(timestamp=clean["timestamp"] + pd.Timedelta("1min"))
    found = finding_of(report_of(late), "stamp_side")
    assert "stamped at their end" in found.message and "stamp='end'" in found.message
    assert kinds_of(report_of(late, stamp="end")) == ("end_stamped",)
    found = finding_of(report_of(clean, stamp="end"), "stamp_side")
    assert "stamped at their start" in found.message


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


@pytest.fixture(scope="module")
def report_on(shared_data):
    """name -> (times of the file, its report); made once."""

    @cache
    def read(name: str):
        raw = pd.read_parquet(shared_data / f"{name}.parquet")
        symbol = name.split("/")[1].split("_")[0]
        bars, report = validate_bars(raw, RawBarSpec(minutes=5 if "5m" in name else 1), symbol=symbol)
        assert len(bars) == len(raw)
        return raw["timestamp"], report

    return read


@pytest.mark.parametrize("name", NAMED)
def test_check_bars_real_file_reports_expected_kinds(report_on, name):
    assert set(kinds_of(report_on(name)[1])) == NAMED[name]


def gap_counts(report) -> dict[str, int]:
    return {kind: len(finding_of(report, kind).rows) for kind in GAP_KINDS if finding_of(report, kind)}


def test_check_bars_real_files_gap_counts_equal_hand_counts(report_on):
    """Counted by hand from the files' own times."""
    times, es = report_on("bars/ES_1m")
    counts = {"session": 110, "weekend": 29, "holiday": 3, "early_close": 5, "no_trade": 26}
    assert gap_counts(es) == counts | {"download_hole": 7}
    holes = times.iloc[finding_of(es, "download_hole").rows].dt.tz_convert("America/New_York")
    assert set(holes.dt.day_name()) == {"Wednesday"} and set(holes.dt.hour) == {16}
    nq_times, nq = report_on("bars/NQ_1m")  # 121 of its daily gaps are the halt at 15:15 until June 2021
    assert gap_counts(nq) == counts | {
        "session": 521,
        "weekend": 97,
        "holiday": 3,
        "early_close": 16,  # 2021-04-02, a Good Friday with a jobs report, closed at 08:15 Chicago
        "no_trade": 83,
        "missing": 1,
    }
    closed = nq_times.iloc[finding_of(nq, "holiday").rows].dt.tz_convert("America/Chicago").dt.strftime("%Y-%m-%d")
    assert closed.tolist() == ["2021-12-26", "2022-04-17", "2022-12-26"]  # a Good Friday and two Christmases
    _, fil = report_on("bars/FILUSDT_1m")
    assert gap_counts(fil) == {"download_hole": 2} and "44,640 min" in finding_of(fil, "download_hole").message
    _, btc = report_on("bars/BTCUSD_1m")
    assert gap_counts(btc) == {"no_trade": 14200, "missing": 3}
    for name in ("LINKUSDT_1m_paging_holes", "BTCUSDT_1m_testnet_not_market"):
        _, paged = report_on(f"defects/{name}")
        assert gap_counts(paged) == {"download_hole": 524}


def test_check_bars_real_files_finding_figures_equal_hand_counts(report_on):
    _, spy = report_on("bars/SPY_1m")
    assert len(finding_of(spy, "outside_session").rows) == 587  # closing prints, and the afternoons of half-days
    assert "194 of them on the close itself" in finding_of(spy, "outside_session").message
    _, true = report_on("bars/XAUUSD_1m")
    times, shifted = report_on("defects/XAUUSD_1m_broker_time_labelled_utc")
    assert (
        len(finding_of(shifted, "zone_mislabel").rows) == len(times)
        and "-2 h would" in finding_of(shifted, "zone_mislabel").message
    )
    assert gap_counts(shifted) == gap_counts(true)  # on the mended clock
    for name in ("ES_5m", "MNQ_5m"):
        times, report = report_on(f"bars_5m/{name}")
        rolls = times.iloc[finding_of(report, "roll").rows].dt.strftime("%Y-%m-%d").tolist()
        assert rolls == ["2024-06-17", "2024-09-16", "2024-12-16", "2025-03-17", "2025-06-16"]  # the third Mondays


@pytest.mark.parametrize(
    ("ratio", "split"),
    [(2.0, True), (1 / 1.25, True), (1 / 1.5, True), (1 / 3, True), (0.1, True), (2.15, False), (0.7, False),
     (0.6, False), (0.55, False)],
)  # fmt: skip
def test_check_bars_overnight_jump_is_adjustment_at_the_ratio_of_a_split_alone(clean, ratio, split):
    day = (clean["timestamp"].dt.tz_convert("America/Chicago") + pd.Timedelta("7h")).dt.date
    first = int(day.drop_duplicates().index[9])
    raw = clean.copy()
    raw.loc[first:, PRICES] *= ratio
    found = finding_of(report_of(raw, NO_TICK), "adjustment")
    assert (found is not None and found.rows.tolist() == [first]) == split and (split or found is None)
