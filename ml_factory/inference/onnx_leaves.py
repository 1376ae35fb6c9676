"""Leaves that rows reach in each tree: by the booster's own library, and by the graph of ONNX.

N rows, F features, T trees: of CatBoost, whose trees hold all classes, one for each class of its training rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ml_factory.inference.onnx_ensemble import OnnxEnsemble
from ml_factory.inference.onnx_trees import TreeNodes, doubles
from ml_factory.lazy_module import LazyModule

Leaves = Callable[[np.ndarray], np.ndarray]  # rows (N, F) -> leaves (N, T)
_ROWS_AT_ONCE = 2048
xgboost, lightgbm, catboost = (LazyModule(name) for name in ("xgboost", "lightgbm", "catboost"))
xgboost_trees = LazyModule("ml_factory.models.xgboost_trees")
catboost_trees = LazyModule("ml_factory.models.catboost_trees")


@dataclass(frozen=True)
class OtherLeaf:
    """A row that takes another leaf in the graph than in the library; leaves as the library counts them."""

    row: int
    tree: int
    got: int
    wanted: int


def find_other_leaf(
    name: str, fitted: object, ensemble: OnnxEnsemble, nodes: TreeNodes, x_NF: np.ndarray
) -> OtherLeaf | None:
    """Return the first row that onnxruntime leads to another leaf than the booster's own library; None without one.

    name, fitted : of the booster, and its trees as the state of the model holds them.
    ensemble : the same trees as they stand in the graph.
    nodes : their leaves in the same order, with the library's numbers.
    """
    graph_leaves, library_leaves = _onnx_reader(ensemble, nodes, x_NF.shape[1]), _LIBRARIES[name](fitted, x_NF.shape[1])
    for first in range(0, len(x_NF), _ROWS_AT_ONCE):
        x = np.ascontiguousarray(x_NF[first : first + _ROWS_AT_ONCE])
        got, wanted = (
            np.asarray(leaves(x)).reshape(len(x), -1).astype(np.int64) for leaves in (graph_leaves, library_leaves)
        )
        if (got != wanted).any():
            row, tree = np.argwhere(got != wanted)[0]
            return OtherLeaf(first + int(row), int(tree), int(got[row, tree]), int(wanted[row, tree]))
    return None


def _onnx_reader(ensemble: OnnxEnsemble, nodes: TreeNodes, columns: int) -> Leaves:
    """Return rows -> leaves of the graph's own node, where each tree has its own output and each leaf its number as
    value.
    """
    numbered = replace(nodes, klass=nodes.tree).with_split_at_each_root()
    leaf = numbered.left < 0
    numbers = doubles("weights", numbered.leaf[leaf])
    return ensemble.sums(columns, len(nodes.root), leaf_targetids=numbered.klass[leaf].tolist(), leaf_weights=numbers)


def _xgboost(trees: Mapping[str, np.ndarray], columns: int) -> Leaves:
    booster = xgboost_trees.xgboost_booster_from_trees(trees, columns, 1)
    return lambda x_NF: booster.predict(xgboost.DMatrix(x_NF), pred_leaf=True)


def _lightgbm(text: bytes, columns: int) -> Leaves:
    booster = lightgbm.Booster(model_str=text.decode())
    return lambda x_NF: booster.predict(x_NF, pred_leaf=True, num_threads=1)


def _catboost(trees: Mapping[str, np.ndarray], columns: int) -> Leaves:
    model, classes = catboost_trees.catboost_model_from_trees(trees, columns), len(trees["classes"])
    return lambda x_NF: np.repeat(model.calc_leaf_indexes(catboost.Pool(x_NF)), classes, axis=1)


_LIBRARIES: dict[str, Callable[..., Leaves]] = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}
