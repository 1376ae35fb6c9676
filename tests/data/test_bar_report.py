"""The report as text and JSON; refusals as one error."""

import json

import numpy as np
import pytest

from ml_factory.data.bar_report import BarFinding, format_row_ranges, format_rows_with_times, raise_on_bar_findings
from ml_factory.data.validation import validate_bars
from ml_factory.errors import BarsError


def test_report_to_dict_and_summary_list_same_findings_and_expected_gaps_are_none(make_raw):
    raw = make_raw().drop(columns="volume").drop(index=[40, 41, 90]).iloc[::-1]
    _, report = validate_bars(raw, symbol="MES")
    text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    first = text["findings"][0]
    assert (
        [one["kind"] for one in text["findings"]]
        == [*report.kinds, "no_trade"]
        == ["unsorted", "no_volume", "no_trade"]
    )
    assert text["rows"] == 597 and first["count"] == 596 and len(first["rows"]) == 20 and first["which"] == "1-596"
    assert len(report.to_dict(limit=None)["findings"][0]["rows"]) == 596 and report.get_finding("hole") is None
    assert report.summary().startswith("597 bars of 1 min") and "not in time order" in report.summary()
    assert report.get_finding("no_trade").severity == "info" and "2 gaps of 3 min in all" in report.summary()


def test_rows_are_shown_as_ranges_or_with_their_times():
    assert [format_row_ranges(np.array(rows, int)) for rows in ([], [7], [9, 0, 1, 2, 8, 4], range(0, 12, 2))] == [
        "", "7", "0-2, 4, 8-9", "0, 2, 4, 6, ...",
    ]  # fmt: skip
    assert format_rows_with_times(np.array([17]), ["t"] * 18) == "row 17 (t)"
    assert format_rows_with_times(np.arange(5, 17)) == "12 rows, first 5, 6, 7"


def test_refuse_two_findings_raises_one_error_with_both_messages():
    raise_on_bar_findings([], "x")
    found = [BarFinding(kind, "refused", np.array([1]), *words) for kind, *words in
             (("a", "first", "do this"), ("b", "second"))]  # fmt: skip
    with pytest.raises(BarsError, match=r"first; also: second \[file\]\. Next: do this") as caught:
        raise_on_bar_findings(found, "file")
    assert [finding.kind for finding in caught.value.findings] == ["a", "b"]
