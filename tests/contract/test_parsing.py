"""Cells of bars: times and numbers in every usual spelling, columns of any name, and rows that cannot be bars."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import BarsError, NotPreparedError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import Mirror, RawBarSpec, import_bars, load_bars, parse_bars
from tests.data.bar_findings import finding_of

UTC = pd.date_range("2024-03-05 14:30", periods=40, freq="1min", tz="UTC")
WANTED = UTC.as_unit("ns").asi8
LATER = UTC.union(UTC + pd.Timedelta("20D"))  # the 25th settles what is the month
NEW_YORK_NIGHT = pd.date_range("2024-11-03 04:00", "2024-11-03 08:00", freq="1min", tz="UTC")
ONE_BAR = {"open": 1.0, "high": 1.0, "low": 1.0, "close": 1.0, "volume": 1.0}


@pytest.fixture
def place(tmp_path) -> Workspace:
    return Workspace(tmp_path / "w")


def times(values, zone=None, stamp="start", minutes=1):
    """(starts in ns, kinds of findings) of bars with these times."""
    raw = pd.DataFrame({"timestamp": pd.Series(values)}).assign(**ONE_BAR)
    start_ns, _, findings, length = parse_bars(raw, RawBarSpec(minutes, zone, stamp), "test.csv")
    assert length == minutes
    return start_ns, {finding.kind for finding in findings}


def numbers(prices, decimal=None, **columns):
    """(values, kinds of findings) of bars that open, trade and close at these prices, but for the given columns."""
    prices = pd.Series(prices)
    stamps = pd.date_range("2024-03-05", periods=len(prices), freq="1min", tz="UTC")
    raw = pd.DataFrame({"timestamp": stamps} | dict.fromkeys(("open", "high", "low", "close"), prices) | columns)
    _, values, findings, _ = parse_bars(raw, RawBarSpec(1, decimal=decimal), "test.csv")
    return values, {finding.kind for finding in findings}


# ---- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("kind", [int, float, str, None])
def test_times_of_any_unit_as_datetimes_or_epochs_give_the_same_starts(unit, kind):
    epochs = WANTED // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    values = UTC.as_unit(unit) if kind is None else epochs.astype(kind)
    start_ns, kinds = times(values)
    assert (start_ns == WANTED).all() and kinds == (set() if kind is None else {"epoch"})


def test_times_as_python_objects_or_epochs_with_decimals_give_the_same_starts():
    for values in ([stamp.to_pydatetime() for stamp in UTC], [f"{number // 10**9}.0" for number in WANTED]):
        assert (times(values)[0] == WANTED).all()


@pytest.mark.parametrize(
    "form",
    [
        "%Y-%m-%d %H:%M:%S+00:00", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S UTC", "%Y-%m-%dT%H:%M:%S.000+0000",
        "%m/%d/%Y %H:%M:%S +0000", "%Y-%m-%d %H:%M", "%Y%m%d %H%M%S", "%Y.%m.%d %H:%M", "%d.%m.%Y %H:%M",
        "%m/%d/%Y %I:%M %p", "%d/%m/%Y %H:%M:%S",
    ],
)  # fmt: skip
def test_times_as_text_of_common_platforms_give_the_same_starts(form):
    aware = form.endswith(("0", "Z", "UTC"))
    start_ns, kinds = times(LATER.strftime(form), zone=None if aware else "UTC")
    assert (start_ns == LATER.as_unit("ns").asi8).all() and kinds == {"text_time"} | ({"zone"} if not aware else set())


def test_times_with_two_utc_offsets_or_in_another_zone_are_converted():
    local = NEW_YORK_NIGHT.tz_convert("America/New_York")
    assert (times([stamp.isoformat() for stamp in local])[0] == local.as_unit("ns").asi8).all()
    start_ns, kinds = times(UTC.tz_convert("America/New_York"))
    assert (start_ns == WANTED).all() and kinds == {"zone"}
    assert times(UTC, zone="America/Chicago")[1] == {"zone_unused"}


def test_times_without_zone_need_one():
    with pytest.raises(BarsError, match=r"carry no zone.*Next: say where its clock stands"):
        times(UTC.tz_localize(None))
    start_ns, kinds = times(UTC.tz_convert("America/Chicago").tz_localize(None), zone="America/Chicago")
    assert (start_ns == WANTED).all() and kinds == {"zone"}
    with pytest.raises(SettingsError, match="Unknown time zone"):
        times(UTC, zone="Chicago")


def test_times_in_the_hour_that_occurs_twice_are_resolved_by_row_order_or_refused():
    wall = NEW_YORK_NIGHT.tz_convert("America/New_York").tz_localize(None)
    for order in (slice(None), slice(None, None, -1)):  # newest first is as good
        start_ns, kinds = times(wall[order], zone="America/New_York")
        assert (start_ns == NEW_YORK_NIGHT.as_unit("ns").asi8[order]).all() and kinds == {"zone", "repeated_hour"}
    once = pd.date_range("2024-11-03 00:30", "2024-11-03 01:30", freq="1min")
    with pytest.raises(BarsError, match=r"31 rows, first 30 .*occurs twice in America/New_York.*export in UTC"):
        times(once, zone="America/New_York")
    hours = pd.date_range("2023-11-05 05:00", periods=120, freq="1min", tz="UTC"), NEW_YORK_NIGHT[60:180]
    utc = hours[0].append(hours[1])  # nothing but these hours, of two years
    wall = utc.tz_convert("America/New_York").tz_localize(None)
    for order in (slice(None), slice(None, None, -1)):
        assert (times(wall[order], zone="America/New_York")[0] == utc.as_unit("ns").asi8[order]).all()
    with pytest.raises(BarsError, match=r"60 rows, first 120 "):  # those of the second year
        times(wall[:180], zone="America/New_York")
    gone = pd.date_range("2024-03-10 01:58", "2024-03-10 02:01", freq="1min")
    with pytest.raises(BarsError, match=r"2 rows, first 2 \(2024-03-10 02:00:00\).*does not exist in America/Chicago"):
        times(gone, zone="America/Chicago")


def test_times_at_the_end_of_bars_are_moved_to_their_start():
    start_ns, kinds = times(UTC + pd.Timedelta("1min"), stamp="end")
    assert (start_ns == WANTED).all() and kinds == {"end_stamped"}
    five = pd.date_range("2024-03-05 14:35", periods=10, freq="5min", tz="UTC")
    assert (times(five, stamp="end", minutes=5)[0] == five.as_unit("ns").asi8 - 5 * 60 * 10**9).all()
    closes = UTC + pd.Timedelta("59.999s")
    assert (times(closes, stamp="end")[0] == WANTED).all()
    with pytest.raises(BarsError, match="close times: give stamp='end'"):
        times(closes)


def changed(row: int, value) -> list:
    """ISO times with a zone, of which one is another text."""
    return [value if k == row else text for k, text in enumerate(UTC.strftime("%Y-%m-%d %H:%M:%SZ"))]


@pytest.mark.parametrize(
    ("values", "zone", "words"),
    [
        ([1, 2, 3], None, r"no epoch in s, ms, us or ns \(1 to 3\)"),
        ([20240305, 20240306], None, "no epoch"),
        ([1709649000, 1709649060000], None, "no epoch"),
        ([-5, 4], None, "no epoch"),
        ([True, False], None, "timestamp holds bool values"),
        (["03/05/2024 14:30", "03/05/2024 14:31"], "UTC", "month first and with the day first"),
        (["soon", "later"], "UTC", "timestamp cannot be read in row 0: 'soon'"),
        (changed(7, "rubbishZ"), None, r"timestamp is not ISO text with a zone in row 7 \(NaT\): 'rubbishZ'"),
        (changed(7, "2024-13-05 14:30Z"), None, "row 7 .*: '2024-13-05"),
        (changed(3, "2024-03-05 14:33:00"), None, r"not ISO text with a zone in row 3 .*: '2024-03-05 14:33:00'"),
        (changed(5, None), None, "timestamp is empty in row 5"),
        ([*WANTED[:3] // 10**9, None], None, "timestamp is empty in row 3"),
        ([*map(str, WANTED[:3]), "yesterday"], None, "timestamp is not an epoch in ns in row 3 .*'yesterday'"),
        (np.array(["2024-03-05T14:30", "1869-03-05T14:31"], "M8[s]"), "UTC", "outside the years 1970 to 2099 in row 1"),
        (np.array(["2024-03-05T14:30", "2100-03-05T14:31"], "M8[s]"), "UTC", "outside the years 1970 to 2099 in row 1"),
        (changed(9, "2024-03-05 14:39:17Z"), None, r"off the 1-minute grid: row 9 \(2024-03-05 14:39:17"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_read_are_refused_with_row_and_value(values, zone, words):
    with pytest.raises(BarsError, match=words):
        times(values, zone)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (["4500.25", "4501"], [4500.25, 4501.0]),
        (["4500,25", "4501"], [4500.25, 4501.0]),
        (["4,500.25", "4,501.00"], [4500.25, 4501.0]),
        (["4.500,25", "4.501,5"], [4500.25, 4501.5]),
        (["1,234,567", "1,234,568"], [1234567.0, 1234568.0]),
        (["1.234.567", "1.234.568"], [1234567.0, 1234568.0]),
        (["4 500,25", "4\u00a0501,00"], [4500.25, 4501.0]),
        (["4'500.25", "4501.5"], [4500.25, 4501.5]),
        (["1.25e3", "2E-1"], [1250.0, 0.2]),
        ([".5", "0.123"], [0.5, 0.123]),
        (["0,123", "0,5"], [0.123, 0.5]),
        (["0.123", "0.456"], [0.123, 0.456]),
    ],
)
def test_numbers_as_text_in_any_notation_give_their_values(text, wanted):
    values, kinds = numbers(text)
    assert values["close"].tolist() == wanted and kinds == {"text_numbers"}


def test_numbers_that_mean_two_things_take_the_mark_of_other_columns_or_the_given_one():
    more = {"open": ["4,500", "4,501"], "low": ["4,500", "4,501"]}
    assert numbers(["4,500.5", "4,501.5"], **more)[0]["open"].tolist() == [4500.0, 4501.0]
    assert numbers([4500.5, 4501.5], **more)[0]["open"].tolist() == [4500.0, 4501.0]
    with pytest.raises(BarsError, match=r"'4,500' can be read as a fraction or as thousands.*decimal=','.*--decimal"):
        numbers(["4,500", "4,501"])
    assert numbers(["4,500", "4,501"], ",")[0]["close"].tolist() == [4.5, 4.501]
    assert numbers(["4,500", "4,501"], ".")[0]["close"].tolist() == [4500.0, 4501.0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"high": ["1.5", "n.a."]}, r"high is not a number in row 1 \(2024-03-05 00:01:00\+00:00\): 'n\.a\.'"),
        ({"volume": ["7", "many"]}, "volume is not a number in row 1 .*'many'"),
        ({"volume": ["7", "[" * 5_000]}, r"volume .* in row 1 .*: .\[{59}(?!\[)"),
        ({"close": ["", "1.5"]}, "^close is empty, not a number or infinite in row 0 "),
        ({"close": ["1.5", "inf"]}, "^close is empty, not a number or infinite in row 1 "),
        ({"close": ["4500,25", "4501.25"]}, "close is not a number in row 0 .*'4500,25'"),
        ({"close": [True, False]}, "column close holds bool values"),
    ],
)
def test_numbers_that_cannot_be_read_are_refused_with_column_row_and_text(columns, words):
    with pytest.raises(BarsError, match=words):
        numbers([1.5, 1.5], **columns)


def test_numbers_of_float32_are_read_to_their_shortest_decimals():
    prices = np.round(np.random.default_rng(0).uniform(0.01, 90000, 500), 2)
    prices = np.round(prices / 10 ** np.floor(np.log10(prices)), 6) * 10 ** np.floor(np.log10(prices))
    values, kinds = numbers(prices.astype(np.float32))
    shortest = np.array([float(str(price)) for price in prices.astype(np.float32)])
    assert kinds == {"float32"} and (values["close"] == shortest).mean() > 0.99
    assert np.abs(values["close"] / shortest - 1).max() < 1e-15 + 1e-7


# ---- rows and columns of a file --------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(make_raw, tmp_path):
    """A CSV of 400 bars with five bad rows after a blank line, its rows, and its lines."""
    lines = make_raw(400).to_csv(index=False).splitlines()
    for row, column, value in ((8, 3, "n/a-ish"), (18, 0, "yesterday"), (28, 2, "1"), (38, 5, "-3"), (48, 4, "")):
        cells = lines[row + 1].split(",")
        cells[column] = value
        lines[row + 1] = ",".join(cells)
    lines.insert(5, "")
    path = tmp_path / "spoiled.csv"
    path.write_text("\n".join(lines) + "\n")
    return path, [8, 18, 28, 38, 48], lines


def test_import_bars_bad_rows_are_refused_in_one_message_and_nothing_is_written(spoiled, place):
    path, rows, _ = spoiled
    with pytest.raises(BarsError, match=r"timestamp is not ISO text.*row 18 .*'yesterday'; also: low is not .* row 8 "
                       r".*'n/a-ish'; also: close is empty.*also: high is not the highest.*also: volume is negative"
                       r".*spoiled\.csv.*--skip-bad") as caught:  # fmt: skip
        import_bars(path, place, "MES")
    assert sorted(int(row) for found in caught.value.findings for row in found.rows) == rows
    assert not place.raw_bars("MES").exists()


def test_import_bars_skip_bad_leaves_bad_rows_and_ragged_lines_out_and_lists_them(spoiled, place, make_raw):
    path, rows, lines = spoiled
    lines[60] += ",one field more"
    path.write_text("\n".join(lines) + "\n")
    report = import_bars(path, place, "MES", RawBarSpec(skip_bad=True))
    message = finding_of(report, "skipped_rows").message
    assert message.startswith("6 bad rows of 400 skipped: row 8: '2024-03-05 00:08:00+00:00, ") and "n/a-ish" in message
    listed = pd.read_csv(place.raw / "MES_skipped.csv")
    assert listed["row"].tolist()[:5] == rows and listed["reason"].tolist()[1:] == [
        "timestamp is not ISO text with a zone", "high is not the highest or low not the lowest",
        "volume is negative or infinite", "close is empty, not a number or infinite",
        "line 61: another number of fields",
    ]  # fmt: skip
    assert listed["text"].iloc[5] == lines[60]
    kept, _ = load_bars(place, "MES")
    want = make_raw(400).drop(index=[*rows, 58])
    assert kept.index.equals(pd.DatetimeIndex(want["timestamp"]).as_unit(kept.index.unit))
    np.testing.assert_array_equal(kept["close"], want["close"])


def test_import_bars_skip_bad_of_clean_file_keeps_all_and_of_hopeless_file_is_refused(make_raw, place, tmp_path):
    make_raw(400).to_csv(tmp_path / "clean.csv", index=False)
    report = import_bars(tmp_path / "clean.csv", place, "MES", RawBarSpec(skip_bad=True))
    assert finding_of(report, "skipped_rows") is None and report.rows == 400
    assert not (place.raw / "MES_skipped.csv").exists()
    make_raw(400).assign(high=1.0).to_csv(tmp_path / "hopeless.csv", index=False)
    with pytest.raises(BarsError, match=r"Every row is bad \[.*hopeless.csv\].*row 0: .*high is not the highest"):
        import_bars(tmp_path / "hopeless.csv", place, "MES", RawBarSpec(skip_bad=True))
    by_time = make_raw(400).set_index("timestamp")
    by_time = pd.concat([by_time, by_time[7:8].assign(close=np.nan)])  # a bad row at the minute of a good one
    assert import_bars(by_time, place, "MES", RawBarSpec(skip_bad=True)).rows == 400


def test_import_bars_lines_with_extra_fields_are_refused_with_their_numbers(make_raw, place, tmp_path):
    lines = make_raw(400).to_csv(index=False).splitlines()
    for number in (101, 201):
        lines[number - 1] += ",more"
    (tmp_path / "long.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(BarsError, match=r"line 101: .*,more'; line 201: .*--skip-bad"):
        import_bars(tmp_path / "long.csv", place, "MES")


def test_import_bars_with_column_mapping_reads_mapped_columns(make_raw, place, tmp_path):
    raw = make_raw(400)
    spelled = raw.rename(columns={"close": "Schluss", "open": "Anfang"}).assign(close=1.0)  # a decoy
    spelled.to_csv(tmp_path / "german.csv", index=False)
    spec = RawBarSpec(columns=(("close", "Schluss"), ("open", "Anfang")))
    import_bars(tmp_path / "german.csv", place, "MES", spec)
    kept, _ = load_bars(place, "MES")
    np.testing.assert_array_equal(kept[["open", "close"]], raw[["open", "close"]])
    adjusted = raw.rename(columns={"close": "Close"}).assign(**{"Close": 1.0, "Adj Close": raw["close"]})
    adjusted.to_csv(tmp_path / "adjusted.csv", index=False)
    import_bars(tmp_path / "adjusted.csv", place, "ES", RawBarSpec(columns=(("close", "Adj Close"),)))
    np.testing.assert_array_equal(load_bars(place, "ES")[0]["close"], raw["close"])
    with pytest.raises(BarsError, match=r"Schlus=|did you mean|one of 'timestamp'"):
        import_bars(tmp_path / "german.csv", place, "MES", RawBarSpec(columns=(("close", "Schlus"),)))
    with pytest.raises(SettingsError, match=r"columns.*'clse', wanted timestamp, open"):
        RawBarSpec(columns=(("clse", "Schluss"),))


def test_load_bars_unknown_symbol_error_lists_existing_symbols(make_raw, place):
    for symbol in ("MES", "NQ"):
        import_bars(make_raw(400), place, symbol)
    with pytest.raises(NotPreparedError, match="symbols here: MES, NQ"):
        load_bars(place, "MESS")


def test_import_bars_bucket_address_twice_downloads_file_once(gcs_bucket, make_raw, place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = Mirror(gcs_bucket, tmp_path / "theirs")
    make_raw(400).to_csv(there.folder / "bars.csv", index=False)
    (there.folder / "other.csv").write_text("not asked for")
    there.push()
    copies = []
    for _ in range(2):
        assert import_bars(f"{gcs_bucket}/bars.csv", place, "MES").rows == 400
        found = {path: path.stat() for path in (tmp_path / "cache").rglob("*.csv")}
        copies.append({path.name: (one.st_ino, one.st_mtime_ns) for path, one in found.items()})
    assert list(copies[0]) == ["bars.csv"] and copies[0] == copies[1]
    with pytest.raises(WorkspaceError, match=r"absent\.csv"):
        import_bars(f"{gcs_bucket}/absent.csv", place, "MES")
