"""What the proof is made of: lawful futures, cuts where leaks live, comparisons of bits, sampled days, certificates."""

import json

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import NotPreparedError
from tests.contract import doors
from tests.contract.doors import certificate as kept
from tests.leakage.catalogue import bars_with_events

FIRST = 20_000


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return bars_with_events()


@pytest.mark.parametrize("way", [*doors.PERTURBATIONS, doors.TRUNCATE])
@pytest.mark.parametrize("first", [FIRST, 30_001])
def test_perturb_keeps_bars_before_cut_and_changes_bars_after(way, first, bars):
    other = doors.perturb_future_bars(bars, first, way)
    assert other.index[:first].equals(bars.index[:first])
    assert other[bars.columns].iloc[:first].to_numpy().tobytes() == bars.iloc[:first].to_numpy().tobytes()
    if way == doors.TRUNCATE:
        assert len(other) == first
        return
    assert not other[bars.columns].iloc[first:].equals(bars.iloc[first:])
    if way in doors.SAME_TIMES:
        assert other.index.equals(bars.index)
    # Lawful: the contract of bars takes it as it is.
    checked, _ = doors.validate_bars(other.reset_index(), symbol="DEMO")
    assert checked.index.equals(other.index) and (other.index.asi8 % doors.MINUTE_NS == 0).all()


@pytest.mark.parametrize("way", doors.PERTURBATIONS)
def test_perturb_bars_without_volume_or_with_contracts_stays_valid(way, bars):
    contracts = bars.drop(columns="volume").assign(contract=np.arange(len(bars), dtype=np.int32) // 10_000)
    other = doors.perturb_future_bars(contracts, FIRST, way)
    assert other["contract"].iloc[:FIRST].equals(contracts["contract"].iloc[:FIRST])
    assert other.index.is_monotonic_increasing and other.index.is_unique
    assert ("volume" in other) == (way == "rewrite")
    assert other["contract"].is_monotonic_increasing  # an inserted bar is of the contract of its day
    assert np.isfinite(other[["open", "high", "low", "close"]].to_numpy()).all()


def test_perturb_rethin_removes_and_adds_bars_and_follows_its_seed(bars):
    other = doors.perturb_future_bars(bars, FIRST, "rethin")
    assert len(bars.index[FIRST:].difference(other.index)) > 1_000
    assert len(other.index[FIRST:].difference(bars.index)) > 100
    one, again, other = (doors.perturb_future_bars(bars, FIRST, "rewrite", seed) for seed in (1, 1, 2))
    assert one.equals(again) and not one.equals(other)
    assert all(len(doors.perturb_future_bars(bars, len(bars) - 1, way)) >= len(bars) - 1 for way in doors.PERTURBATIONS)


def test_choose_cuts_stand_at_moments_given_by_reason(bars):
    cuts = doors.choose_cut_points(bars, "cme", 60, earliest=9_000)
    assert len(cuts) == 60 == len({cut.first for cut in cuts})
    assert (
        cuts
        == doors.choose_cut_points(bars, "cme", 60, earliest=9_000)
        != doors.choose_cut_points(bars, "cme", 60, seed=1, earliest=9_000)
    )
    start = bars.index.as_unit("ns").asi8
    for cut in cuts:
        assert cut.first >= 9_000
        assert cut.at == start[cut.first - 1] + doors.MINUTE_NS and cut.quiet == start[cut.first]
        silent = (cut.quiet - cut.at) // doors.MINUTE_NS
        if cut.why == "session end":
            assert silent >= 60
        if cut.why == "gap":
            assert silent > 0
        if cut.why == "frame edge":
            assert pd.Timestamp(cut.quiet).minute % 15 == 0
    clocks = [pd.Timestamp(cut.quiet, tz="UTC") for cut in cuts if cut.why == "daylight saving"]
    assert clocks and clocks[0].date() == pd.Timestamp("2024-03-10").date()


def test_choose_cuts_cover_a_short_day_and_the_last_bar_of_a_session(bars):
    short = bars.drop(bars.index[(bars.index >= "2024-03-12 14:00") & (bars.index < "2024-03-12 22:00")])
    cuts = doors.choose_cut_points(short, "cme", 60)
    (day,) = [pd.Timestamp(cut.at) for cut in cuts if cut.why == "short day"]
    assert pd.Timestamp("2024-03-12 13:30") < day <= pd.Timestamp("2024-03-12 14:00")
    ends = [cut for cut in cuts if cut.why == "one bar before a session end"]
    start = short.index.as_unit("ns").asi8
    assert ends and all(start[cut.first + 1] - start[cut.first] > 30 * doors.MINUTE_NS for cut in ends)


def rows(values, names=("a", "b")) -> pd.DataFrame:
    index = pd.DatetimeIndex(np.arange(len(values)), tz="UTC")
    return pd.DataFrame(np.asarray(values, np.float32), index=index, columns=names)


def test_differences_compare_bits():
    clean = rows([[1, 2], [3, np.nan], [5, 6]])
    assert doors.compare("a", clean.astype(np.float64), clean, "it") == []  # a wider type of the same values
    (found,) = doors.compare("a", rows([[1, 2], [3, np.nan], [5, np.nextafter(np.float32(6), 9)]]), clean, "it")
    assert (found.column, found.rows, pd.Timestamp(found.first_row).nanosecond) == ("b", 1, 2)
    (zero,) = doors.compare("a", rows([[-0.0, 1]]), rows([[0.0, 1]]), "it")
    assert zero.column == "a"
    one, two = (
        rows([[1, 2], [3, 4]]).assign(side=pd.Categorical(side, order))
        for side, order in ((["x", "y"], ["x", "y"]), (["y", "x"], ["y", "x"]))
    )
    assert [leak.column for leak in doors.compare("a", one, two, "it")] == ["side"]
    same = one.assign(side=pd.Categorical(list("xy"), list("yx")))
    assert doors.compare("a", same, one, "it") == []


def test_differences_of_a_row_that_is_there_twice_are_reported():
    one = pd.DataFrame({"a": [1.0, 2.0]}, index=pd.date_range("2024", periods=2, freq="min", tz="UTC"))
    for got, wanted in ((one.iloc[[0, 1, 1]], one), (one, one.iloc[[0, 0, 1]])):
        assert [leak.column for leak in doors.compare("features", got, wanted, "a cut")] == [doors.ROWS]


def test_differences_added_or_missing_rows_and_columns_are_reported():
    clean = rows([[1, 2], [3, 4], [5, 6]])
    assert doors.compare("a", clean.iloc[:2], clean, "it")[0].column == doors.ROWS
    other = clean.rename(columns={"b": "c"})
    assert doors.compare("a", other, clean, "it")[0].column.startswith(doors.COLUMNS) and doors.compare(
        "a", other, clean, "it", extra=True
    )
    assert doors.compare("a", clean.assign(c=1), clean, "it") and not doors.compare(
        "a", clean.assign(c=1), clean, "it", extra=True
    )


def test_table_known_by_keeps_rows_that_are_proven_wherever_they_stand():
    assert doors.Table(rows([[1, 2], [3, 4], [5, 6]]), np.array([0, 9, 2])).known_by(2)["a"].tolist() == [1, 5]


# ---- own features on every row of sampled days -----------------------------------------------------------------------

FEBRUARY_20 = pd.Timestamp("2024-02-20", tz="UTC").value // doors.DAY_NS


@pytest.fixture(scope="module")
def twelve_days() -> pd.DataFrame:
    return synthetic_bars(days=12, seed=5, start="2024-02-12")


def ahead(bars, where):
    """The next bar's move where `where` says, of days since 1970 and minutes of the day; else the bar's own."""
    move = np.diff(np.log(bars.close), prepend=np.log(bars.close[0]))
    day, minute = np.divmod(np.asarray(bars.known_at) // 60_000_000_000, 1440)
    return np.where(where(day, minute), np.append(move[1:], 0.0), move)


def peeks_in_an_hour_of_the_week(bars):
    return ahead(bars, lambda day, minute: ((day + 3) % 7 == 2) & (minute // 60 == 9))


def peeks_in_a_minute_of_the_month(bars):
    return ahead(bars, lambda day, minute: (day == FEBRUARY_20) & (minute == 9 * 60 + 35))


def looks_back(bars):
    close = pd.Series(np.asarray(bars.close))
    return (close / close.rolling(20, min_periods=1).mean() - 1).to_numpy()


def found_of(bars, function, quick):
    with doors.own_features():
        doors.unproven_feature(function, memory=24)
        spec = doors.FeatureSpec(custom=(function.__name__,))
        return doors.check_custom_features(bars, doors.resolve_market_spec("DEMO", bars).to_dict(), spec, quick=quick)


def test_check_sampled_days_quick_reports_look_ahead_in_one_hour_of_week(twelve_days):
    (leak,) = found_of(twelve_days, peeks_in_an_hour_of_the_week, True).leaks
    assert leak.column == "peeks_in_an_hour_of_the_week" and pd.Timestamp(leak.first_row).hour == 9


def test_check_sampled_days_full_reports_look_ahead_in_one_minute_of_month(twelve_days):
    (leak,) = found_of(twelve_days, peeks_in_a_minute_of_the_month, False).leaks
    assert leak.rows == 1 and pd.Timestamp(leak.first_row).strftime("%d %H:%M") == "20 09:35"


def test_check_sampled_days_backward_looking_feature_reports_no_leak(twelve_days):
    found = found_of(twelve_days, looks_back, True)
    assert found.leaks == () and found.compared["features, rows of sampled days"] > 1_000


def test_check_sampled_days_feature_that_raises_is_reported_as_leak(twelve_days, monkeypatch):
    def fails(bars):
        raise ValueError("no value")

    monkeypatch.setitem(globals(), "fails", fails)
    (leak,) = found_of(twelve_days, fails, True).leaks
    assert "ValueError: no value" in leak.column


def test_sampled_days_cover_each_weekday_day_and_week_of_month():
    known_at = np.arange(19_723, 19_723 + 800) * doors.DAY_NS
    dates = pd.DatetimeIndex((doors.sample_calendar_days(known_at, 60) * doors.DAY_NS).astype("M8[ns]"))
    assert len(dates) == 60 and set(dates.day) == set(range(1, 32)) and set(dates.month) == set(range(1, 13))
    assert len({(date.weekday(), (date.day - 1) // 7) for date in dates}) == 35
    week = pd.DatetimeIndex(
        (doors.sample_calendar_days(known_at, 7, weekdays_only=True) * doors.DAY_NS).astype("M8[ns]")
    )
    assert sorted(date.weekday() for date in week) == list(range(7))


# ---- certificates ----------------------------------------------------------------------------------------------------

LEAK = doors.Leak("features", "rsi_14", 3, "2024-01-02", "2024-01-03", "random", "mirror", "window")
CUTS = tuple((f"2024-01-{day:02}", "random") for day in range(1, 11))


def certificate(*leaks: doors.Leak, form: str = "quick") -> doors.Certificate:
    return doors.Certificate("DEMO", 20, "a" * 64, "b", "c", form, CUTS, ("mirror",), {"features": 5}, leaks)


def need(tmp_path, **other):
    asked = {"symbol": "DEMO", "horizon": 20, "subject": "a" * 64, "code": "c"} | other
    return doors.require_certificate(tmp_path, asked.pop("symbol"), asked.pop("horizon"), **asked)


def test_require_certificate_accepts_matching_and_rejects_other_subject(tmp_path):
    made = certificate()
    assert kept.read_certificate(doors.write_certificate(tmp_path, made)) == made == need(tmp_path)
    for other in ({"subject": "b" * 64}, {"code": "d"}, {"horizon": 5}):
        with pytest.raises(NotPreparedError, match=r"prepare --symbol DEMO .*python -m ml_factory audit --symbol DEMO"):
            need(tmp_path, **other)


@pytest.mark.parametrize("harm", ["torn", "edited", "emptied", "other format", "a list"])
def test_read_certificate_damaged_file_returns_none(harm, tmp_path):
    path = doors.write_certificate(tmp_path, certificate(LEAK))
    stored = json.loads(path.read_text())
    harmed = {
        "torn": path.read_text()[:-40],
        "edited": json.dumps(stored | {"leaks": [], "passed": True}),
        "emptied": "",
        "other format": json.dumps(stored | {"format": 99}),
        "a list": "[1, 2]",
    }
    path.write_text(harmed[harm])
    assert kept.read_certificate(path) is None
    with pytest.raises(NotPreparedError, match="no certificate"):
        need(tmp_path)


def test_write_certificate_quick_form_keeps_full_form_unless_leak(tmp_path):
    path = doors.write_certificate(tmp_path, certificate(form="full"))
    doors.write_certificate(tmp_path, certificate())
    assert kept.read_certificate(path).form == "full"
    doors.write_certificate(tmp_path, certificate(LEAK))
    assert not kept.read_certificate(path).passed
