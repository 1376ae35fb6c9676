"""The report as text, table and JSON; refusals as one error."""

import json

import numpy as np
import pytest

from ml_factory.data.bars import check_bars
from ml_factory.data.findings import Finding, name_rows, refuse
from ml_factory.errors import BarsError


def test_report_in_three_forms(make_raw):
    raw = make_raw().drop(columns="volume").iloc[::-1]
    _, report = check_bars(raw, symbol="MES")
    table = report.to_frame()
    assert table["kind"].tolist() == list(report.kinds) == ["unsorted", "no_volume"]
    assert table["rows"].tolist() == [599, 0] and report.of("hole") is None
    text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert text["rows"] == 600 and text["findings"][0]["count"] == 599 and len(text["findings"][0]["rows"]) == 20
    assert report.summary().startswith("600 bars of 1 min") and "not in time order" in report.summary()


def test_rows_are_named():
    assert name_rows(np.array([17]), ["t"] * 18) == "row 17 (t)"
    assert name_rows(np.arange(5, 17)) == "12 rows, first 5, 6, 7"


def test_refusals_are_told_together():
    refuse([], "x")
    found = [
        Finding("a", "refused", np.array([1]), "first", "do this"),
        Finding("b", "refused", np.array([2]), "second"),
    ]
    with pytest.raises(BarsError, match=r"first; also: second \[file\]\. Next: do this"):
        refuse(found, "file")
