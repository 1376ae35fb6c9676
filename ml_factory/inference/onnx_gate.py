"""The gate of an ONNX graph: the model's probabilities on real rows, and the same leaves at its trees' thresholds.

Of trees the nodes in the graph itself are compared with the exporter's, attribute by attribute, and run alone with the
leaves' numbers as values, as the booster's own library counts them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.datasets.preprocessing import preprocessing_from_dict
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import FactoryError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.inference.onnx_ensemble import OnnxEnsemble
from ml_factory.inference.onnx_export import has_rounds, uncalibrated_output
from ml_factory.inference.onnx_graph import graph_with_output
from ml_factory.inference.onnx_leaves import find_other_leaf
from ml_factory.inference.onnx_models import OnnxModels
from ml_factory.inference.onnx_threshold_rows import rows_at_thresholds
from ml_factory.inference.onnx_trees import TreeNodes, tree_nodes
from ml_factory.inference.predict import FittedModels
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.models.base import CLASSES

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
    nodes : inner nodes of the trees.
    nodes_tried : of these; all, or MOST_NODES of a booster drawn from more.
    nodes_reached : of those tried, nodes that a threshold row comes to. No row can come to the others.
    """

    rows: int
    difference: float
    threshold_rows: int
    nodes: int
    nodes_tried: int
    nodes_reached: int


def check_onnx_graph(graph: bytes, fitted: FittedModels, features: pd.DataFrame, *, segment: np.ndarray) -> GateResult:
    """Compare the graph with the model on at most ROWS of these rows, spread evenly.

    features, segment : as of `predict.predict_features`.
    Raises FactoryError naming the worst row where a probability differs by more than LARGEST, the likeliest class is
    another, or a tree takes another leaf.
    """
    onnx = OnnxModels(graph, fitted.lookback)
    rows = np.arange(len(features), dtype=np.int64)
    if fitted.lookback:
        rows = rows[mask_rows_with_full_window(segment, rows, fitted.lookback)]
    rows = rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(np.int64)]
    given = {"segment": segment, "rows": rows}
    wanted = fitted.predict_features(features, **given)
    got = onnx.predict_features(features, **given)
    _compare(got.to_numpy(), wanted.to_numpy(), wanted.index)
    if wanted.to_numpy().std(axis=0).max() < _FLAT:
        _compare_without_calibration(graph, fitted, features, given)
    alone = onnx.predict_rows(np.ascontiguousarray(features.to_numpy(np.float32)), rows[-1:])
    _compare(alone, wanted.to_numpy()[-1:], wanted.index[-1:])
    x_NF = features.to_numpy(dtype=np.float32)[rows]
    checked = []
    for name, model in fitted.models.items():
        if name in _BOOSTERS and has_rounds(model.model_state):
            x_NK = preprocessing_from_dict(model.scaler).transform(x_NF)
            checked.append(_check_trees(name, model, OnnxEnsemble.in_graph(graph, name), x_NK))
    counts = [sum(column) for column in zip(*checked, strict=True)] or [0] * 4
    return GateResult(len(rows), float(np.abs(got.to_numpy() - wanted.to_numpy()).max()), *counts)


def _compare_without_calibration(
    graph: bytes, fitted: FittedModels, features: pd.DataFrame, given: Mapping
) -> None:  # fmt: skip
    """Compare each model of the graph before its calibration, which may leave the prior alone and hide the model."""
    for name, model in fitted.models.items():
        alone = FittedModels({name: replace(model, calibration=Calibration().to_dict())})
        wanted = alone.predict_features(features, **given)
        part = OnnxModels(graph_with_output(graph, uncalibrated_output(name)), fitted.lookback)
        got = part.predict_features(features, **given)
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


def _check_trees(
    name: str, model: TrainedModel, ensemble: OnnxEnsemble, x_NK: np.ndarray
) -> tuple[int, int, int, int]:  # fmt: skip
    """Compare the trees alone on real rows and on rows at their thresholds; return the number of the latter, and of
    inner nodes, those tried and those reached.

    ensemble : the trees as they stand in the graph.
    x_NK : rows as the model reads them.
    Raises FactoryError naming an attribute, or a row whose leaves or sums of leaves differ.
    """
    fitted = model.model_state["fitted"]
    nodes = tree_nodes(name, fitted)
    different = ensemble.find_difference(OnnxEnsemble.of_nodes(nodes, name))
    if different is not None:
        raise FactoryError(
            f"The trees of {name} have other nodes in the ONNX graph, which is not written", where=different[0],
            got=different[1], wanted=different[2], next_step="export the bundle alone, and report this",
        )  # fmt: skip
    made = rows_at_thresholds(nodes, x_NK)
    x_MK = np.concatenate([made.x_MK, x_NK])
    other = find_other_leaf(name, fitted, ensemble, nodes, x_MK)
    if other is not None:
        raise FactoryError(
            f"The trees of {name} take other leaves in ONNX, and are not written",
            where=f"tree {other.tree + 1} of {len(nodes.root)}, {_nearest_split(nodes, other.tree, x_MK[other.row])}",
            got=f"leaf {other.got}", wanted=f"leaf {other.wanted}",
            next_step="export the bundle alone, and report this",
        )  # fmt: skip
    _compare_scores(name, ensemble.sums(x_MK.shape[1], len(CLASSES))(x_MK), model.estimator.tree_scores(x_MK))
    return len(made.x_MK), made.nodes, made.tried, made.reached


def _compare_scores(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    """Raise FactoryError naming the worst row where the sums of leaves differ by more than a constant of the row."""
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


def _nearest_split(nodes: TreeNodes, tree: int, x_K: np.ndarray) -> str:
    """Name the split of a tree whose threshold a row comes nearest to, or where its value is missing."""
    inner = np.flatnonzero((nodes.tree == tree) & (nodes.left >= 0))
    value = x_K[nodes.column[inner]]
    off = np.where(np.isnan(value), 0.0, np.abs(value - nodes.threshold[inner]))
    node = inner[int(np.argmin(off))]
    column = int(nodes.column[node])
    return f"input {column + 1} of {len(x_K)} at {x_K[column]!r}, threshold {nodes.threshold[node]!r}"
