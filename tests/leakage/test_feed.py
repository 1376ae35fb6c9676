"""A feed that has no future shows what slips between cuts: leaks in a few rows at random, in a pipeline or a kernel."""

import numpy as np
import pytest

from ml_factory.data.resample import BarChunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import build
from ml_factory.leakage.proof import ProofSpec, prove
from tests.leakage.catalogue import Learning, bars_with_events, clean_pipeline

ONLY_FEED = ProofSpec(cuts=1, whole_cuts=0, ways=("rewrite",), fit_rows=0, feed_pushes=4_000)


@pytest.fixture(scope="module")
def bars():
    return bars_with_events()


class Rare(Learning):
    """A trace of the next row's return in one row of fifteen hundred, at random."""

    def spoilt_features(self, rows, bars, facts):
        minute = rows.index.as_unit("ns").asi8[:-1] // 60_000_000_000
        some = np.flatnonzero(minute * 7_919 % 1_500 < 5)
        some = some[:: max(1, len(some) * 1_500 // len(rows))]
        column = rows["rsi_14"].to_numpy().copy()
        column[some] += 1e-4 * column[some + 1]
        self.__dict__["share"] = len(some) / len(rows)
        return rows.assign(rsi_14=column)


def test_prove_leak_in_few_random_rows_is_reported_by_live_feed(bars):
    pipeline = Rare(**vars(clean_pipeline()))
    proof = prove(pipeline, bars, ONLY_FEED)
    assert 0 < pipeline.share < 1 / 1000
    assert [(leak.part, leak.column, leak.disturbance) for leak in proof.leaks] == [("features", "rsi_14", "live feed")]


def test_feed_pushes_end_all_over_the_file_and_give_the_rows_of_a_file(bars, monkeypatch):
    market, ends = MarketSpec("DEMO", "cme", 0.25, True), []
    pipeline = clean_pipeline()
    honest = BarChunk.part

    def watched(chunk, first, stop):
        ends.append(stop)
        return honest(chunk, first, stop)

    monkeypatch.setattr(BarChunk, "part", watched)
    fed = pipeline.feed(bars, market.to_dict(), 500, 0)
    assert 499 <= len(ends) <= 501 and ends[0] < len(bars) / 50 and np.diff(ends).max() < len(bars) / 50
    assert ends[-1] == len(bars)
    monkeypatch.undo()
    assert fed.equals(build.build_features(bars, market, pipeline.settings.features).to_frame())
