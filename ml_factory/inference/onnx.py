"""A finished model as a graph of ONNX, made by the converter of its library, and the comparison of the two.

The graph reads what the model reads: preprocessed rows float32 (N, F), or windows of them (N, T, F). It gives class
scores (N, 3), without clock offset and calibration, which are computed by the same code whatever gives the scores.
"""

import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pandas as pd
from onnx import TensorProto, helper, numpy_helper

from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.inference.predict import INPUT, OUTPUT, GraphModel, TrainedModel, predict_features
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import find_model_spec
from ml_factory.models.rows import CLASSES

OPSETS, IR = {"": 20, "ai.onnx.ml": 3}, 10
ROWS, LARGEST = 10_000, 1e-5
_TREES = "TreeEnsembleClassifier"
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_LINEAR = f"""
<ir_version: {IR}, opset_import: ["" : {OPSETS[""]}]>
linear (float[N, F] {INPUT}) => (double[N, {len(CLASSES)}] {OUTPUT}) {{
    exact = Cast <to = {TensorProto.DOUBLE}> ({INPUT})
    centered = Sub (exact, mean)
    scaled = Div (centered, deviation)
    missing = IsNaN (scaled)
    filled = Where (missing, zero, scaled)
    clipped = Clip (filled, low, high)
    product = MatMul (clipped, weights)
    {OUTPUT} = Add (product, bias)
}}
"""
# Converters and boosters come with extras; a network's needs torch.
converters, torch = LazyModule("onnxmltools"), LazyModule("torch")
xgboost, lightgbm, catboost = (LazyModule(name) for name in ("xgboost", "lightgbm", "catboost"))


def model_to_onnx(model: TrainedModel) -> bytes:
    """Return the graph of a model. Raises SettingsError for a network that cannot be exported."""
    name = model.model_state["model"]
    if find_model_spec(name).windowed:
        graph = _network_to_onnx(model.estimator)
    else:
        graph = _linear_graph(model.model_state) if name == "linear" else _booster_graph(name, model.model_state)
    onnx.checker.check_model(graph)
    return graph.SerializeToString(deterministic=True)


def check_onnx_graph(graph: bytes, model: TrainedModel, features: pd.DataFrame, *, segment: np.ndarray) -> float:
    """Return the largest difference of a probability, before calibration, on at most ROWS rows spread evenly.

    features, segment : as of `predict.predict_features`.
    Raises FactoryError naming the worst row where it is more than LARGEST.
    """
    model = replace(model, calibration=Calibration().to_dict())
    rows = np.arange(len(features), dtype=np.int64)
    if model.lookback:
        rows = rows[mask_rows_with_full_window(segment, rows, model.lookback)]
    rows = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64)]
    by_graph = GraphModel.of(model, graph)
    wanted = predict_features(model, features, segment=segment, rows=rows)
    got = predict_features(by_graph, features, segment=segment, rows=rows)
    alone = predict_features(by_graph, features, segment=segment, rows=rows[-1:])
    return max(_difference(got, wanted), _difference(alone, wanted.iloc[-1:]))


def _difference(got: pd.DataFrame, wanted: pd.DataFrame) -> float:
    off_N = np.abs(got.to_numpy() - wanted.to_numpy()).max(axis=1)
    worst = int(np.argmax(np.where(np.isnan(off_N), np.inf, off_N)))
    if not off_N[worst] <= LARGEST:
        raise FactoryError(
            "The ONNX graph does not predict as the model does, and is not written",
            where=f"row {wanted.index[worst]}", got=np.round(got.to_numpy()[worst], 7).tolist(),
            wanted=np.round(wanted.to_numpy()[worst], 7).tolist(),
            next_step="export the bundle alone, and report this",
        )  # fmt: skip
    return float(off_N[worst])


def _linear_graph(state: dict) -> onnx.ModelProto:
    """Return the linear model, computed in float64: its own scaling, missing values at the mean, clipped."""
    fitted, clip = state["fitted"], state["settings"]["clip"]
    weights = np.asarray(fitted["weights"]) * (state["best_round"] > 0)  # 0 where no round is better than the clock
    graph = onnx.parser.parse_model(_LINEAR)
    values = {
        "mean": fitted["mean"], "deviation": fitted["deviation"], "zero": 0.0, "low": -clip, "high": clip,
        "weights": weights[:-1], "bias": weights[-1],
    }  # fmt: skip
    graph.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.float64, order="C"), name) for name, value in values.items()
    )
    return graph


def _booster_graph(name: str, state: dict) -> onnx.ModelProto:
    """Return the sum over a booster's blocks, 0 where no round is better than the clock."""
    nodes, parts = [], []
    for number, data in enumerate(state["fitted"], 1):
        trees = _converted_trees(name, data, state["n_features"])
        given = {one.name: helper.get_attribute_value(one) for one in trees.attribute}
        # A constant that all classes share makes no difference, and would cost digits of the sum.
        given = {key: value for key, value in given.items() if key != "base_values"}
        parts.append(f"scores_{number}")
        outputs = [f"likeliest_{number}", parts[-1]]
        given["post_transform"] = "NONE"
        nodes.append(helper.make_node(_TREES, [INPUT], outputs, domain="ai.onnx.ml", **given))
    nodes.append(helper.make_node("Sum", parts, ["sum"]))
    used = numpy_helper.from_array(np.array(float(state["best_round"] > 0), np.float32), "used")
    nodes.append(helper.make_node("Mul", ["sum", used.name], [OUTPUT]))
    rows = helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["N", state["n_features"]])
    scores = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["N", len(CLASSES)])
    graph = helper.make_graph(nodes, name, [rows], [scores], [used])
    opsets = [helper.make_opsetid(*one) for one in OPSETS.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="ml_factory")


def _converted_trees(name: str, data: bytes, features: int) -> onnx.NodeProto:
    """Return the node of a block's trees. Raises SettingsError where the converter cannot read the block."""
    try:
        (trees,) = [node for node in _CONVERTERS[name](data, features).graph.node if node.op_type == _TREES]
    except Exception as error:  # of libraries whose next version may raise anything
        raise SettingsError(
            f"The converter cannot read this model of {name}", where="onnx", got=" ".join(str(error).split())[:200],
            wanted=f"a version of {name} that onnxmltools knows", next_step="export the bundle alone",
        ) from error  # fmt: skip
    return trees


def _xgboost(data: bytes, features: int) -> onnx.ModelProto:
    return converters.convert_xgboost(xgboost.Booster(model_file=bytearray(data)), initial_types=_inputs(features))


def _lightgbm(data: bytes, features: int) -> onnx.ModelProto:
    booster = lightgbm.Booster(model_str=_with_float32_thresholds(data.decode()))
    return converters.convert_lightgbm(booster, initial_types=_inputs(features), zipmap=False)


def _with_float32_thresholds(text: str) -> str:
    """Return a LightGBM model whose thresholds are the largest float32 not above them: ONNX compares float32 numbers.

    No row of float32 takes another side. The sizes of the trees' texts, which are others, are left out.
    """

    def floored(line: re.Match) -> str:
        exact = np.clip(np.array(line[1].split(), np.float64), -_LARGEST_FLOAT, _LARGEST_FLOAT)
        near = exact.astype(np.float32)
        near = np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
        return "threshold=" + " ".join(map(repr, near.astype(np.float64).tolist()))

    return re.sub(r"^threshold=(.*)$", floored, re.sub(r"^tree_sizes=.*\n", "", text, flags=re.M), flags=re.M)


def _catboost(data: bytes, features: int) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        catboost.CatBoost().load_model(blob=data).save_model(f"{folder}/model.onnx", format="onnx")
        return onnx.load(f"{folder}/model.onnx")


def _inputs(features: int) -> list:
    types = LazyModule("onnxmltools.convert.common.data_types")
    return [(INPUT, types.FloatTensorType([None, features]))]


_CONVERTERS: dict[str, Callable[..., onnx.ModelProto]] = {
    "xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost,
}  # fmt: skip


_ROWS = 3  # of the example that is traced; the batch is dynamic


def _network_to_onnx(model: Any) -> Any:
    """Return the network as an `onnx.ModelProto`: scaled windows x_BTF -> logits, without its clock offset.

    Raises SettingsError where the network cannot be traced.
    """
    example = torch.zeros(_ROWS, model.lookback, model.n_features)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # notes of the exporter on operators that no network here has
        try:
            return torch.onnx.export(
                model.network.eval(), (example,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=OPSETS[""], input_names=[INPUT], output_names=[OUTPUT], verbose=False,
            ).model_proto  # fmt: skip
        except (RuntimeError, torch._dynamo.exc.UserError) as error:
            raise SettingsError(
                "This network cannot be exported as a graph", where=model.name, got=str(error).strip()[:200],
                next_step="export the bundle alone",
            ) from error  # fmt: skip
