"""Predictions of a feed, bar by bar: those of the batch, restored from a state, and after a cold start."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, PredictionStream, pipeline
from ml_factory.errors import CheckpointError, SettingsError
from tests.contract.doors import PROBABILITIES as P
from tests.contract.doors import DataSpec, FeatureSpec, LabelSpec, deserialize_state, serialize_state
from tests.inference.conftest import BOOSTER, H

LAST = 120  # bars pushed singly


def streamed(path, bars: pd.DataFrame) -> list[pd.DataFrame]:
    """What a stream answers to the history, then to single bars; restored from its state now and then."""
    stream = PredictionStream(Bundle.load(path))
    answers = [stream.push(bars.iloc[:-LAST])]
    for number in range(len(bars) - LAST, len(bars)):
        if number % 50 == 17:
            state = deserialize_state(serialize_state(stream.get_state()))
            stream = PredictionStream(Bundle.load(path))
            stream.load_state(state)
        answers.append(stream.push(bars.iloc[number : number + 1]))
    return [*answers, stream.advance(bars["timestamp"].iloc[-1] + pd.Timedelta(minutes=1))]


@pytest.mark.parametrize("model", ["lightgbm", "stack"])
def test_prediction_stream_restored_between_single_bars_equals_batch(bundle_file, raw_bars, model):
    bars = raw_bars.iloc[:-7]
    pushed, wanted = streamed(bundle_file(model), bars), Bundle.load(bundle_file(model)).predict(bars, all_rows=True)
    got = pd.concat(pushed)
    assert sum(map(len, pushed[1:])) > LAST // 5 - 3 and (got["split"] == "test").any()
    limit = 0.0 if model == "lightgbm" else 1e-6
    pd.testing.assert_frame_equal(got, wanted[: len(got)], check_exact=False, rtol=0, atol=limit, check_freq=False)
    assert len(wanted) - len(got) <= 1  # the batch may give the last bar, which the feed has not closed


def test_prediction_stream_of_meta_labels_restored_between_single_bars_equals_batch(prepared, tmp_path):
    labels = LabelSpec(kind="meta", primary="macd_12_26", primary_least=0.05, against=True)
    pipeline.prepare(prepared, "DEMO", (H,), settings=DataSpec(features=FeatureSpec(frames=(15,)), labels=labels))
    pipeline.train(prepared, "DEMO", H, "lightgbm", mirror="off", model_settings=BOOSTER)
    path = pipeline.export(prepared, "DEMO", H, "lightgbm", ("bundle",), out=tmp_path).paths["bundle"]
    bars = pd.read_parquet(prepared.raw_bars("DEMO"))
    got, wanted = pd.concat(streamed(path, bars)), Bundle.load(path).predict(bars, all_rows=True)
    assert set(got["side"]) == {-1, 1} and (got.index > bars["timestamp"].iloc[-LAST]).sum() > 5
    span = wanted.index[-1] - wanted.index[0]
    assert len(got) < 0.9 * span / pd.Timedelta(minutes=5)  # rows without a bet left out
    pd.testing.assert_frame_equal(got, wanted[: len(got)], check_freq=False)
    assert len(wanted) - len(got) <= 1


def test_prediction_stream_after_cold_start_equals_batch(prepared, tmp_path):
    settings = {"rounds": 60, "offset": "none"}  # without it a small linear model is the clock, and reads no price
    pipeline.prepare(prepared, "DEMO", (H,), settings=DataSpec(features=FeatureSpec(frames=(15,))))
    pipeline.train(prepared, "DEMO", H, "linear", mirror="off", model_settings=settings)
    path = pipeline.export(prepared, "DEMO", H, "linear", formats=("bundle",), out=tmp_path).paths["bundle"]
    bundle, bars = Bundle.load(path), pd.read_parquet(prepared.raw_bars("DEMO"))
    bundle = replace(bundle, description=bundle.description | {"warmup_bars": bundle.description["warmup_bars"] + 7})
    first = 2500 + int((bars["timestamp"].iloc[2500:].dt.minute % 5 == 0).argmax())  # where a base bar begins
    stream, end = PredictionStream(bundle, cold=True), bars["timestamp"].iloc[-1] + pd.Timedelta(minutes=1)
    got = pd.concat([stream.push(bars.iloc[first:]), stream.advance(end)])
    wanted = bundle.predict(bars, all_rows=True)
    known = wanted.index[wanted.index > bars["timestamp"].iloc[first]]
    waited = bundle.description["warmup_bars"]
    assert got.index.equals(known[waited:]) and len(got) > 100, (len(known) - len(got), waited)
    np.testing.assert_allclose(got[P], wanted.loc[got.index, P], rtol=0, atol=1e-5)
    assert wanted[P].std().min() > 1e-3


def test_prediction_stream_refuses_states_of_another_bundle_or_damaged(bundle_file, raw_bars):
    stream = PredictionStream(Bundle.load(bundle_file("linear")))
    stream.push(raw_bars.iloc[:50])
    state = stream.get_state()
    with pytest.raises(SettingsError, match="stream of another bundle"):
        PredictionStream(Bundle.load(bundle_file("xgboost"))).load_state(state)
    with pytest.raises(CheckpointError, match="damaged"):
        stream.load_state({**state, "features": {}})
