"""The side of meta-labels from a feed, in any chunks, is that of the whole file."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.resample import resample_bars, to_bar_chunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.primary_rule import PrimaryRuleStream, primary_rule_side


@pytest.mark.parametrize("against", [False, True])
def test_primary_rule_stream_restored_between_chunks_equals_whole_file(against):
    bars, market = synthetic_bars(days=4), MarketSpec("DEMO", "cme", 0.25, True)
    spec = LabelSpec(kind="meta", primary="macd_12_26", primary_least=0.05, against=against)
    features, random, pushed, start = FeatureSpec(base_minutes=5), np.random.default_rng(3), [], 0
    stream = PrimaryRuleStream(market, features, spec)
    while start < len(bars):
        stop = start + int(random.choice([1, 4, 30, 500]))
        pushed.append(stream.push(to_bar_chunk(bars.iloc[start:stop], market)))
        state, start = stream.get_state(), stop
        stream = PrimaryRuleStream(market, features, spec)
        stream.load_state(state)
    pushed.append(stream.advance(bars.index[-1].value + 10 * 60_000_000_000))
    wanted = primary_rule_side(resample_bars(bars, market, 5), spec, market)
    assert set(wanted.unique()) == {-1, 0, 1}
    pd.testing.assert_series_equal(pd.concat(pushed), wanted, check_freq=False)


def test_primary_rule_stream_of_unknown_column_is_refused():
    spec = LabelSpec(kind="meta", primary="macd_12_27")
    with pytest.raises(SettingsError, match="macd_12_26"):
        PrimaryRuleStream(MarketSpec("DEMO", "cme", 0.25, True), FeatureSpec(), spec)
