"""ONNX graphs: the probabilities of the model from unscaled rows, the leaves of its trees, and the gate."""

import dataclasses
import re
import sys

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest

from ml_factory import Bundle, pipeline
from ml_factory.datasets.scaling import QuantileScaler, RobustScaler
from ml_factory.errors import FactoryError, MissingPackageError, SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.inference import bundle as bundle_module
from ml_factory.inference import onnx_export, onnx_gate, onnx_trees
from ml_factory.inference.onnx_gate import check_onnx_graph
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.inference.predict import FittedModels
from ml_factory.inference.stream import PredictionStream
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.models.registry import build_model
from tests.inference.conftest import H

BOOSTERS = ("xgboost", "lightgbm", "catboost")
SPEC = {"data": {"labels": {"kind": "triple_barrier"}}}
NETWORKS = {
    "gru": {"hidden": 4, "lookback": 6, "offset_column": 1, "offset_bars": 5},
    "lstm": {"hidden": 4, "lookback": 8},
    "tcn": {"width": 4, "lookback": 6},
    "patchtst": {"lookback": 8, "patch": 4, "stride": 2},
    "itransformer": {"lookback": 8},
    "tft": {"lookback": 8},
}


def rows(n=400, seed=0) -> pd.DataFrame:
    """Features of very different size, with missing values."""
    x = np.random.default_rng(seed).normal(size=(n, 3)) * [1, 100, 1e-3] + [0, 50, 0]
    x[np.random.default_rng(seed + 1).random(x.shape) < 0.02] = np.nan
    index = pd.date_range("2025-01-06", periods=n, freq="5min", tz="UTC", name="known_at")
    return pd.DataFrame(x.astype(np.float32), index, ["a", "b", "c"])


def fitted_model(name: str, scaler=RobustScaler, calibration=None, **settings) -> FittedModels:
    """A small model of synthetic rows, with a calibration."""
    features = rows()
    scaled = scaler.fit(features.to_numpy())
    x, y = scaled.transform(features.to_numpy()), np.sign(np.nan_to_num(features["a"])).astype(int)
    y[np.random.default_rng(5).random(len(y)) < 0.3] = 0
    model = build_model(name, **settings)
    if model.lookback > 1:
        last = np.arange(model.lookback - 1, len(x))
        x, y = np.stack([x[i + 1 - model.lookback : i + 1] for i in last]), y[last]
    model.fit(x, y)
    calibration = calibration or {"temperature": 1.7, "bias": [0.1, 0.2, -0.3]}
    lookback = model.lookback if model.lookback > 1 else 0
    kept = TrainedModel(model.get_state(), scaled.to_dict(), ("a", "b", "c"), SPEC, calibration, lookback)
    return FittedModels({name: kept})


def gate(fitted: FittedModels, graph: bytes | None = None, **given):
    features = given.get("features", rows(seed=9))
    graph = onnx_export.onnx_of_models(fitted, {}) if graph is None else graph
    segment = np.arange(len(features)) // 100
    return check_onnx_graph(graph, fitted, features, segment=segment)


@pytest.mark.parametrize("offset", [{}, {"offset_column": 1, "offset_bars": 5}])
@pytest.mark.parametrize("name", [*BOOSTERS, "linear"])
def test_onnx_of_tabular_model_passes_gate_with_missing_values_and_offset(name, offset):
    found = gate(fitted_model(name, rounds=25, threads=1, **offset))
    assert found.rows == 400 and found.difference < 1e-6
    assert (found.threshold_rows > 100) == (name in BOOSTERS)


@pytest.mark.soak_except("gru")
@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_of_network_passes_gate(name):
    fitted = fitted_model(name, num_epochs=1, batch_size=64, threads=1, **NETWORKS[name])
    assert gate(fitted).difference < 1e-6


def test_onnx_of_trained_model_or_stack_equals_predictions_and_travels_in_bundle(
    trained, raw_bars, tmp_path, monkeypatch
):
    for model, lookback in (("xgboost", 0), ("stack", 8)):
        paths = pipeline.export(trained, "DEMO", H, model, formats=("bundle", "onnx"), out=tmp_path).paths
        wanted = pipeline.predict(trained, "DEMO", H, model, all_rows=True).frame
        features = pipeline.load_features(trained, "DEMO")
        place = features.index.get_indexer(wanted.index)
        place = place[:, None] + np.arange(1 - lookback, 1) if lookback else place
        session = onnxruntime.InferenceSession(paths["onnx"])
        p = session.run(None, {"features": features.to_numpy(np.float32)[place]})[0]
        np.testing.assert_allclose(p, wanted[P], rtol=0, atol=1e-6)
        assert {one.domain: one.version for one in onnx.load(paths["onnx"]).opset_import} == {"": 20, "ai.onnx.ml": 5}
        with monkeypatch.context() as patch:
            patch.setattr(bundle_module, "absent_libraries", lambda names: ["torch"])
            bundle = Bundle.load(paths["bundle"])
            assert bundle.engine == "onnx"
            got = bundle.predict(raw_bars, all_rows=True)
            pd.testing.assert_frame_equal(got, wanted, check_exact=False, rtol=0, atol=1e-6)
            stream = PredictionStream(bundle)
            pushed = pd.concat([stream.push(raw_bars.iloc[:-30]), stream.push(raw_bars.iloc[-30:])])
            pd.testing.assert_frame_equal(pushed, got[: len(pushed)], check_freq=False, rtol=0, atol=1e-9)
        assert Bundle.load(paths["bundle"]).engine == "native"


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOOSTERS)
def test_onnx_gate_with_comparison_off_by_one_value_raises_with_threshold(name, monkeypatch):
    fitted = fitted_model(name, rounds=5, threads=1)
    monkeypatch.setattr(onnx_trees, "LESS", 0)
    monkeypatch.setattr(onnx_trees, "LESS_OR_EQUAL", 1)
    with pytest.raises(
        FactoryError, match=rf"trees of {name} take other leaves.*tree \d+ of 15, input \d of 3 at .*threshold.*leaf \d"
    ):
        gate(fitted)


def test_onnx_gate_with_leaves_swapped_that_have_equal_values_raises(monkeypatch):
    """Sums of leaves are blind to it: the leaves themselves are compared."""
    fitted = fitted_model("xgboost", rounds=5, threads=1)
    nodes = onnx_trees.tree_nodes("xgboost", fitted.models["xgboost"].model_state["fitted"])
    one_value = np.where(nodes.left < 0, 0.25, 0.0)
    stored = fitted.models["xgboost"].model_state["fitted"]
    stored["split_conditions"][nodes.left < 0] = 0.25
    turned = dataclasses.replace(nodes, value=one_value, left=nodes.right, right=nodes.left)
    for module in (onnx_export, onnx_gate):
        monkeypatch.setattr(module, "tree_nodes", lambda *given: turned)
    with pytest.raises(FactoryError, match=r"trees of xgboost take other leaves"):
        gate(fitted)


def test_onnx_gate_looks_behind_a_calibration_that_leaves_the_prior_alone(monkeypatch):
    flat = {"temperature": 1e6, "bias": [0.1, 0.2, -0.3]}
    fitted, graph_of = fitted_model("linear", rounds=5, calibration=flat), onnx_export.onnx_of_models
    assert gate(fitted).difference < 1e-9
    linear = onnx_export._linear
    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "_linear", lambda graph, *x: graph.add("Neg", linear(graph, *x)))
        written = graph_of(fitted, {})
    with pytest.raises(FactoryError, match="does not predict as the model does"):  # a fresh graph would be right
        gate(fitted, written)


def test_onnx_gate_compares_10000_rows_spread_over_all_of_them(monkeypatch):
    fitted = fitted_model("linear", rounds=5)
    seen = []
    predict = FittedModels.predict_features
    monkeypatch.setattr(
        FittedModels,
        "predict_features",
        lambda self, *x, rows, **y: seen.append(rows) or predict(self, *x, rows=rows, **y),
    )
    assert gate(fitted, features=rows(12_000)).rows == 10_000
    assert (seen[0][0], seen[0][-1]) == (0, 11_999) and np.diff(seen[0]).max() == 2 and len(set(seen[0])) == 10_000


def test_onnx_of_catboost_trained_on_two_classes_passes_gate():
    features = rows()
    x = RobustScaler.fit(features.to_numpy())
    model = build_model("catboost", rounds=5, threads=1)
    model.fit(x.transform(features.to_numpy()), np.where(np.nan_to_num(features["a"]) > 0, 1, -1))
    kept = TrainedModel(
        model.get_state(), x.to_dict(), ("a", "b", "c"), SPEC, {"temperature": 1.7, "bias": [0.1, 0, 0]}
    )
    assert gate(FittedModels({"catboost": kept})).difference < 1e-6


def test_onnx_gate_with_other_probabilities_raises_with_worst_row():
    fitted = fitted_model("linear", rounds=5)
    other = fitted_model("linear", rounds=5, calibration={"temperature": 1.75, "bias": [0.1, 0.2, -0.3]})
    with pytest.raises(FactoryError, match=r"does not predict as the model does.*row 2025-01-0\d.*got \[0\..*wanted"):
        gate(fitted, onnx_export.onnx_of_models(other, {}))
    swapped = fitted_model("linear", rounds=5, calibration={"temperature": 1.7, "bias": [0.100001, 0.2, -0.300001]})
    assert 0 < gate(fitted, onnx_export.onnx_of_models(swapped, {})).difference < 1e-5


def test_export_onnx_that_fails_gate_leaves_nothing(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_gate, "LARGEST", -1.0)
    with pytest.raises(FactoryError, match="does not predict as the model does, and is not written"):
        pipeline.export(trained, "DEMO", H, "linear", formats=("bundle", "onnx"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_by_default_writes_bundle_and_graph(trained, tmp_path):
    exported = pipeline.export(trained, "DEMO", H, "linear", out=tmp_path)
    assert set(exported.paths) == {"bundle", "card", "onnx"} and not exported.no_onnx
    assert Bundle.load(exported.paths["bundle"]).onnx == exported.paths["onnx"].read_bytes()


@pytest.mark.parametrize("absent", ["package", "graph"])
def test_export_without_onnx_writes_bundle_and_says_why_unless_onnx_is_asked_for(
    trained, tmp_path, monkeypatch, absent
):
    if absent == "package":
        for name in [name for name in sys.modules if name.startswith("ml_factory.inference.onnx_")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "onnx", None)
        words = r"package onnx is not installed.*pip install 'ml_factory\[onnx\]'"
    else:
        monkeypatch.setattr(onnx_export, "LinearScaler", QuantileScaler)
        words = r"step of the preprocessing has no ONNX graph"
    exported = pipeline.export(trained, "DEMO", H, "linear", out=tmp_path / "default")
    assert set(exported.paths) == {"bundle", "card"} and re.search(words, exported.no_onnx)
    (line,) = [line for line in exported.summary().splitlines() if "no onnx" in line]
    assert exported.no_onnx in line and not Bundle.load(exported.paths["bundle"]).onnx
    with pytest.raises((SettingsError, MissingPackageError), match=words):
        pipeline.export(trained, "DEMO", H, "linear", formats=("bundle", "onnx"), out=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("shape", ["normal", "uniform"])
def test_onnx_of_quantile_scaling_equals_scaler_on_knots_between_and_beyond_them(shape):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(3000, 3)).astype(np.float32) * [1, 100, 1]
    x[:, 2] = np.round(x[:, 2] * 2)  # whole numbers: equal knots
    x = np.column_stack([x, np.full(3000, 7.0)]).astype(np.float32)  # and one value alone
    scaler = QuantileScaler.fit(x, shape=shape, knots=33)
    at_knots = scaler.knots.T.astype(np.float32)
    around = [np.nextafter(at_knots, np.float32(side)) for side in (-np.inf, np.inf)]
    odd = np.array([[np.nan] * 4, [np.inf] * 4, [-np.inf] * 4, [0.0] * 4, [-0.0] * 4, [3e38] * 4, [1e-40] * 4])
    rows_N4 = np.concatenate([x, at_knots, *around, odd.astype(np.float32)])[: 3104 // 4 * 4]
    for shaped in (rows_N4, rows_N4.reshape(-1, 4, 4)):
        graph = OnnxGraph()
        scaled = onnx_export.add_preprocessing(graph, graph.input("features", ["N", *shaped.shape[1:]]), scaler)
        data = graph.to_model(graph.cast(scaled, "double"), "scaled", ["N", *shaped.shape[1:]], {})
        (got,) = onnxruntime.InferenceSession(data).run(None, {"features": shaped})
        wanted = scaler.transform(rows_N4).reshape(shaped.shape)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
        assert (got.astype(np.float32) == wanted).mean() > 0.999


@pytest.mark.parametrize("name", ["xgboost", "linear", "gru"])
def test_onnx_of_model_on_quantile_scaling_passes_gate(name):
    settings = {"num_epochs": 1, "batch_size": 64, **NETWORKS[name]} if name in NETWORKS else {"rounds": 5}
    assert gate(fitted_model(name, QuantileScaler, threads=1, **settings)).difference < 1e-6


def test_onnx_graph_of_model_is_the_same_bytes_again():
    fitted = fitted_model("lightgbm", rounds=5, threads=1)
    assert onnx_export.onnx_of_models(fitted, {"a": "b"}) == onnx_export.onnx_of_models(fitted, {"a": "b"})
