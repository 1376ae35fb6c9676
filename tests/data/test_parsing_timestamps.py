"""Timestamps in every spelling of issue and habit, against pandas' own conversion."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.parsing import parse_timestamps
from ml_factory.errors import BarsError, SettingsError

UTC = pd.date_range("2024-03-05 14:30", periods=40, freq="1min", tz="UTC")
WANTED = UTC.as_unit("ns").asi8


def read(values, zone=None, stamp="start", minutes=1):
    reported = {"zone": zone, "stamp": stamp, "minutes": minutes, "where": "test.csv"}
    start_ns, findings, length = parse_timestamps(pd.Series(values), **reported)
    assert length == minutes
    return start_ns, {finding.kind for finding in findings}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parse_timestamps_utc_datetimes_of_any_unit_return_same_ns(unit):
    start_ns, kinds = read(UTC.as_unit(unit))
    assert (start_ns == WANTED).all() and kinds == set()


def test_parse_timestamps_other_zone_converts_to_utc_and_reports_zone():
    start_ns, kinds = read(UTC.tz_convert("America/New_York"))
    assert (start_ns == WANTED).all() and kinds == {"zone"}


@pytest.mark.parametrize(("unit", "divisor"), [("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)])
@pytest.mark.parametrize("kind", [int, float, str])
def test_parse_timestamps_epochs_of_any_unit_return_utc_ns(unit, divisor, kind):
    epochs = WANTED // divisor
    values = {int: epochs, float: epochs.astype(float), str: epochs.astype(str)}[kind]
    start_ns, kinds = read(values)
    assert (start_ns == WANTED).all() and kinds == {"epoch"}


@pytest.mark.parametrize("numbers", [[1, 2, 3], [20240305, 20240306], [1709649000, 1709649060000], [-5, 4]])
def test_parse_timestamps_numbers_outside_epoch_range_raise_bars_error(numbers):
    with pytest.raises(BarsError, match="no epoch"):
        read(numbers)


def test_parse_timestamps_naive_times_need_zone():
    naive = UTC.tz_localize(None)
    with pytest.raises(BarsError, match=r"carry no zone.*Next: say where its clock stands"):
        read(naive)
    assert (read(naive, zone="UTC")[0] == WANTED).all()
    start_ns, kinds = read(UTC.tz_convert("America/Chicago").tz_localize(None), zone="America/Chicago")
    assert (start_ns == WANTED).all() and kinds == {"zone"}


def test_parse_timestamps_zone_given_for_aware_times_reports_zone_unused():
    start_ns, kinds = read(UTC, zone="America/Chicago")
    assert (start_ns == WANTED).all() and kinds == {"zone_unused"}


def test_parse_timestamps_unknown_zone_raises_settings_error():
    with pytest.raises(SettingsError, match="Unknown time zone"):
        read(UTC, zone="Chicago")


def test_parse_timestamps_repeated_dst_hour_resolves_by_row_order():
    moments = pd.date_range("2024-11-03 04:00", "2024-11-03 08:00", freq="1min", tz="UTC")
    wall = moments.tz_convert("America/New_York").tz_localize(None)
    assert wall.duplicated().sum() == 60
    for order in (slice(None), slice(None, None, -1)):  # newest first is as good
        start_ns, kinds = read(wall[order], zone="America/New_York")
        assert (start_ns == moments.as_unit("ns").asi8[order]).all() and kinds == {"zone", "repeated_hour"}


def test_parse_timestamps_repeated_dst_hour_present_once_raises_bars_error():
    wall = pd.date_range("2024-11-03 00:30", "2024-11-03 01:30", freq="1min")
    with pytest.raises(BarsError, match=r"31 rows, first 30 .*occurs twice in America/New_York.*export in UTC"):
        read(wall, zone="America/New_York")


def test_parse_timestamps_nonexistent_dst_hour_raises_bars_error():
    wall = pd.date_range("2024-03-10 01:58", "2024-03-10 02:01", freq="1min")
    with pytest.raises(BarsError, match=r"2 rows, first 2 \(2024-03-10 02:00:00\).*does not exist in America/Chicago"):
        read(wall, zone="America/Chicago")


@pytest.mark.parametrize(
    "form",
    [
        "%Y-%m-%d %H:%M:%S+00:00",
        "%Y-%m-%dT%H:%M:%SZ",
        "%Y-%m-%d %H:%M:%S UTC",
        "%Y-%m-%dT%H:%M:%S.000+0000",
        "%m/25/%Y %H:%M:%S +0000",
    ],
)
def test_parse_timestamps_text_with_zone_returns_utc_ns(form):
    start_ns, kinds = read(UTC.strftime(form))
    wanted = WANTED + 20 * 24 * 3600 * 10**9 * ("25" in form)  # a 25th, since 03/05 could be May
    assert (start_ns == wanted).all() and kinds == {"text_time"}


def test_parse_timestamps_text_with_two_utc_offsets_returns_utc_ns():
    local = pd.date_range("2024-11-03 04:00", "2024-11-03 08:00", freq="1min", tz="UTC").tz_convert("America/New_York")
    start_ns, _ = read([stamp.isoformat() for stamp in local])
    assert (start_ns == local.as_unit("ns").asi8).all()


@pytest.mark.parametrize(
    "form",
    ["%Y-%m-%d %H:%M", "%Y%m%d %H%M%S", "%Y.%m.%d %H:%M", "%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M %p", "%d/%m/%Y %H:%M:%S"],
)
def test_parse_timestamps_naive_text_of_common_platforms_returns_utc_ns(form):
    days = UTC.union(UTC + pd.Timedelta("20D"))  # the 25th settles what is the month
    start_ns, kinds = read(days.strftime(form), zone="UTC")
    assert (start_ns == days.as_unit("ns").asi8).all() and kinds == {"text_time", "zone"}


def test_parse_timestamps_ambiguous_month_and_day_raises_bars_error():
    with pytest.raises(BarsError, match="month first and with the day first"):
        read(["03/05/2024 14:30", "03/05/2024 14:31"], zone="UTC")


@pytest.mark.parametrize("bad", ["rubbish", "2024-13-05 14:30", ""])
def test_parse_timestamps_unreadable_text_error_names_row(bad):
    text = list(UTC.strftime("%Y-%m-%d %H:%M:%SZ"))
    text[7] = bad + ("Z" if bad else "")
    with pytest.raises(BarsError, match=r"row 7|row 7 "):
        read(text)


def test_parse_timestamps_zone_in_some_rows_only_raises_bars_error():
    text = list(UTC.strftime("%Y-%m-%d %H:%M:%SZ"))
    text[3] = text[3][:-1]
    with pytest.raises(BarsError, match=r"some timestamps carry a zone and some do not \(row 3"):
        read(text)


def test_parse_timestamps_empty_timestamp_error_names_row():
    values = pd.Series(UTC)
    values[5] = pd.NaT
    with pytest.raises(BarsError, match="timestamp is empty in row 5"):
        read(values)


def test_parse_timestamps_end_stamps_shift_to_bar_start():
    start_ns, kinds = read(UTC + pd.Timedelta("1min"), stamp="end")
    assert (start_ns == WANTED).all() and kinds == {"end_stamped"}
    five = pd.date_range("2024-03-05 14:35", periods=10, freq="5min", tz="UTC")
    assert (read(five, stamp="end", minutes=5)[0] == five.as_unit("ns").asi8 - 5 * 60 * 10**9).all()


def test_parse_timestamps_close_times_just_before_minute_need_stamp_end():
    closes = UTC + pd.Timedelta("59.999s")
    assert (read(closes, stamp="end")[0] == WANTED).all()
    with pytest.raises(BarsError, match="close times: give stamp='end'"):
        read(closes)


def test_parse_timestamps_off_grid_timestamps_raise_bars_error():
    values = pd.Series(UTC)
    values[9] += pd.Timedelta("17s")
    with pytest.raises(BarsError, match=r"off the 1-minute grid: row 9 \(2024-03-05 14:39:17"):
        read(values)
    with pytest.raises(BarsError, match="off the 5-minute grid"):
        read(UTC, minutes=5)


@pytest.mark.parametrize("year", ["1869", "2100", "3024"])
def test_parse_timestamps_year_outside_1970_to_2099_raises_bars_error(year):
    with pytest.raises(BarsError, match=r"outside the years 1970 to 2099: row 1 "):
        read(np.array(["2024-03-05T14:30", f"{year}-03-05T14:31"], "datetime64[s]"), zone="UTC")


def test_parse_timestamps_python_datetime_objects_return_utc_ns():
    assert (read([stamp.to_pydatetime() for stamp in UTC])[0] == WANTED).all()
    assert (read(pd.Series(list(UTC), dtype=object))[0] == WANTED).all()


def test_parse_timestamps_booleans_raise_bars_error():
    with pytest.raises(BarsError, match="bool"):
        read(np.array([True, False]))


def test_parse_timestamps_epochs_as_text_with_decimals_are_seconds():
    assert (read([f"{number // 10**9}.0" for number in WANTED])[0] == WANTED).all()
