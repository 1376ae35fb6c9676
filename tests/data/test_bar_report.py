"""The report as text, table and JSON; refusals as one error."""

import json

import numpy as np
import pytest

from ml_factory.data.bar_report import (
    BarFinding,
    format_row_ranges,
    format_rows_with_times,
    pluralize_count,
    raise_on_bar_findings,
)
from ml_factory.data.validation import validate_bars
from ml_factory.errors import BarsError


def test_report_to_frame_to_dict_and_summary_list_same_findings(make_raw):
    raw = make_raw().drop(columns="volume").iloc[::-1]
    _, report = validate_bars(raw, symbol="MES")
    table = report.to_frame()
    assert table["kind"].tolist() == list(report.kinds) == ["unsorted", "no_volume"]
    assert table["rows"].tolist() == [599, 0] and report.get_finding("hole") is None
    text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert text["rows"] == 600 and text["findings"][0]["count"] == 599 and len(text["findings"][0]["rows"]) == 20
    assert len(report.to_dict(limit=None)["findings"][0]["rows"]) == 599
    assert table["which"].tolist() == ["1-599", ""]
    assert report.summary().startswith("600 bars of 1 min") and "not in time order" in report.summary()


def test_report_no_trade_gaps_are_info_findings_and_not_in_kinds(make_raw):
    _, report = validate_bars(make_raw().drop(index=[40, 41, 90]), symbol="MES")
    found = report.get_finding("no_trade")
    assert found.severity == "info" and found.rows.tolist() == [40, 88] and report.kinds == ()
    assert "2 gaps of 3 min in all" in report.summary()


def test_format_ranges_joins_consecutive_rows_and_truncates():
    assert format_row_ranges(np.array([], int)) == "" and format_row_ranges(np.array([7])) == "7"
    assert format_row_ranges(np.array([9, 0, 1, 2, 8, 4])) == "0-2, 4, 8-9"
    assert format_row_ranges(np.arange(0, 12, 2)) == "0, 2, 4, 6, ..."


def test_format_rows_one_row_shows_time_and_many_rows_show_first_three():
    assert format_rows_with_times(np.array([17]), ["t"] * 18) == "row 17 (t)"
    assert format_rows_with_times(np.arange(5, 17)) == "12 rows, first 5, 6, 7"


def test_refuse_two_findings_raises_one_error_with_both_messages():
    raise_on_bar_findings([], "x")
    found = [
        BarFinding("a", "refused", np.array([1]), "first", "do this"),
        BarFinding("b", "refused", np.array([2]), "second"),
    ]
    with pytest.raises(BarsError, match=r"first; also: second \[file\]\. Next: do this") as caught:
        raise_on_bar_findings(found, "file")
    assert [finding.kind for finding in caught.value.findings] == ["a", "b"]


def test_count_noun_formats_singular_plural_and_thousands():
    assert [pluralize_count(n, "gap") for n in (1, 2, 1200)] == ["1 gap", "2 gaps", "1,200 gaps"]
