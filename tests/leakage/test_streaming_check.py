"""A feed that has no future shows what slips between cuts: leaks in a few rows at random, in a pipeline or a kernel."""

import numpy as np
import pytest

from ml_factory.data.sessions import MarketSpec
from ml_factory.features import build
from ml_factory.features.build import FeatureSpec
from ml_factory.features.engine import HISTORY
from ml_factory.features.momentum import momentum
from ml_factory.leakage.proof import prove_no_look_ahead
from ml_factory.leakage.proof_spec import QUICK, ProofSpec
from ml_factory.leakage.streaming_check import stream_feature_table, stream_push_positions
from tests.leakage.leaks import Learning, bars_with_events, clean_pipeline

ONLY_FEED = ProofSpec(cuts=1, whole_cuts=0, ways=("rescale",), ways_a_cut=1, fit_rows=0)


@pytest.fixture(scope="module")
def bars():
    return bars_with_events()


class Rare(Learning):
    """A trace of the next row's return in one row of fifteen hundred, at random."""

    def features(self, bars, facts):
        known_at, values, names = super().features(bars, facts)
        column = values[:, names.index("rsi_14")]
        rows = np.flatnonzero(known_at[:-1] // 60_000_000_000 * 7_919 % 1_500 < 5)
        rows = rows[:: max(1, len(rows) * 1_500 // len(values))]
        column[rows] += 1e-4 * column[rows + 1]
        self.share = len(rows) / len(values)
        return known_at, values, names


def rare_pipeline():
    clean = clean_pipeline()
    return Rare(clean.symbol, clean.features_spec, clean.label_specs, clean.split_spec, folds=clean.folds)


def test_prove_leak_in_few_random_rows_is_reported_by_live_feed(bars):
    pipeline = rare_pipeline()
    proof = prove_no_look_ahead(pipeline, bars, ONLY_FEED)
    assert 0 < pipeline.share < 1 / 1000
    assert [(leak.part, leak.column, leak.disturbance) for leak in proof.leaks] == [("features", "rsi_14", "live feed")]
    assert prove_no_look_ahead(clean_pipeline(), bars, ONLY_FEED).passed


def test_prove_kernel_reading_ahead_in_block_is_reported_by_live_feed(bars, monkeypatch):
    def peeking(block):
        for name, column in momentum(block):
            rows = np.arange(HISTORY, len(block.close) - 1)
            rows = rows[block.known_at[: len(rows)] // 60_000_000_000 * 7_919 % 1_201 < 5]
            if name == "return_1":
                column[rows] += 1e-3 * (block.close[rows + 1] > block.close[rows])
            yield name, column

    monkeypatch.setitem(build.FAMILIES, "momentum", peeking)
    proof = prove_no_look_ahead(clean_pipeline(), bars, ONLY_FEED)
    assert {leak.column for leak in proof.leaks} <= {"return_1", "return_1@60m"} and proof.leaks
    assert proof.leaks[0].disturbance == "live feed"


def test_push_positions_gives_requested_single_rows_over_whole_file(bars):
    market = MarketSpec("DEMO", "cme", 0.25, True)
    every = stream_push_positions(bars, market, 5, 10**9, 0)
    assert np.diff(every).max() <= 5 and every[0] == 0 and every[-1] == len(bars)
    some = stream_push_positions(bars, market, 5, QUICK.feed_rows, 0)
    single = np.diff(some) <= 5
    assert QUICK.feed_rows - 20 <= single.sum() <= QUICK.feed_rows
    places = some[:-1][single] / len(bars)
    assert places.min() < 0.1 and places.max() > 0.9
    assert np.array_equal(some, stream_push_positions(bars, market, 5, QUICK.feed_rows, 0))


def test_table_from_stream_equals_build_features_row_for_row(bars):
    market = MarketSpec("DEMO", "cme", 0.25, True)
    spec = FeatureSpec(frames=(60,), families=("calendar",))
    table = stream_feature_table(bars, market, spec, 500)
    matrix = build.build_features(bars, market, spec)
    np.testing.assert_array_equal(table.at, matrix.known_at)
    np.testing.assert_array_equal(table.matrix, matrix.values)
