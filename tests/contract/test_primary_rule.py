"""The side of meta-labels from a feed, in any chunks, is that of the whole file."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import SettingsError
from tests.contract import doors

MARKET = doors.MarketSpec("DEMO", "cme", 0.25, True)


@pytest.mark.parametrize("against", [False, True])
def test_primary_side_of_rows_of_a_feed_equals_whole_file(against):
    bars, random, pushed, start = synthetic_bars(days=4), np.random.default_rng(3), [], 0
    spec = doors.LabelSpec(kind="meta", primary="macd_12_26", primary_least=0.05, against=against)
    stream = doors.FeatureStream(
        MARKET, doors.primary_rule_features(MARKET, doors.FeatureSpec(), spec), dtype="float64"
    )
    while start < len(bars):
        stop = start + int(random.choice([1, 4, 30, 500]))
        pushed.append(doors.primary_side_of_rows(stream.push(bars.iloc[start:stop]), spec))
        start = stop
    found, wanted = pd.concat(pushed), doors.primary_rule_side(doors.resample_bars(bars, MARKET, 5), spec, MARKET)
    assert set(found.unique()) == {-1, 0, 1} and len(found) > 500
    pd.testing.assert_series_equal(found, wanted.loc[found.index[0] :], check_freq=False)


def test_primary_rule_of_unknown_column_is_refused():
    with pytest.raises(SettingsError, match="macd_12_26"):
        doors.primary_rule_features(MARKET, doors.FeatureSpec(), doors.LabelSpec(kind="meta", primary="macd_12_27"))
