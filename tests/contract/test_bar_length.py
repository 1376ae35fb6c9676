"""Raw bars of other lengths than a minute: how their length is known, and where they are kept."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError
from ml_factory.storage.workspace import BAR_MINUTES, Workspace, parse_raw_bars_name, workspace_symbols
from tests.contract import doors

MINUTES = synthetic_bars(days=6, seed=3)


def joined(bars: pd.DataFrame, minutes: int) -> pd.DataFrame:
    """Longer bars, made by pandas; the synthetic sessions begin at a whole hour."""
    how = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    return bars.resample(f"{minutes}min").agg(how).dropna(subset=["close"])


def check(bars: pd.DataFrame, **spec):
    return doors.validate_bars(bars.reset_index(), doors.RawBarSpec(**spec), where="MES.csv", symbol="MES")


@pytest.mark.parametrize("minutes", BAR_MINUTES)
def test_check_bars_infers_bar_minutes_from_usual_spacing_on_grid(minutes):
    bars, report = check(joined(MINUTES, minutes))
    reported = [found.message for found in report.findings if found.kind == "bar_length"]
    assert report.minutes == minutes and len(bars) == len(joined(MINUTES, minutes))
    assert reported == ([] if minutes == 1 else [f"bars of {minutes} min: their usual distance, and all stand on the "
                                             f"{minutes}-minute grid"])  # fmt: skip


def test_infer_bar_minutes_sparse_one_minute_bars_returns_1():
    """A fifth of the minutes traded, so that 5 minutes may well be the usual distance: one bar off its grid tells."""
    steps = np.array([5, 5, 5, 10, 5, 1, 4, 5, 5, 20])
    stamp_ns = np.cumsum(steps) * doors.MINUTE_NS
    assert doors.infer_bar_minutes(stamp_ns) == 1 and doors.infer_bar_minutes(stamp_ns[:5]) == 5
    assert doors.infer_bar_minutes(stamp_ns[:3]) == 1  # two distances say nothing
    assert doors.infer_bar_minutes(np.arange(40) * 7 * doors.MINUTE_NS) == 1  # no such bars


def test_market_for_bars_longer_than_a_minute_infers_calendar():
    """Of 78 bars of a stock's session the first begins at the open, where a closing print would end."""
    for calendar, minutes in (("us_equity", 5), ("us_equity", 30), ("cme", 5), ("24h", 5), ("fx", 5), ("fx", 60)):
        bars = joined(synthetic_bars(days=25, seed=1, calendar=calendar), minutes)
        assert doors.resolve_market_spec("ODD", bars, bar_minutes=minutes).calendar == calendar, (calendar, minutes)


# ---- in the workspace ------------------------------------------------------------------------------------------------


def test_import_bars_5_minute_bars_writes_raw_file_named_5m(tmp_path):
    place, five = Workspace(tmp_path), joined(MINUTES, 5)
    assert place.raw_bars("MES").name == "MES_1m.parquet"  # what is not there yet
    report = doors.import_bars(five.reset_index(), place, "MES")
    assert report.minutes == 5 and place.raw_bars("MES") == place.raw / "MES_5m.parquet"
    assert workspace_symbols(place) == ["MES"] and doors.raw_bar_minutes(place, "MES") == 5
    bars, reported = doors.load_bars(place, "MES")
    assert reported.minutes == 5 and np.array_equal(bars["close"], five["close"])
    assert parse_raw_bars_name("BRK.B_15m.parquet") == ("BRK.B", 15) and parse_raw_bars_name("A_1m_5m.parquet") == (
        "A_1m",
        5,
    )
    assert not any(
        map(parse_raw_bars_name, ("MES_7m.parquet", "MES_05m.parquet", "MES_5m.previous.parquet", "MES_120m.parquet"))
    )


def test_import_bars_second_bar_length_for_symbol_raises_and_keeps_raw_file(tmp_path):
    place, five = Workspace(tmp_path), joined(MINUTES, 5)
    doors.import_bars(MINUTES.reset_index(), place, "MES")
    before = place.raw_bars("MES").read_bytes()
    with pytest.raises(SettingsError, match=r"one length.*bars of 5 min.*wanted 1 min.*move MES_1m.parquet away"):
        doors.import_bars(five.reset_index(), place, "MES")
    with pytest.raises(SettingsError, match="one length"):
        doors.load_bars(place, "MES", doors.RawBarSpec(minutes=5))
    assert place.raw_bars("MES").read_bytes() == before and [path.name for path in place.raw.iterdir()] == [
        "MES_1m.parquet"
    ]
    place.raw_bars("MES").rename(place.raw / "kept.parquet")
    doors.import_bars(five.reset_index(), place, "MES")
    assert place.raw_bars("MES").name == "MES_5m.parquet"
    (place.raw / "ES_1m.parquet").write_bytes(place.raw_bars("MES").read_bytes())  # under a name that is not theirs
    with pytest.raises(BarsError, match=r"5 minutes apart, not 1.*SYMBOL_5m.parquet"):
        doors.load_bars(place, "ES")


def test_continuous_forced_roll_inside_5_minute_bar_joins_at_last_complete_bar(tmp_path):
    """The bar that joins two contracts is the last that both had when the change was decided, at the session's open."""
    five = joined(MINUTES, 5)
    old = five.assign(contract="ESH4", volume=np.linspace(200, 1, len(five)).round())
    new = (five + 10.0).assign(contract="ESM4", volume=np.linspace(1, 200, len(five)).round())
    table = pd.concat([old, new]).sort_index(kind="stable")
    market = doors.MarketSpec("ES", "cme", 0.25, True, bar_minutes=5)
    at = five.index[700] + pd.Timedelta(minutes=2)  # inside a bar, which is not complete by then
    _, rolls = doors.build_continuous_contract(table, doors.RollSpec(forced=(("ESM4", str(at)),)), market)
    forced = rolls[rolls["why"] == "forced"].iloc[0]
    assert forced["common"] == five.index[699]
    report = doors.import_bars(table.reset_index(), Workspace(tmp_path), "ES", roll=doors.RollSpec())
    assert report.minutes == 5


# ---- what the proof disturbs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [doors.TRUNCATE, *doors.PERTURBATIONS])
def test_perturb_5_minute_bars_keeps_past_and_passes_check_bars(way):
    five, first = check(joined(MINUTES, 5))[0], 800
    other = doors.perturb_future_bars(five, first, way, bar_minutes=5)
    pd.testing.assert_frame_equal(other.iloc[:first], five.iloc[:first], check_freq=False)
    checked, report = doors.validate_bars(other.reset_index(), doors.RawBarSpec(minutes=5), symbol="MES")
    assert report.minutes == 5 and len(checked) == len(other)
    if way == "delete and insert":
        assert len(other.index[first:].difference(five.index)) > 20  # bars where there was none
