"""The report as text, table and JSON; refusals as one error."""

import json

import numpy as np
import pytest

from ml_factory.data.report import Finding, count_noun, format_ranges, format_rows, refuse
from ml_factory.data.validation import check_bars
from ml_factory.errors import BarsError


def test_report_in_three_forms(make_raw):
    raw = make_raw().drop(columns="volume").iloc[::-1]
    _, report = check_bars(raw, symbol="MES")
    table = report.to_frame()
    assert table["kind"].tolist() == list(report.kinds) == ["unsorted", "no_volume"]
    assert table["rows"].tolist() == [599, 0] and report.finding("hole") is None
    text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert text["rows"] == 600 and text["findings"][0]["count"] == 599 and len(text["findings"][0]["rows"]) == 20
    assert len(report.to_dict(limit=None)["findings"][0]["rows"]) == 599
    assert table["which"].tolist() == ["1-599", ""]
    assert report.summary().startswith("600 bars of 1 min") and "not in time order" in report.summary()


def test_legal_gaps_are_findings_but_nothing_strange(make_raw):
    _, report = check_bars(make_raw().drop(index=[40, 41, 90]), symbol="MES")
    found = report.finding("no_trade")
    assert found.severity == "info" and found.rows.tolist() == [40, 88] and report.kinds == ()
    assert "2 gaps of 3 min in all" in report.summary()


def test_row_ranges():
    assert format_ranges(np.array([], int)) == "" and format_ranges(np.array([7])) == "7"
    assert format_ranges(np.array([9, 0, 1, 2, 8, 4])) == "0-2, 4, 8-9"
    assert format_ranges(np.arange(0, 12, 2)) == "0, 2, 4, 6, ..."


def test_rows_are_named():
    assert format_rows(np.array([17]), ["t"] * 18) == "row 17 (t)"
    assert format_rows(np.arange(5, 17)) == "12 rows, first 5, 6, 7"


def test_refusals_are_told_together():
    refuse([], "x")
    found = [
        Finding("a", "refused", np.array([1]), "first", "do this"),
        Finding("b", "refused", np.array([2]), "second"),
    ]
    with pytest.raises(BarsError, match=r"first; also: second \[file\]\. Next: do this") as caught:
        refuse(found, "file")
    assert [finding.kind for finding in caught.value.findings] == ["a", "b"]


def test_counts_are_words():
    assert [count_noun(n, "gap") for n in (1, 2, 1200)] == ["1 gap", "2 gaps", "1,200 gaps"]
