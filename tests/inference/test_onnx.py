"""ONNX graphs of finished models: the same probabilities, also at the thresholds of trees; bundles that use them."""

import onnxruntime
import pandas as pd
import pytest

from ml_factory import Bundle, pipeline
from ml_factory.inference import bundle as bundle_module
from ml_factory.inference.stream import PredictionStream
from tests.inference.conftest import H


@pytest.mark.parametrize("model", ["xgboost", "stack"])
def test_bundle_with_graphs_predicts_without_libraries(trained, raw_bars, tmp_path, monkeypatch, model):
    exported = pipeline.export(trained(model), "DEMO", H, model, out=tmp_path)
    names = {"xgboost": {"onnx"}, "stack": {"onnx xgboost", "onnx lstm"}}[model]
    assert exported.paths.keys() == {"bundle", "card", *names} and not exported.no_onnx
    native = Bundle.load(exported.paths["bundle"])
    assert native.engine == "native"
    assert {exported.paths[name].read_bytes() for name in names} == {*native.graphs.values()}
    wanted = pipeline.predict(trained(model), "DEMO", H, model, all_rows=True).frame
    monkeypatch.setattr(bundle_module, "absent_libraries", lambda names: ["torch"])
    off = []
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: off.append(True))
    bundle = Bundle.load(exported.paths["bundle"])
    assert bundle.engine == "onnx" and off
    got = bundle.predict(raw_bars, all_rows=True)
    pd.testing.assert_frame_equal(got, wanted, check_exact=False, rtol=0, atol=1e-6)
    stream = PredictionStream(bundle)
    pushed = pd.concat([stream.push(raw_bars.iloc[:-30]), stream.push(raw_bars.iloc[-30:])])
    pd.testing.assert_frame_equal(pushed, got[: len(pushed)], check_freq=False, rtol=0, atol=1e-9)
