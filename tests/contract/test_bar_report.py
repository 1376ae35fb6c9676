"""The report as text and JSON; refusals as one error."""

import json

from tests.contract.doors import validate_bars
from tests.data.bar_findings import finding_of, kinds_of


def test_report_to_dict_lists_findings_and_expected_gaps_are_none(make_raw):
    raw = make_raw().drop(columns="volume").drop(index=[40, 41, 90]).iloc[::-1]
    _, report = validate_bars(raw, symbol="MES")
    text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    first = text["findings"][0]
    assert (
        [one["kind"] for one in text["findings"]]
        == [*kinds_of(report), "no_trade"]
        == ["unsorted", "no_volume", "no_trade"]
    )
    assert text["rows"] == 597 and first["count"] == 596 and len(first["rows"]) == 20 and first["which"] == "1-596"
    assert len(report.findings[0].rows) == 596 and finding_of(report, "hole") is None
    assert "not in time order" in first["message"]
    expected = finding_of(report, "no_trade")
    assert expected.severity == "info" and "2 gaps of 3 min in all" in expected.message
