"""Bars checked as they come are told what a check of the whole file tells."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.bars import check_bars
from ml_factory.data.continued import check_more, plain_bars
from ml_factory.data.sessions import market_for
from ml_factory.data.synthetic import synthetic_bars

BARS = synthetic_bars(days=30, seed=4)
FIRST = 24_000  # more than the detectors' look-back


def blemished() -> pd.DataFrame:
    """A hole and a spike before FIRST and after it, and a run of one price after it."""
    bars = BARS.copy()
    for row in (5_000, 26_500):
        bars.iloc[row, bars.columns.get_loc("high")] *= 1.05
    price = bars["close"].iloc[29_999]
    bars.iloc[30_000:30_090, :4] = price
    return bars.drop(bars.index[np.r_[9_000:9_400, 27_000:27_500]])


def told_in_steps(bars: pd.DataFrame, *stops: int) -> dict:
    """The report after a check of the bars up to the first stop, continued at each of the others."""
    head, report = check_bars(bars.iloc[: stops[0]].reset_index(), symbol="ODD")
    told, market, old = report.to_dict(), market_for("ODD", head), stops[0]
    for stop in stops[1:]:
        told, old = check_more(bars.iloc[:stop], old, told, market), stop
    return told


@pytest.mark.parametrize("stops", [(FIRST,), (FIRST, 26_501, 26_502, 26_800), (25_001, 29_600)])
def test_the_report_goes_on_as_a_check_of_all_bars_has_it(stops):
    bars = blemished()
    _, whole = check_bars(bars.reset_index(), symbol="ODD", market=market_for("ODD", bars))
    told, wanted = told_in_steps(bars, *stops, len(bars)), whole.to_dict()
    assert {"spike", "stale_run", "download_hole"} <= set(whole.kinds) | {"download_hole"}
    for name in ("rows", "first", "last", "minutes", "fingerprint", "facts"):
        assert told[name] == wanted[name]
    found = {one["kind"]: one for one in told["findings"]}
    assert found.keys() == {one["kind"] for one in wanted["findings"]}
    for one in wanted["findings"]:
        for name in ("severity", "count", "which", "rows"):
            assert found[one["kind"]][name] == one[name], one["kind"]


@pytest.mark.parametrize("what", ["a low above the high", "a bar twice", "minutes of five"])
def test_new_bars_that_a_check_would_refuse_or_map_are_left_to_it(what):
    bars = BARS.copy()
    if what == "a low above the high":
        bars.iloc[25_000, bars.columns.get_loc("low")] *= 2
    elif what == "a bar twice":
        bars = pd.concat([bars[:25_001], bars[25_000:]])
    else:
        bars = pd.concat([bars[:25_000], bars[25_000:][::5]])
    head, report = check_bars(BARS[:FIRST].reset_index(), symbol="ODD")
    assert check_more(BARS, FIRST, report.to_dict(), market_for("ODD", head)) is not None
    assert check_more(bars, FIRST, report.to_dict(), market_for("ODD", head)) is None


def test_only_bars_spelt_as_ours_are_plain():
    table = BARS[:100].reset_index()
    assert plain_bars(table).equals(check_bars(table)[0])
    assert plain_bars(table.assign(volume=0.0)).equals(check_bars(table.assign(volume=0.0))[0])
    assert plain_bars(table.rename(columns={"close": "last"})) is None
    assert plain_bars(table.assign(timestamp=table["timestamp"].dt.tz_localize(None))) is None
    assert plain_bars(table.assign(close=table["close"].astype(str))) is None
    assert plain_bars(table.assign(volume=table["volume"].where(table.index > 3))) is None
