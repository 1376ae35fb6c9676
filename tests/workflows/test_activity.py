"""Bars by activity from the command line to predictions: prepared, proved, learnt, appended, kept."""

import json

import numpy as np
import pandas as pd

from ml_factory import pipeline
from ml_factory.data.activity_bars import activity_bars, build_base_and_minute_bars
from ml_factory.data.io import write_bars
from ml_factory.data.sessions import MINUTE_NS, MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.datasets.store import DatasetStore
from ml_factory.features.build import FeatureSpec
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels

TINY = {"rounds": 5, "depth": 2, "threads": 1}


def stored(place: Workspace) -> tuple[DatasetStore, pd.DataFrame, MarketSpec]:
    store = DatasetStore.current(place.processed("DEMO"))
    bars = pd.read_parquet(place.raw_bars("DEMO")).set_index("timestamp")
    return store, bars, MarketSpec.from_dict(store.facts["market"])


def test_prepare_volume_bars_of_given_size_are_certified_trained_and_predicted(prepared, call):
    words = ("--workspace", prepared.root, "--horizon", 5, "--json")
    code, out, err = call("prepare", *words, "--bars", "volume", "--bar-size", 4_000)
    assert code == 0, err
    assert json.loads(out)["proof"] == "quick, 10 cuts" and "looks ahead" not in err
    store, bars, market = stored(prepared)
    assert (market.bar_size, market.bars_since, dict(market.source)["bar_size"]) == (4_000.0, 0, "given")
    frame, first = activity_bars(bars, market, "volume"), store.facts["first"]
    assert (frame.volume >= 4_000).all() and len(np.unique(np.diff(frame.known_at))) > 20  # no fixed minutes
    np.testing.assert_array_equal(store.known_at.as_unit("ns").asi8, frame.known_at[first:])
    wanted = triple_barrier_labels(*build_base_and_minute_bars(bars, market, "volume"), LabelSpec(5), market)
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    pd.testing.assert_frame_equal(labels, wanted[wanted["entry_bar"] >= first], check_freq=False)
    assert (labels["exit_bar"] - labels["entry_bar"]).max() == 5  # horizons count bars, however long these take
    took = labels["label_end"].loc[labels["barrier"] == "vertical"] - labels.index[labels["barrier"] == "vertical"]
    assert took.nunique() > 20
    live = pipeline.replay(prepared, "DEMO")
    pd.testing.assert_frame_equal(live, pipeline.load_features(prepared, "DEMO").iloc[-len(live) :], check_freq=False)
    assert [text.get_text() for text in pipeline.frame_alignment(prepared, "DEMO").axes[0].get_yticklabels()] == [
        "base bars", "15 min", "30 min", "60 min",
    ]  # fmt: skip
    trained = pipeline.train(prepared, "DEMO", 5, "xgboost", quick=True, mirror="off", model_settings=TINY)
    assert np.isfinite(trained.metrics["log_loss"]).all()
    printed = pipeline.predict(prepared, "DEMO", 5, "xgboost", all_rows=True).frame
    np.testing.assert_array_equal(printed.index.as_unit("ns").asi8, frame.known_at[first:])


def test_prepare_keeps_bar_type_of_symbol_until_changed(prepared, call):
    words = ("prepare", "--workspace", prepared.root, "--horizon", 5, "--json")
    assert call(*words, "--bars", "volume", "--bar-size", 4_000)[0] == 0
    made = DatasetStore.current(prepared.processed("DEMO")).fingerprint
    assert pipeline.prepare(prepared, "DEMO", (5,)).reused  # as the notebooks after 01 call it
    assert call(*words)[0] == 0 and DatasetStore.current(prepared.processed("DEMO")).fingerprint == made
    assert call(*words, "--bars", "time")[0] == 0
    store = DatasetStore.current(prepared.processed("DEMO"))
    assert store.fingerprint != made and set(np.diff(store.known_at.as_unit("ns").asi8)) >= {5 * MINUTE_NS}
    assert store.facts["market"]["bar_size"] is None


def test_cli_prepare_invalid_bar_options_exit_in_one_line_and_keep_data(prepared, call, tmp_path):
    words = ("prepare", "--workspace", prepared.root, "--horizon", 5)
    before = DatasetStore.current(prepared.processed("DEMO")).fingerprint
    for more, code, printed in (
        (("--bars", "volume"), 1, "more than 20 sessions"),  # a week of bars
        (("--bars", "volumes"), 2, "did you mean 'volume'"),
        (("--bar-size", 5), 2, "Bars of time have no size"),
        (("--bars", "dollar", "--bar-size", 0), 2, "bar_size"),
    ):
        got = call(*words, *more)
        assert got[0] == code and printed in got[2], got
    path = tmp_path / "quiet.parquet"
    write_bars(path, synthetic_bars(8, calendar="24h").drop(columns="volume"))
    code, _, err = call(*words, "--symbol", "BTC", "--data", path, "--bars", "volume", "--bar-size", 5)
    assert code == 1 and "These bars need volume" in err and "tick_imbalance" in err
    assert DatasetStore.current(prepared.processed("DEMO")).fingerprint == before


def test_prepare_estimates_bar_size_from_first_sessions_and_appends_bars(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ML_FACTORY_WANDB", "off")
    place, bars = Workspace(tmp_path / "w"), synthetic_bars(48, "planted", 1, "us_equity", start="2024-02-12")
    settings = DataSpec(features=FeatureSpec(frames=(15, 30), families=("momentum", "volume"), bars="dollar"))
    first = len(bars) - 800
    write_bars(place.raw_bars("SPY"), bars.iloc[:first])
    was = pipeline.prepare(place, "SPY", (5,), settings=settings)
    assert "bar_size" in caplog.text and "first 20 sessions" in caplog.text
    size = was.market["bar_size"]
    write_bars(place.raw_bars("SPY"), bars)
    now = pipeline.prepare(place, "SPY", (5,), settings=settings)
    assert now.market["bar_size"] == size and now.rows > was.rows
    assert now.phases.loc["features", "rows"].iloc[0] == 800  # only the new ones
    features, labels = pipeline.load_features(place, "SPY"), pipeline.load_labels(place, "SPY", 5)
    whole = Workspace(tmp_path / "v")
    write_bars(whole.raw_bars("SPY"), bars)
    pipeline.prepare(whole, "SPY", (5,), settings=settings)
    pd.testing.assert_frame_equal(features, pipeline.load_features(whole, "SPY"), check_freq=False)
    pd.testing.assert_frame_equal(labels, pipeline.load_labels(whole, "SPY", 5), check_freq=False)
    assert pipeline.certificate(place, "SPY", 5).passed
