"""Timestamps in every spelling of issue and habit, against pandas' own conversion."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.parsing import parse_timestamps
from ml_factory.errors import BarsError, SettingsError

UTC = pd.date_range("2024-03-05 14:30", periods=40, freq="1min", tz="UTC")
WANTED = UTC.as_unit("ns").asi8


def read(values, zone=None, stamp="start", minutes=1):
    told = {"zone": zone, "stamp": stamp, "minutes": minutes, "where": "test.csv"}
    start_ns, findings, length = parse_timestamps(pd.Series(values), **told)
    assert length == minutes
    return start_ns, {finding.kind for finding in findings}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_utc_datetimes_of_any_unit(unit):
    start_ns, kinds = read(UTC.as_unit(unit))
    assert (start_ns == WANTED).all() and kinds == set()


def test_another_zone_is_converted_and_told():
    start_ns, kinds = read(UTC.tz_convert("America/New_York"))
    assert (start_ns == WANTED).all() and kinds == {"zone"}


@pytest.mark.parametrize(("unit", "divisor"), [("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)])
@pytest.mark.parametrize("kind", [int, float, str])
def test_epochs(unit, divisor, kind):
    epochs = WANTED // divisor
    values = {int: epochs, float: epochs.astype(float), str: epochs.astype(str)}[kind]
    start_ns, kinds = read(values)
    assert (start_ns == WANTED).all() and kinds == {"epoch"}


@pytest.mark.parametrize("numbers", [[1, 2, 3], [20240305, 20240306], [1709649000, 1709649060000], [-5, 4]])
def test_numbers_that_are_no_epoch(numbers):
    with pytest.raises(BarsError, match="no epoch"):
        read(numbers)


def test_naive_needs_a_zone():
    naive = UTC.tz_localize(None)
    with pytest.raises(BarsError, match=r"carry no zone.*Next: say where its clock stands"):
        read(naive)
    assert (read(naive, zone="UTC")[0] == WANTED).all()
    start_ns, kinds = read(UTC.tz_convert("America/Chicago").tz_localize(None), zone="America/Chicago")
    assert (start_ns == WANTED).all() and kinds == {"zone"}


def test_zone_given_for_times_that_carry_their_own():
    start_ns, kinds = read(UTC, zone="America/Chicago")
    assert (start_ns == WANTED).all() and kinds == {"zone_unused"}


def test_unknown_zone():
    with pytest.raises(SettingsError, match="Unknown time zone"):
        read(UTC, zone="Chicago")


def test_the_hour_that_occurs_twice_is_told_apart_by_order():
    moments = pd.date_range("2024-11-03 04:00", "2024-11-03 08:00", freq="1min", tz="UTC")
    wall = moments.tz_convert("America/New_York").tz_localize(None)
    assert wall.duplicated().sum() == 60
    for order in (slice(None), slice(None, None, -1)):  # newest first is as good
        start_ns, kinds = read(wall[order], zone="America/New_York")
        assert (start_ns == moments.as_unit("ns").asi8[order]).all() and kinds == {"zone", "repeated_hour"}


def test_the_hour_that_occurs_twice_but_stands_there_once():
    wall = pd.date_range("2024-11-03 00:30", "2024-11-03 01:30", freq="1min")
    with pytest.raises(BarsError, match=r"31 rows, first 30 .*occurs twice in America/New_York.*export in UTC"):
        read(wall, zone="America/New_York")


def test_the_hour_that_does_not_exist():
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
def test_text_with_a_zone(form):
    start_ns, kinds = read(UTC.strftime(form))
    wanted = WANTED + 20 * 24 * 3600 * 10**9 * ("25" in form)  # a 25th, since 03/05 could be May
    assert (start_ns == wanted).all() and kinds == {"text_time"}


def test_text_of_two_offsets():
    local = pd.date_range("2024-11-03 04:00", "2024-11-03 08:00", freq="1min", tz="UTC").tz_convert("America/New_York")
    start_ns, _ = read([stamp.isoformat() for stamp in local])
    assert (start_ns == local.as_unit("ns").asi8).all()


@pytest.mark.parametrize(
    "form",
    ["%Y-%m-%d %H:%M", "%Y%m%d %H%M%S", "%Y.%m.%d %H:%M", "%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M %p", "%d/%m/%Y %H:%M:%S"],
)
def test_naive_text_of_usual_platforms(form):
    days = UTC.union(UTC + pd.Timedelta("20D"))  # the 25th settles what is the month
    start_ns, kinds = read(days.strftime(form), zone="UTC")
    assert (start_ns == days.as_unit("ns").asi8).all() and kinds == {"text_time", "zone"}


def test_month_or_day_first_is_not_guessed():
    with pytest.raises(BarsError, match="month first and with the day first"):
        read(["03/05/2024 14:30", "03/05/2024 14:31"], zone="UTC")


@pytest.mark.parametrize("bad", ["rubbish", "2024-13-05 14:30", ""])
def test_unreadable_text_names_the_row(bad):
    text = list(UTC.strftime("%Y-%m-%d %H:%M:%SZ"))
    text[7] = bad + ("Z" if bad else "")
    with pytest.raises(BarsError, match=r"row 7|row 7 "):
        read(text)


def test_zone_in_some_rows_only():
    text = list(UTC.strftime("%Y-%m-%d %H:%M:%SZ"))
    text[3] = text[3][:-1]
    with pytest.raises(BarsError, match=r"some timestamps carry a zone and some do not \(row 3"):
        read(text)


def test_empty_stamp():
    values = pd.Series(UTC)
    values[5] = pd.NaT
    with pytest.raises(BarsError, match="timestamp is empty in row 5"):
        read(values)


def test_end_stamps_are_moved_to_the_start():
    start_ns, kinds = read(UTC + pd.Timedelta("1min"), stamp="end")
    assert (start_ns == WANTED).all() and kinds == {"end_stamped"}
    five = pd.date_range("2024-03-05 14:35", periods=10, freq="5min", tz="UTC")
    assert (read(five, stamp="end", minutes=5)[0] == five.as_unit("ns").asi8 - 5 * 60 * 10**9).all()


def test_close_times_a_moment_before_the_minute():
    closes = UTC + pd.Timedelta("59.999s")
    assert (read(closes, stamp="end")[0] == WANTED).all()
    with pytest.raises(BarsError, match="close times: give stamp='end'"):
        read(closes)


def test_off_minute_stamps():
    values = pd.Series(UTC)
    values[9] += pd.Timedelta("17s")
    with pytest.raises(BarsError, match=r"off the 1-minute grid: row 9 \(2024-03-05 14:39:17"):
        read(values)
    with pytest.raises(BarsError, match="off the 5-minute grid"):
        read(UTC, minutes=5)


@pytest.mark.parametrize("year", ["1869", "2100", "3024"])
def test_years_that_cannot_be(year):
    with pytest.raises(BarsError, match=r"outside the years 1970 to 2099: row 1 "):
        read(np.array(["2024-03-05T14:30", f"{year}-03-05T14:31"], "datetime64[s]"), zone="UTC")


def test_datetime_objects():
    assert (read([stamp.to_pydatetime() for stamp in UTC])[0] == WANTED).all()
    assert (read(pd.Series(list(UTC), dtype=object))[0] == WANTED).all()


def test_true_and_false_are_no_times():
    with pytest.raises(BarsError, match="bool"):
        read(np.array([True, False]))
