"""Every kind of bad input about bars: mapped, reported or refused as the contract says."""

import json

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import BarsError
from tests.contract.doors import MarketSpec, RawBarSpec, hash_bars, validate_bars
from tests.data.bar_findings import finding_of, kinds_of

MARKET = MarketSpec("TEST", "cme", 0.25, True)
PRICES = ["open", "high", "low", "close"]
EMPTY = "is empty, not a number or infinite"


def check(raw, market=MARKET, **spec):
    return validate_bars(raw, RawBarSpec(**spec), where="MES.csv", market=market)


def test_check_bars_clean_table_returns_unchanged_bars(make_raw):
    raw = make_raw()
    bars, report = check(raw)
    assert report.findings == () and report.rows == 600 and kinds_of(report) == ()
    assert str(bars.index.dtype) == "datetime64[ns, UTC]" and bars.index.name == "timestamp"
    assert bars.reset_index().equals(raw.assign(timestamp=raw["timestamp"].dt.as_unit("ns")))
    json.dumps(report.to_dict(), allow_nan=False)


def changed(row: int, name: str, value: float):
    """A function that puts one value into a table."""
    return lambda raw: raw.assign(**{name: raw[name].where(raw.index != row, value)})


REFUSED = {
    **{f"without {name}": (lambda raw, name=name: raw.drop(columns=name), {},
                           rf"Missing column '{name}' \[MES.csv\].*got columns .*wanted timestamp, open")
       for name in ("timestamp", *PRICES)},
    "long name": (lambda raw: raw.rename(columns={"close": "c" * 5000}), {}, r"got columns .{,300}wanted timestamp"),
    **{f"{name} {value}": (changed(33, name, value), {}, rf"{name} {words} in row 33 \(2024-03-05 00:33:00\+00:00\)")
       for name in PRICES for value, words in
       {np.nan: EMPTY, np.inf: EMPTY, -np.inf: EMPTY, 0.0: "is zero or negative", -5.0: "is zero or negative"}.items()},
    "two columns": (lambda raw: raw.assign(Close=raw["close"]), {}, "Two columns of one name"),
    "contracts": (lambda raw: pd.concat([raw.assign(contract="ESZ4"), raw.assign(contract="ESH5", volume=1e6)]), {},
                  "several values of 'contract'"),
    "differences": (lambda raw: raw.assign(**{name: raw[name] - 6000 for name in PRICES}), {},
                    "difference back-adjusted series"),
    "low high": (changed(12, "high", 1.0), {}, "high is not the highest or low not the lowest in row 12 "),
    "high low": (changed(12, "low", 1e6), {}, "high is not the highest or low not the lowest in row 12 "),
    "two defects": (lambda raw: changed(5, "volume", -1.0)(changed(3, "close", np.nan)(raw)), {},
                    "close is empty.*also: volume is negative or infinite in row 5"),
    "longer bars": (lambda raw: raw.iloc[::5], {}, r"the bars are 5 minutes apart, not 1.*give 1-minute bars"),
    "shorter bars": (lambda raw: raw, {"minutes": 5}, "off the 5-minute grid"),
    "no rows": (lambda raw: raw.iloc[:0], {}, "No bars"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_check_bars_refuses_with_column_row_and_reason(make_raw, name):
    change, spec, words = REFUSED[name]
    with pytest.raises(BarsError, match=words):
        check(change(make_raw()), **spec)


def in_two_columns(raw: pd.DataFrame) -> pd.DataFrame:
    day, clock = (raw["timestamp"].dt.strftime(form) for form in ("%Y.%m.%d", "%H:%M"))
    return raw.drop(columns="timestamp").assign(Date=day, Time=clock)


SAME = {
    "index": (lambda raw: raw.set_index("timestamp"), {}, ("columns",)),
    "index without a name": (lambda raw: raw.set_index("timestamp").rename_axis(None), {}, ("columns",)),
    "epochs": (lambda raw: raw.assign(ts=raw["timestamp"].dt.as_unit("s").astype("int64")).drop(columns="timestamp")
               .set_index("ts"), {}, ("columns", "epoch")),
    "date and time": (in_two_columns, {"zone": "UTC"}, ("columns", "text_time", "zone")),
    "any order": (lambda raw: raw.sample(frac=1, random_state=3), {}, ("unsorted",)),
    "newest first": (lambda raw: raw.iloc[::-1], {}, ("unsorted",)),
    "row labels that occur twice": (lambda raw: pd.concat([raw.iloc[:300], raw.iloc[300:].reset_index(drop=True)])
                                    .astype({"timestamp": str, "close": str}), {}, ("text_numbers", "text_time")),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_check_bars_in_other_form_gives_same_bars(make_raw, name):
    change, spec, kinds = SAME[name]
    bars, report = check(change(make_raw()), **spec)
    assert bars.equals(check(make_raw())[0]) and tuple(sorted(kinds_of(report))) == kinds


def test_check_bars_of_one_bar_or_of_declared_length_are_accepted(make_raw):
    assert len(check(make_raw(1))[0]) == 1 and check(make_raw(minutes=5), minutes=5)[1].minutes == 5


@pytest.mark.parametrize(
    "names",
    [
        ["Timestamp", "Open", "High", "Low", "Close", "Volume"],
        ["DateTime", "O", "H", "L", "C", "V"],
        ["<TIME>", "<OPEN>", "<HIGH>", "<LOW>", "<CLOSE>", "<TICKVOL>"],
        [" open time", "open price", "high price", "low price", "close price", "VOL"],
        ["Date/Time", "Open", "High", "Low", "Last", "Volume"],
    ],
)
def test_check_bars_other_column_names_map_to_canonical_names(make_raw, names):
    bars, report = check(make_raw().set_axis(names, axis=1))
    assert list(bars.columns) == ["open", "high", "low", "close", "volume"] and kinds_of(report) == ("columns",)
    assert report.fingerprint == check(make_raw())[1].fingerprint


def test_check_bars_exact_duplicate_rows_are_dropped(make_raw):
    raw = make_raw()
    bars, report = check(pd.concat([raw, raw.iloc[[5, 9]]], ignore_index=True))
    assert bars.equals(check(raw)[0]) and finding_of(report, "duplicate").rows.tolist() == [600, 601]
    raw.loc[5, "volume"] = np.nan  # unknown twice is the same twice
    report = check(pd.concat([raw, raw.iloc[[5, 9]]], ignore_index=True))[1]
    assert finding_of(report, "duplicate").rows.tolist() == [600, 601] and finding_of(
        report, "partial_volume"
    ).rows.tolist() == [5]


def test_check_bars_conflicting_rows_raise_bars_error(make_raw):
    raw = make_raw()
    again = raw.iloc[[40]].assign(close=raw["low"].iloc[40], open=raw["high"].iloc[40], volume=9999.0)
    with pytest.raises(BarsError, match=r"row 600 \(2024-03-05 00:40:00\+00:00\) contradict another row") as caught:
        check(pd.concat([raw, again], ignore_index=True))
    assert caught.value.findings[0].kind == "conflict"


@pytest.mark.parametrize("how", ["absent", "nan", "zero", "text"])
def test_check_bars_without_volume_drops_column_and_reports_no_volume(make_raw, how):
    raw = make_raw().drop(columns="volume")
    if how != "absent":
        raw["volume"] = {"nan": np.nan, "zero": 0, "text": ""}[how]
    bars, report = check(raw, market=None)
    assert list(bars.columns) == ["open", "high", "low", "close"]
    assert "no_volume" in kinds_of(report) and finding_of(report, "no_volume").severity == "mapped"


def test_check_bars_nan_volume_rows_become_zero_and_are_reported(make_raw):
    raw = make_raw()
    raw.loc[[7, 8], "volume"] = np.nan
    bars, report = check(raw)
    assert bars["volume"].iloc[[7, 8]].tolist() == [0.0, 0.0] and finding_of(
        report, "partial_volume"
    ).rows.tolist() == [
        7,
        8,
    ]


def test_check_bars_declared_volume_all_nan_in_part_keeps_volume_column(make_raw):
    raw = make_raw()
    raw.loc[:300, "volume"] = np.nan
    whole, part = check(raw)[0], check(raw.iloc[:200])[0]
    assert part.equals(whole.iloc[:200])


def test_check_bars_mixed_spacing_raises_bars_error(make_raw):
    late = make_raw(50, "2024-03-05 12:00", minutes=5)
    with pytest.raises(
        BarsError, match=r"mixed spacing: from row 600 \(2024-03-05 12:00:00\+00:00\) on, 49 steps of 5"
    ) as caught:
        check(pd.concat([make_raw(), late], ignore_index=True))
    found = caught.value.findings
    assert [finding.kind for finding in found] == ["spacing"] and found[0].rows.tolist() == list(range(600, 649))


def test_check_bars_minutes_without_trades_are_kept_without_spacing_finding(make_raw):
    rng = np.random.default_rng(0)
    sparse = make_raw(3000)[rng.random(3000) < 0.6]
    bars, report = check(sparse)
    assert len(bars) == len(sparse) and "spacing" not in kinds_of(report)


def test_check_bars_strict_raises_on_reported_finding(make_raw):
    raw = make_raw(1200)
    raw = raw.drop(index=range(300, 400))
    assert finding_of(check(raw)[1], "missing").rows.tolist() == [300]
    with pytest.raises(BarsError, match="1 silence longer") as caught:
        check(raw, strict=True)
    assert [finding.kind for finding in caught.value.findings] == ["missing"]


def test_check_bars_leaves_input_table_unchanged(make_raw):
    raw = make_raw().sample(frac=1, random_state=1)
    before = raw.copy()
    check(raw)
    pd.testing.assert_frame_equal(raw, before)


def test_bars_fingerprint_depends_on_content_only(make_raw):
    bars = check(make_raw())[0]
    assert hash_bars(bars) == hash_bars(bars.set_axis(bars.index.as_unit("us")).copy())
    other = bars.copy()
    other.iloc[-1, 3] += 0.25
    traded = bars.assign(volume=bars["volume"] + 1.0)
    late = bars.set_axis(bars.index + pd.Timedelta("1min"))
    tables = (bars, other, traded, late, bars.iloc[:-1], bars.drop(columns="volume"))
    assert len({hash_bars(table) for table in tables}) == len(tables)


def test_check_bars_unsorted_file_reports_row_numbers_of_file(make_raw):
    """Rows in the report are those of the file as it was, not of the sorted bars."""
    raw = make_raw().iloc[::-1].reset_index(drop=True)
    raw.loc[100, "volume"] = np.nan
    assert finding_of(check(raw)[1], "partial_volume").rows.tolist() == [100]


def test_check_bars_contract_column_is_kept_as_int32(make_raw):
    raw = make_raw(400)
    codes = np.where(np.arange(400) < 250, "ESZ3", "ESH4")
    for column in (codes, np.where(codes == "ESZ3", 201312, 201403)):
        bars, _ = validate_bars(raw.assign(Contract=column).iloc[::-1], symbol="ES")  # any order, any capitals
        assert bars["contract"].dtype == np.int32
        assert np.flatnonzero(np.diff(bars["contract"])).tolist() == [249]
    with pytest.raises(BarsError, match=r"--roll volume"):  # the same prices of another contract are another bar
        validate_bars(pd.concat([raw.assign(contract="ESZ3"), raw.assign(contract="ESH4")]), symbol="ES")
