"""Sessions that facts of the market were inferred from: their rows are marked, and nothing learns from them."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError
from tests.contract import doors

SPEC = doors.LabelSpec(5, sigma_span=30)


def labels_of(bars: pd.DataFrame, symbol: str = "FOO", **given) -> pd.DataFrame:
    """Labels as `prepare` makes them of a file with these bars: the facts are those of this very file."""
    market = doors.resolve_market_spec(symbol, bars, **given)
    return doors.make_labels(doors.resample_bars(bars, market, 5), None, SPEC, market)


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    """26 sessions of a market whose first two trade on half the tick of the others."""
    made = synthetic_bars(26, "null", 3)
    minute_bars = np.arange(len(made)) < 2_000
    made.loc[minute_bars, ["open", "high", "low", "close"]] *= 0.5
    return made


def test_make_labels_inferred_market_marks_rows_of_first_20_sessions(bars):
    labels = labels_of(bars)
    session = doors.assign_sessions(labels.index.as_unit("ns").asi8 - 1, "cme").id
    first = np.unique(doors.assign_sessions(bars.index.as_unit("ns").asi8, "cme").id)[:20]
    np.testing.assert_array_equal(labels["inferred"] == 1, np.isin(session, first))
    for known in (labels_of(bars, "MES"), labels_of(bars, calendar="cme", tick=0.125)):
        assert "inferred" not in known and len(doors.usable_label_rows(known)) == len(known)


def test_holdout_excludes_rows_marked_inferred(bars):
    labels = labels_of(bars)
    inferred, parts = np.flatnonzero(labels["inferred"] == 1), doors.chronological_split(labels, doors.SplitSpec())
    assert len(inferred) > 2_000 and not any(np.isin(rows, inferred).any() for rows in parts.values())
    alone = labels[labels["inferred"] == 0].drop(columns="inferred")
    for name, rows in doors.chronological_split(
        alone, doors.SplitSpec()
    ).items():  # the split of a file that begins after them
        np.testing.assert_array_equal(parts[name], rows + len(inferred))


def test_make_labels_inferred_market_with_later_bars_keeps_finished_rows(bars):
    """The promise of the labels, with the facts inferred anew from each shortened file."""
    whole, sessions = labels_of(bars), doors.assign_sessions(bars.index.as_unit("ns").asi8, "cme").id
    begin = int(np.searchsorted(sessions, np.unique(sessions)[20]))  # the first bar of the 21st session
    for stop in (begin + 1, begin + 700, len(bars) - 900):
        cut = bars.index[stop - 1] + pd.Timedelta("1min")
        head = labels_of(bars.iloc[:stop])
        proven = [table[table["label_end"] <= cut] for table in (head, whole)]
        other = [column for column in whole if column != "uniqueness"]  # rows still open count in it
        pd.testing.assert_frame_equal(proven[0][other], proven[1][other], check_exact=True)


def test_holdout_of_only_inferred_rows_error_names_market_options(bars):
    labels = labels_of(bars.iloc[:20_000])
    assert labels["inferred"].all()
    with pytest.raises(BarsError, match="--calendar, --tick"):
        doors.chronological_split(labels, doors.SplitSpec())
