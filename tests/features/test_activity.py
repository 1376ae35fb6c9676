"""Rows on bars by activity: a feed in any chunks, a file that goes on, and what cannot be asked of them."""

import itertools

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import activity_bars
from ml_factory.data.activity_bars import KINDS
from ml_factory.data.sessions import MarketSpec, resolve_market_spec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import BarsError, SettingsError
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.features.stream import FeatureStream
from ml_factory.leakage.pipeline_under_test import StandardPipelineUnderTest
from ml_factory.leakage.proof import ProofSpec, prove_no_look_ahead
from ml_factory.models.multi_timeframe_network import frame_strides
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec

FAMILIES = ("momentum", "volume", "calendar")
SHORT = ProofSpec(cuts=12, whole_cuts=4, ahead=2_000, fit_rows=500, fit_splits=1, feed_rows=500)


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    """45 sessions over a daylight-saving change, with minutes and stretches missing."""
    made = synthetic_bars(45, "planted", 4, "us_equity", start="2024-02-12", missing=0.03)
    keep = np.ones(len(made), bool)
    for at in np.random.default_rng(4).integers(0, len(made), 20):
        keep[at : at + 70] = False
    return made[keep]


def asked(kind: str, **more) -> FeatureSpec:
    return FeatureSpec(frames=(15, 60), families=FAMILIES, bars=kind, **more)


def pipeline(kind: str) -> StandardPipelineUnderTest:
    return StandardPipelineUnderTest("SPY", asked(kind), (LabelSpec(5),), SplitSpec(0.6, 0.2))


@pytest.mark.parametrize("kind", KINDS)
def test_feature_stream_on_activity_bars_in_chunks_equals_whole_file(bars, kind):
    spec, random = asked(kind), np.random.default_rng(0)
    market = spec.with_bar_size(resolve_market_spec("SPY", bars), bars)
    whole = build_features(bars, market, spec)
    assert len(whole) > 300 and whole.session.min() >= market.bars_since
    cuts = np.unique(np.concatenate([[0, len(bars)], random.integers(0, len(bars), 200)])).tolist()
    stream, rows = FeatureStream(market, spec), []
    for number, (first, stop) in enumerate(itertools.pairwise(cuts)):
        if number % 9 == 0:
            state, stream = stream.get_state(), FeatureStream(market, spec)
            stream.load_state(state)
        rows.append(stream.push(bars.iloc[first:stop]))
    assert all(one.exact for one in rows)
    half = len(bars) * 3 // 4
    before = build_features(bars.iloc[:half], market, spec)
    after = FeatureStream.from_matrix(bars.iloc[:half], before, market, spec).push(bars.iloc[half:])
    for name in ("known_at", "session", "segment", "close", "values"):
        wanted = getattr(whole, name)
        assert np.concatenate([getattr(one, name) for one in rows]).tobytes() == wanted.tobytes(), name
        assert np.concatenate([getattr(before, name), getattr(after, name)]).tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_prove_on_activity_bars_pipeline_passes(bars, kind):
    proof = prove_no_look_ahead(pipeline(kind), bars, SHORT)
    assert proof.passed, [leak.sentence() for leak in proof.leaks]
    parts = {"features", f"frame {kind}", "labels h5", "facts", "features, fed bar by bar", "fitted h5"}
    assert parts <= set(proof.compared) and all(proof.compared[part] > 0 for part in parts)


def test_prove_activity_bars_with_look_ahead_reports_leak(bars, monkeypatch):
    honest = activity_bars._estimate_size

    def of_the_whole_file(market, kind, bars, spec):
        return bars["volume"].sum() / 45 / 50, honest(market, kind, bars, spec)[1]

    monkeypatch.setattr(activity_bars, "_estimate_size", of_the_whole_file)
    leaks = prove_no_look_ahead(pipeline("volume"), bars, SHORT).leaks
    assert any(leak.part == "facts" and leak.column == "bar_size" for leak in leaks)
    monkeypatch.setattr(activity_bars, "_estimate_size", honest)

    def knowing(self, bars):  # as many bars in each session, by a total that only its end tells
        frame = plain(self, bars)
        if not hasattr(bars, "index"):
            return frame
        wanted = pd.Series(frame.volume).groupby(frame.session).transform("sum").to_numpy()
        return activity_bars.replace(frame, volume=frame.volume / wanted)

    plain = activity_bars.ActivityBarStream.push
    monkeypatch.setattr(activity_bars.ActivityBarStream, "push", knowing)
    leaks = prove_no_look_ahead(pipeline("volume"), bars, SHORT).leaks
    assert any(leak.part == "frame volume" for leak in leaks)


def test_activity_bar_features_invalid_settings_raise_error(bars):
    spec, market = asked("volume"), MarketSpec("X", "us_equity", None, True)
    given = FeatureStream(market, asked("volume", bar_size=5_000.0))
    assert given.market.bar_size == 5_000.0 and given.market.bars_since == 0
    with pytest.raises(SettingsError, match="size of a bar is unknown"):
        FeatureStream(market, spec)
    with pytest.raises(SettingsError, match=r"no cold start.*load the state"):
        FeatureStream(spec.with_bar_size(market, bars), spec, cold=True)
    with pytest.raises(SettingsError, match=r"have no size.*volume, dollar"):
        FeatureSpec(bar_size=5.0)
    with pytest.raises(SettingsError, match="did you mean 'volume'"):
        FeatureSpec(bars="volumes")
    with pytest.raises(BarsError, match=r"These bars need volume.*tick_imbalance"):
        build_features(bars.drop(columns="volume"), resolve_market_spec("SPY", bars.drop(columns="volume")), spec)
    with pytest.raises(SettingsError, match="no stride"):
        frame_strides(["rsi_14@60m"], spec.base)
    assert FeatureSpec(bars="time").base == FeatureSpec().base == 5
