"""A finished model or stack as one ONNX graph: preprocessing, model, clock offset, calibration and pool.

The graph reads unscaled feature rows (N, F), or windows of them (N, T, F) where a model looks back, and gives the
calibrated probabilities, float64 (N, 3). Scaling and all that follows a model's scores are computed in float64.
"""

from collections.abc import Mapping

import numpy as np

from ml_factory.datasets.feature_selection import FeatureSelection
from ml_factory.datasets.fitted_transforms import PcaTransform
from ml_factory.datasets.preprocessing import FittedStep, Preprocessor, preprocessing_from_dict
from ml_factory.datasets.scaling import LinearScaler, QuantileScaler
from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import SettingsError
from ml_factory.evaluation.calibration import SMALLEST, Calibration
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.inference.onnx_models import INPUT, OUTPUT
from ml_factory.inference.onnx_quantiles import add_quantile_scaling
from ml_factory.inference.onnx_trees import ensemble_name, tree_nodes
from ml_factory.inference.predict import FittedModels
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import CLASSES
from ml_factory.models.registry import find_model_spec
from ml_factory.models.session_clock_offset import PROGRESS_CELLS, SessionClockOffset
from ml_factory.targets.labels import stored_label_classes

network = LazyModule("ml_factory.inference.network_graph")  # torch comes with the networks only


def onnx_of_models(fitted: FittedModels, facts: Mapping[str, str]) -> bytes:
    """Return the graph of a model or stack.

    facts : texts stored in the file.
    Raises SettingsError for a step that has no graph.
    """
    graph, models = OnnxGraph(), fitted.used
    features = len(next(iter(models.values())).feature_names)
    shape = ["N", fitted.lookback, features] if fitted.lookback else ["N", features]
    x = graph.input(INPUT, shape)
    found = {name: _probabilities(graph, x, fitted.lookback, name, model) for name, model in models.items()}
    if fitted.stack is None:
        (output,) = found.values()
    else:
        pooled = _pool(graph, found, Stack.from_dict(fitted.stack["stack"]))
        output = _calibrated(graph, pooled, Calibration.from_model_state(fitted.stack), fitted.stack["spec"])
    return graph.to_model(output, OUTPUT, ["N", len(CLASSES)], facts)


def _probabilities(graph: OnnxGraph, x: str, lookback: int, name: str, model: TrainedModel) -> str:
    """Add one model; return its calibrated probabilities.

    x : unscaled rows, or windows of `lookback` rows, the longest of any model.
    """
    if lookback and not model.lookback:
        x = graph.add("Gather", x, graph.constant(lookback - 1, np.int64), axis=1)
    elif model.lookback < lookback:
        ends = [graph.constant([value], np.int64) for value in (lookback - model.lookback, lookback, 1)]
        x = graph.add("Slice", x, *ends)
    scaled = add_preprocessing(graph, x, preprocessing_from_dict(model.scaler))
    scores = _scores(graph, scaled, name, model)
    classes = _on_classes(graph, graph.softmax(scores), model.classes)
    classes = graph.named(classes, uncalibrated_output(name))
    return _calibrated(graph, classes, Calibration.from_dict(model.calibration), model.spec)


def uncalibrated_output(name: str) -> str:
    """Return the tensor of a model's probabilities before its calibration, float64 (N, 3)."""
    return f"{name}/uncalibrated"


def _scores(graph: OnnxGraph, x: str, name: str, model: TrainedModel) -> str:
    """Add the model itself; return scores, float64 (N, 3), with its clock offset in them."""
    state = model.model_state
    stored = state.get("offset")
    offset = None if stored is None else SessionClockOffset.from_dict(stored)
    last = x
    if find_model_spec(name).windowed:
        last = graph.add("Gather", x, graph.constant(model.lookback - 1, np.int64), axis=1)
        scores = graph.cast(graph.inline(network.network_to_onnx(model.estimator), x), "double")
    elif not has_rounds(state):
        scores = graph.constant(np.zeros((1, len(CLASSES))))
    elif name == "linear":
        scores = _linear(graph, x, state["fitted"], state["settings"]["clip"])
    else:
        scores = tree_nodes(name, state["fitted"]).add_to(graph, x, name=ensemble_name(name))
        if absent := set(range(len(CLASSES))) - set(_classes_of_trees(name, state["fitted"])):
            impossible = np.where(np.isin(np.arange(len(CLASSES)), list(absent)), -np.inf, 0.0)
            scores = graph.add("Add", scores, graph.constant(impossible))
    return scores if offset is None else graph.add("Add", scores, _clock_shares(graph, last, offset))


def has_rounds(state: Mapping) -> bool:
    """Return whether a tabular model has more than its clock offset; only then its trees or weights are exported."""
    return state.get("offset") is None or bool(state["best_round"])


def _classes_of_trees(name: str, fitted: Mapping[str, np.ndarray]) -> list[int]:
    """Return the positions of the classes that have trees: CatBoost's, which leaves out one without training rows."""
    return fitted["classes"].tolist() if name == "catboost" else list(range(len(CLASSES)))


def _linear(graph: OnnxGraph, x: str, fitted: Mapping[str, np.ndarray], clip: float) -> str:
    """Add the linear model on scaled rows: scaled by its own mean and deviation, clipped, missing at 0."""
    mean, deviation, weights = (np.asarray(fitted[part], np.float64) for part in ("mean", "deviation", "weights"))
    z = _standardised(graph, x, mean, deviation, clip)
    product = graph.add("MatMul", z, graph.constant(weights[:-1]))
    return graph.add("Add", product, graph.constant(weights[-1]))


# ---- preprocessing ---------------------------------------------------------------------------------------------------


def add_preprocessing(graph: OnnxGraph, x: str, fitted: FittedStep) -> str:
    """Add fitted steps; return float32 values. Raises SettingsError for a step that has no graph."""
    for step in fitted.steps if isinstance(fitted, Preprocessor) else (fitted,):
        if isinstance(step, LinearScaler):
            x = graph.cast(_standardised(graph, x, step.center, step.scale, step.clip), "float")
        elif isinstance(step, QuantileScaler):
            x = add_quantile_scaling(graph, x, step)
        elif isinstance(step, FeatureSelection):
            x = graph.add("Gather", x, graph.constant(step.kept, np.int64), axis=-1)
        elif isinstance(step, PcaTransform):
            z = _standardised(graph, x, step.center, step.scale, None)
            x = graph.cast(graph.add("MatMul", z, graph.constant(step.loadings)), "float")
        else:
            why = "it is not written yet"
            raise SettingsError(
                f"This step of the preprocessing has no ONNX graph: {why}", where="preprocess", got=step.kind,
                wanted="robust, standard or quantile scaling, PCA, a selection of features",
                next_step="export the bundle alone, or prepare with another step",
            )  # fmt: skip
    return x


def _standardised(graph: OnnxGraph, x: str, center: np.ndarray, scale: np.ndarray, clip: float | None) -> str:
    """Return (x - center) / scale in float64, missing values at 0, clipped to [-clip, clip] where that is given;
    without a limit infinite values are 0 too.
    """
    x = graph.cast(x, "double")
    z = graph.add("Div", graph.add("Sub", x, graph.constant(center)), graph.constant(scale))
    missing = graph.add("IsNaN", z)
    if clip is None:
        missing = graph.add("Or", missing, graph.add("IsInf", graph.cast(z, "float")))
    z = graph.add("Where", missing, graph.constant(0.0), z)
    return z if clip is None else graph.add("Clip", z, graph.constant(-clip), graph.constant(clip))


# ---- what follows the scores -----------------------------------------------------------------------------------------


def _clock_shares(graph: OnnxGraph, x: str, offset: SessionClockOffset) -> str:
    """Return the log class shares of the rows' cells, float64 (N, 3), as `SessionClockOffset` computes them.

    x : float32 (N, K), the scaled rows.
    """
    value = graph.cast(graph.add("Gather", x, graph.constant(offset.column, np.int64), axis=1), "double")
    low, high = graph.constant(offset.low), graph.constant(offset.high)
    value = graph.add("Clip", graph.add("Where", graph.add("IsNaN", value), low, value), low, high)
    span = graph.constant((offset.high - offset.low) or 1.0)
    share = graph.add("Mul", graph.add("Div", graph.add("Sub", value, low), span), graph.constant(PROGRESS_CELLS))
    cell = graph.add("Min", graph.cast(share, "int64"), graph.constant(PROGRESS_CELLS - 1, np.int64))
    if offset.step > 0:
        steps = graph.add("Div", graph.add("Sub", high, value), graph.constant(offset.step))
        left = graph.cast(graph.add("Round", steps), "int64")
        ending = graph.add("Add", left, graph.constant(PROGRESS_CELLS, np.int64))
        cell = graph.add("Where", graph.add("Less", left, graph.constant(offset.ending, np.int64)), ending, cell)
    return graph.add("Gather", graph.constant(offset.log_shares_C3), cell, axis=0)


def _on_classes(graph: OnnxGraph, p: str, classes: tuple[int, ...]) -> str:
    """Return probabilities given that the outcome is one of `classes`."""
    if set(classes) == set(CLASSES):
        return p
    kept = graph.add("Mul", p, graph.constant(np.isin(CLASSES, classes)))
    return graph.add("Div", kept, graph.add("ReduceSum", kept, graph.constant([1], np.int64)))


def _log(graph: OnnxGraph, p: str) -> str:
    return graph.add("Log", graph.add("Clip", p, graph.constant(SMALLEST), graph.constant(1.0)))


def _calibrated(graph: OnnxGraph, p: str, calibration: Calibration, spec: Mapping) -> str:
    """Return calibrated probabilities of the classes that the labels have."""
    classes = stored_label_classes(spec)
    if calibration != Calibration():
        scores = graph.add("Div", _log(graph, p), graph.constant(calibration.temperature))
        p = graph.softmax(graph.add("Add", scores, graph.constant(calibration.bias)))
    return _on_classes(graph, p, classes)


def _pool(graph: OnnxGraph, found: Mapping[str, str], stack: Stack) -> str:
    """Return the pooled probabilities of a stack."""
    prior = np.log(stack.prior)
    total = graph.constant(prior + np.asarray(stack.bias))
    for name, weight in zip(stack.names, stack.pool, strict=True):
        evidence = graph.add("Sub", _log(graph, found[name]), graph.constant(prior))
        total = graph.add("Add", total, graph.add("Mul", evidence, graph.constant(weight)))
    return graph.softmax(total)
