"""The gate of an ONNX graph: the model's probabilities on real rows, and the same leaves at every threshold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.datasets.preprocessing import apply_preprocessing_step, preprocessing_from_dict
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import FactoryError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.inference.onnx_content import check_onnx_content
from ml_factory.inference.onnx_export import onnx_of_models
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.inference.onnx_leaves import find_other_leaf
from ml_factory.inference.onnx_models import OnnxModels
from ml_factory.inference.onnx_trees import TreeNodes, tree_nodes
from ml_factory.inference.predict import FittedModels
from ml_factory.inference.trained_model import TrainedModel

ROWS, LARGEST = 10_000, 1e-5
_BOOSTERS = ("xgboost", "lightgbm", "catboost")
_FLAT = 1e-3  # deviation of the probabilities over the rows
_SAME_SUMS = 1e-5  # of scores: XGBoost adds float32


@dataclass(frozen=True)
class GateResult:
    """Numbers of a passed gate.

    rows : real rows; trees took the leaves of their library on all of them.
    difference : largest difference of a probability.
    threshold_rows : further rows of trees on, above and below a threshold, or missing there, with equal leaves.
    """

    rows: int
    difference: float
    threshold_rows: int


def check_onnx_graph(
    graph: bytes, fitted: FittedModels, features: pd.DataFrame, *, segment: np.ndarray, close: np.ndarray
) -> GateResult:
    """Compare the graph with the model on at most ROWS of these rows, spread evenly.

    features, segment, close : as of `predict.predict_features`.
    Raises FactoryError naming the worst row where a probability differs by more than LARGEST, the likeliest class is
    another, or a tree takes another leaf.
    """
    onnx = OnnxModels(graph, fitted.lookback)
    check_onnx_content(graph, fitted.lookback, features.shape[1])  # as the bundle's reader does
    rows = np.arange(len(features), dtype=np.int64)
    if fitted.lookback:
        rows = rows[mask_rows_with_full_window(segment, rows, fitted.lookback)]
    rows = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64)]
    given = {"segment": segment, "close": close, "rows": rows}
    wanted = fitted.predict_features(features, **given)
    got = onnx.predict_features(features, **given)
    _compare(got.to_numpy(), wanted.to_numpy(), wanted.index)
    if wanted.to_numpy().std(axis=0).max() < _FLAT:
        _compare_without_calibration(fitted, features, given)
    alone = onnx.predict_rows(np.ascontiguousarray(features.to_numpy(np.float32)), rows[-1:])
    _compare(alone, wanted.to_numpy()[-1:], wanted.index[-1:])
    x_NF = features.to_numpy(dtype=np.float32)[rows]
    checked = [
        _check_leaves(name, model, apply_preprocessing_step(preprocessing_from_dict(model.scaler), x_NF, close[rows]))
        for name, model in fitted.models.items()
        if name in _BOOSTERS
    ]
    return GateResult(len(rows), float(np.abs(got.to_numpy() - wanted.to_numpy()).max()), sum(checked))


def _compare_without_calibration(fitted: FittedModels, features: pd.DataFrame, given: Mapping) -> None:
    """Compare each model alone before its calibration: one that leaves only the prior would hide another model."""
    for name, model in fitted.models.items():
        alone = FittedModels({name: replace(model, calibration=Calibration().to_dict())})
        wanted = alone.predict_features(features, **given)
        got = OnnxModels(onnx_of_models(alone, {}), alone.lookback).predict_features(features, **given)
        _compare(got.to_numpy(), wanted.to_numpy(), wanted.index)


def _compare(got_N3: np.ndarray, wanted_N3: np.ndarray, known_at: pd.DatetimeIndex) -> None:
    """Raise FactoryError naming the worst row where the probabilities are not those of the model."""
    off_N = np.abs(got_N3 - wanted_N3).max(axis=1)
    off_N = np.where(np.isnan(off_N), np.inf, off_N)
    other = got_N3.argmax(axis=1) != wanted_N3.argmax(axis=1)
    if off_N.max() <= LARGEST and not other.any():
        return
    worst = int(np.argmax(np.where(other, 1.0 + off_N, off_N)))
    raise FactoryError(
        "The ONNX graph does not predict as the model does, and is not written", where=f"row {known_at[worst]}",
        got=np.round(got_N3[worst], 7).tolist(), wanted=np.round(wanted_N3[worst], 7).tolist(),
        next_step="export the bundle alone, and report this",
    )  # fmt: skip


def _check_leaves(name: str, model: TrainedModel, x_NK: np.ndarray) -> int:
    """Compare the trees alone on real rows and on rows at their thresholds; return the number of the latter.

    x_NK : rows as the model reads them.
    Raises FactoryError naming a row whose leaves, or whose sums of leaves, differ.
    """
    fitted = model.model_state["fitted"]
    nodes = tree_nodes(name, fitted)
    at_thresholds = _rows_at_thresholds(nodes, x_NK)
    x_MK = np.concatenate([at_thresholds, x_NK])
    other = find_other_leaf(name, fitted, nodes, x_MK)
    if other is not None:
        raise FactoryError(
            f"The trees of {name} take other leaves in ONNX, and are not written",
            where=f"tree {other.tree + 1} of {len(nodes.root)}, {_nearest_split(nodes, other.tree, x_MK[other.row])}",
            got=f"leaf {other.got}", wanted=f"leaf {other.wanted}",
            next_step="export the bundle alone, and report this",
        )  # fmt: skip
    graph = OnnxGraph()
    data = graph.to_model(nodes.add_to(graph, graph.input("rows", ["N", x_MK.shape[1]])), "scores", ["N", 3], {})
    got, wanted = OnnxModels(data, 0).predict_rows(x_MK, np.arange(len(x_MK))), model.estimator.tree_scores(x_MK)
    known = np.isfinite(wanted).all(axis=0)  # CatBoost's score of a class without training rows is -inf
    got, wanted = got[:, known], wanted[:, known]
    off_M = np.abs((got - got.mean(axis=1, keepdims=True)) - (wanted - wanted.mean(axis=1, keepdims=True))).max(axis=1)
    worst = int(np.argmax(np.where(np.isnan(off_M), np.inf, off_M)))
    if not off_M[worst] <= _SAME_SUMS * max(1.0, float(np.abs(wanted).max())):
        raise FactoryError(
            f"The trees of {name} give other scores in ONNX, and are not written", where=f"row {worst + 1}",
            got=got[worst].tolist(), wanted=wanted[worst].tolist(),
            next_step="export the bundle alone, and report this",
        )  # fmt: skip
    return len(at_thresholds)


def _rows_at_thresholds(nodes: TreeNodes, x_NK: np.ndarray) -> np.ndarray:
    """Return real rows into each of which a threshold is put: itself, the next numbers above and below, and a missing
    value; at most ROWS.
    """
    inner = nodes.left >= 0
    splits = np.unique(np.stack([nodes.column[inner], nodes.threshold[inner].astype(np.float64)]), axis=1).T
    splits = splits[np.linspace(0, len(splits) - 1, min(ROWS // 4, len(splits))).astype(np.int64)]
    x_MK = np.repeat(x_NK[np.arange(len(splits)) % len(x_NK)], 4, axis=0)
    threshold = splits[:, 1].astype(np.float32)
    around = np.stack([
        threshold, np.nextafter(threshold, np.float32(np.inf)), np.nextafter(threshold, np.float32(-np.inf)),
        np.full_like(threshold, np.nan),
    ], axis=1)  # fmt: skip
    x_MK[np.arange(len(x_MK)), np.repeat(splits[:, 0].astype(np.int64), 4)] = around.ravel()
    return x_MK


def _nearest_split(nodes: TreeNodes, tree: int, x_K: np.ndarray) -> str:
    """Name the split of a tree whose threshold a row comes nearest to, or where its value is missing."""
    inner = np.flatnonzero((nodes.tree == tree) & (nodes.left >= 0))
    value = x_K[nodes.column[inner]]
    off = np.where(np.isnan(value), 0.0, np.abs(value - nodes.threshold[inner]))
    node = inner[int(np.argmin(off))]
    column = int(nodes.column[node])
    return f"input {column + 1} of {len(x_K)} at {x_K[column]!r}, threshold {nodes.threshold[node]!r}"
