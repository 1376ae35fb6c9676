"""ONNX graphs of finished models: the same probabilities, also at the thresholds of trees; bundles that use them."""

import re
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest

from ml_factory import Bundle, pipeline
from ml_factory.errors import FactoryError, MissingPackageError
from ml_factory.models.registry import available_models, build_model
from tests.contract.doors import (
    GraphModel,
    RobustScaler,
    SessionClockOffset,
    TrainedModel,
    check_onnx_graph,
    find_model_spec,
    model_to_onnx,
    onnx_export,
    preprocessing_from_dict,
    read_state_file,
    softmax,
)
from tests.inference.conftest import H

BOOSTERS = ("xgboost", "lightgbm", "catboost")
COLUMNS = ("a", "b", "c")
SPEC = {"data": {"labels": {"kind": "triple_barrier"}}}
SMALL = {
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
    return pd.DataFrame(x.astype(np.float32), index, COLUMNS)


def trained_model(name: str, classes: int = 3, **settings) -> TrainedModel:
    """A small model of synthetic rows, with a calibration; its blocks are of ten rounds."""
    features = rows()
    scaled = RobustScaler.fit(features.to_numpy())
    x, y = scaled.transform(features.to_numpy()), np.where(np.nan_to_num(features["a"]) > 0, 1, -1)
    if classes == 3:
        y[np.random.default_rng(5).random(len(y)) < 0.3] = 0
    usual = {"num_epochs": 1, "batch_size": 64} if find_model_spec(name).windowed else {"rounds": 25}
    model = build_model(name, **{"threads": 1, **usual, **SMALL.get(name, {}), **settings})
    if model.lookback > 1:
        last = np.arange(model.lookback - 1, len(x))
        x, y = np.stack([x[i + 1 - model.lookback : i + 1] for i in last]), y[last]
    model.fit(x, y)
    lookback, calibration = model.lookback if model.lookback > 1 else 0, {"temperature": 1.7, "bias": [0.1, 0.2, -0.3]}
    return TrainedModel(model.get_state(), scaled.to_dict(), COLUMNS, SPEC, calibration, lookback)


def difference(model: TrainedModel, graph: bytes | None = None) -> float:
    features = rows(seed=9)
    graph = graph or model_to_onnx(model)
    return check_onnx_graph(graph, model, features, segment=np.arange(len(features)) // 100)


@pytest.mark.parametrize("offset", [{}, {"offset_column": 1, "offset_bars": 5}], ids=["", "offset"])
@pytest.mark.parametrize("name", [name for name in available_models() if not find_model_spec(name).windowed])
def test_graph_of_tabular_model_equals_model(name, offset):
    model = trained_model(name, **offset)
    assert difference(model) < 1e-6
    assert model_to_onnx(model) == model_to_onnx(model)


@pytest.mark.soak_except("gru")
@pytest.mark.parametrize("name", SMALL)
def test_graph_of_network_equals_network(name):
    assert difference(trained_model(name)) < 1e-6


@pytest.mark.parametrize("name", BOOSTERS)
def test_graph_of_booster_of_two_classes_or_leaves_alone_equals_booster(name):
    two = trained_model(name, classes=2, rounds=5)
    assert difference(two) < 1e-6
    p = GraphModel.of(two, model_to_onnx(two)).predict_rows(np.zeros((1, 3), np.float32), np.array([0]))
    assert p[0, 1] < 0.3
    assert difference(trained_model(name, **{"l2" if name == "catboost" else "min_leaf": 1e6})) < 1e-6


@pytest.mark.parametrize("name", [*BOOSTERS, "linear"])
def test_graph_of_model_that_is_no_better_than_the_clock_gives_no_scores(name):
    model = trained_model(name, offset_column=1, offset_bars=5)
    clock = replace(model, model_state=model.model_state | {"best_round": 0})
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    assert difference(clock) < 1e-12
    assert np.abs(clock.predict_rows(x, np.arange(9)) - model.predict_rows(x, np.arange(9))).max() > 1e-3


def thresholds(graph: bytes) -> list[tuple[int, float]]:
    """Column and threshold of every split in the graph."""
    found = []
    for node in onnx.load_from_string(graph).graph.node:
        given = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        names = [given.get(f"nodes_{name}", ()) for name in ("modes", "featureids", "values")]
        found += [(column, value) for mode, column, value in zip(*names, strict=True) if mode != b"LEAF"]
    return found


@pytest.mark.parametrize("name", BOOSTERS)
def test_graph_of_booster_takes_its_side_at_every_threshold(name):
    """Rows on, just above and just below each threshold; LightGBM's exact ones lie next to them, or stand for 0."""
    model = trained_model(name, rounds=60, depth=5)
    data, generator = model_to_onnx(model), np.random.default_rng(3)
    graph, splits = GraphModel.of(model, data), thresholds(data)
    base = preprocessing_from_dict(model.scaler).transform(rows(seed=9).to_numpy())
    x = base[generator.integers(len(base), size=3 * len(splits))]
    for number, (column, split) in enumerate(splits):
        near, far = np.float32(split if abs(split) > 1e-30 else 0), np.float32(np.inf)
        x[3 * number : 3 * number + 3, column] = near, np.nextafter(near, far), np.nextafter(near, -far)
    every = np.arange(len(x))
    assert len(x) > 500
    np.testing.assert_allclose(graph.predict_rows(x, every), model.predict_rows(x, every), rtol=0, atol=1e-6)


def test_graph_of_other_model_is_refused_with_worst_row():
    model, other = (trained_model("linear", l2=l2) for l2 in (1.0, 100.0))
    with pytest.raises(FactoryError, match=r"does not predict as the model does.*row 2025-01-0\d.*got \[0\..*wanted"):
        difference(model, model_to_onnx(other))
    calibrated_flat = replace(model, calibration={"temperature": 1e6, "bias": [0.1, 0.2, -0.3]})
    with pytest.raises(FactoryError, match=r"does not predict as the model does"):
        difference(calibrated_flat, model_to_onnx(other))


def test_booster_that_the_converter_cannot_read_is_refused():
    model = trained_model("lightgbm", rounds=5)
    broken = replace(model, model_state=model.model_state | {"fitted": [b"another format"]})
    with pytest.raises(FactoryError, match=r"converter cannot read this model of lightgbm"):
        model_to_onnx(broken)


# ---- exported ------------------------------------------------------------------------------------------------------


def test_exported_graph_gives_class_scores_of_preprocessed_rows(trained, tmp_path):
    (forecasts,) = trained("xgboost").results.glob("DEMO/*-xgboost-*/predictions.parquet")
    forecasts.unlink()  # a bundle reads them, or makes them again
    path = pipeline.export(trained("xgboost"), "DEMO", H, "xgboost", formats=("onnx",), out=tmp_path).paths["onnx"]
    assert [one.name for one in tmp_path.iterdir()] == ["DEMO-h5-xgboost.onnx"] and not forecasts.exists()
    assert onnx.load(path).ir_version == 10
    model = TrainedModel.from_state(
        read_state_file(next(trained("xgboost").models.glob("DEMO/model-xgboost-*/state.safetensors")))
    )
    offset = SessionClockOffset.from_dict(model.model_state["offset"])
    x = np.random.default_rng(0).normal(size=(9, len(model.feature_names))).astype(np.float32)
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"rows": x})
    p = softmax(scores + offset.log_class_shares(x[:, offset.column]))
    np.testing.assert_allclose(p, model.estimator.predict_proba(x), atol=1e-6)


def test_export_of_graph_that_predicts_otherwise_leaves_nothing(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "LARGEST", -1.0)
    with pytest.raises(FactoryError, match="does not predict as the model does, and is not written"):
        pipeline.export(trained("linear"), "DEMO", H, "linear", formats=("bundle", "onnx"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    exported = pipeline.export(trained("linear"), "DEMO", H, "linear", out=tmp_path / "out")
    assert set(exported.paths) == {"bundle", "card"} and "does not predict" in exported.no_onnx


def test_export_without_onnx_writes_bundle_and_says_why_unless_onnx_is_asked_for(trained, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ml_factory.inference.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    words = r"package onnx is not installed.*pip install 'ml_factory\[onnx\]'"
    exported = pipeline.export(trained("linear"), "DEMO", H, "linear", out=tmp_path / "default")
    assert set(exported.paths) == {"bundle", "card"} and re.search(words, exported.no_onnx)
    (line,) = [line for line in exported.summary().splitlines() if "no onnx" in line]
    assert exported.no_onnx in line and not Bundle.load(exported.paths["bundle"]).graphs
    with pytest.raises(MissingPackageError, match=words):
        pipeline.export(trained("linear"), "DEMO", H, "linear", formats=("bundle", "onnx"), out=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
