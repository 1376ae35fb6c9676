"""Trees of the three boosters as nodes of ONNX, from the checked arrays that the models store.

Rows are float32, as the boosters read them, and thresholds float32 numbers whose comparison decides as the library
does; leaves are added in float64. M nodes of T trees, leaves among them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from ml_factory.errors import SettingsError
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.models.base import CLASSES
from ml_factory.models.lightgbm_trees import LightGBMModelText, compile_lightgbm_trees

LESS_OR_EQUAL, LESS = 0, 1  # codes of ONNX for the comparison that leads to the left
_LEAF_VALUES = re.compile(r"^(leaf_value=)(.*)$", re.MULTILINE)
_MISSING_RIGHT = 2  # CatBoost's code of a column whose missing values count as larger than every border


@dataclass(frozen=True)
class TreeNodes:
    """Binary trees whose leaves are summed by class.

    column, threshold, missing_left : (M,), of inner nodes; a value goes left where it is below the threshold, or equal
        to it with the mode LESS_OR_EQUAL.
    left, right : int64 (M,), positions of nodes; -1 for leaves.
    value : float64 (M,), of leaves.
    klass : int64 (M,), 0 to 2.
    leaf : int64 (M,), the library's own number of a leaf in its tree.
    root : int64 (T,), rising.
    mode : LESS or LESS_OR_EQUAL.
    """

    column: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    klass: np.ndarray
    leaf: np.ndarray
    root: np.ndarray
    mode: int

    @property
    def tree(self) -> np.ndarray:
        """Return the tree of each node, int64 (M,)."""
        return np.searchsorted(self.root, np.arange(len(self.left)), side="right") - 1

    def add_to(self, graph: OnnxGraph, x: str, targets: int = len(CLASSES), name: str = "") -> str:
        """Add the trees to a graph; return the sums of leaves, float64 (N, targets), of the float32 rows `x`.

        targets : number of different values of `klass`.
        name : of the ensemble's node.
        """
        nodes = self.with_split_at_each_root()
        inner, leaves = np.flatnonzero(nodes.left >= 0), np.flatnonzero(nodes.left < 0)
        place = np.empty(len(nodes.left), np.int64)  # among the inner nodes, or among the leaves
        place[inner], place[leaves] = np.arange(len(inner)), np.arange(len(leaves))
        sides = {}
        for side, child in (("true", nodes.left[inner]), ("false", nodes.right[inner])):
            sides |= {
                f"nodes_{side}nodeids": place[child].tolist(),
                f"nodes_{side}leafs": (nodes.left[child] < 0).astype(np.int64).tolist(),
            }
        return graph.tree_ensemble(
            graph.cast(x, "double"), name, n_targets=targets, tree_roots=place[nodes.root].tolist(),
            nodes_featureids=nodes.column[inner].tolist(),
            nodes_modes=helper.make_tensor("modes", TensorProto.UINT8, [len(inner)], [self.mode] * len(inner)),
            nodes_splits=doubles("splits", nodes.threshold[inner]),
            nodes_missing_value_tracks_true=nodes.missing_left[inner].astype(np.int64).tolist(),
            leaf_targetids=nodes.klass[leaves].tolist(), leaf_weights=doubles("weights", nodes.value[leaves]), **sides,
        )  # fmt: skip

    def with_split_at_each_root(self) -> "TreeNodes":
        """Return the trees with a split of two equal leaves in the place of a tree that is one leaf: ONNX has none."""
        alone = self.root[self.left[self.root] < 0]
        if not len(alone):
            return self
        twice = np.concatenate([alone, alone])

        def extended(values: np.ndarray, added: object) -> np.ndarray:
            return np.concatenate([values, np.broadcast_to(np.asarray(added, values.dtype), len(twice))])

        left, right = extended(self.left, -1), extended(self.right, -1)
        left[alone], right[alone] = (len(self.left) + np.arange(len(twice))).reshape(2, -1)
        return TreeNodes(
            extended(self.column, 0), extended(self.threshold, 0), extended(self.missing_left, False), left, right,
            extended(self.value, self.value[twice]), extended(self.klass, self.klass[twice]),
            extended(self.leaf, self.leaf[twice]), self.root, self.mode,
        )  # fmt: skip


def ensemble_name(name: str) -> str:
    """Return the name of a booster's ensemble in a graph."""
    return f"trees of {name}"


def tree_nodes(name: str, fitted: object) -> TreeNodes:
    """Return the trees of a stored booster. Raises SettingsError for a model of another kind.

    fitted : `fitted` in the state of the model.
    """
    if name not in _READERS:
        raise SettingsError("This model has no trees", where="model", got=name, wanted=", ".join(_READERS))
    return _READERS[name](fitted)


def doubles(name: str, values: np.ndarray) -> TensorProto:
    """Return numbers as a constant of an attribute."""
    return helper.make_tensor(name, TensorProto.DOUBLE, [len(values)], np.asarray(values, np.float64).tolist())


def _xgboost(trees: Mapping[str, np.ndarray]) -> TreeNodes:
    """Convert XGBoost's arrays: x < t goes left; a leaf's value stands in the place of its threshold."""
    counts = trees["nodes"].astype(np.int64)
    root = np.cumsum(counts) - counts
    first, tree = np.repeat(root, counts), np.repeat(np.arange(len(counts)), counts)
    leaf = trees["left_children"] == -1
    return TreeNodes(
        trees["split_indices"].astype(np.int64), np.where(leaf, 0, trees["split_conditions"]).astype(np.float32),
        trees["default_left"].astype(bool), np.where(leaf, -1, trees["left_children"] + first),
        np.where(leaf, -1, trees["right_children"] + first), np.where(leaf, trees["split_conditions"], 0.0), tree % 3,
        np.arange(len(tree)) - first, root, LESS,
    )  # fmt: skip


def _lightgbm(text: bytes) -> TreeNodes:
    """Convert the compiled trees: x <= t goes left; a leaf is its own left child, right follows left."""
    sections = LightGBMModelText.split(text.decode()).trees
    trees = compile_lightgbm_trees(sections, classes=len(CLASSES))
    numbered = compile_lightgbm_trees([_LEAF_VALUES.sub(_count, one) for one in sections], classes=len(CLASSES))
    child, position = trees.child_M.astype(np.int64), np.arange(len(trees.child_M))
    leaf = child == position
    tree = np.searchsorted(trees.root_T, position, side="right") - 1
    return TreeNodes(
        (trees.code_M >> 1).astype(np.int64), np.where(leaf, 0, trees.threshold_M).astype(np.float32),
        (trees.code_M & 1).astype(bool), np.where(leaf, -1, child), np.where(leaf, -1, child + 1), trees.value_M,
        tree % len(CLASSES), numbered.value_M.astype(np.int64), trees.root_T, LESS_OR_EQUAL,
    )  # fmt: skip


def _count(line: re.Match) -> str:
    """Return the line of a tree's leaf values with 0, 1, 2, … in their place."""
    return line[1] + " ".join(map(str, range(len(line[2].split()))))


def _catboost(trees: Mapping[str, np.ndarray]) -> TreeNodes:
    """Convert symmetric trees: a value above the border sets the split's bit in the leaf's number; each class gets a
    tree of its own.
    """
    classes = trees["classes"].tolist()
    column_of = np.repeat(np.arange(len(trees["border_counts"])), trees["border_counts"])
    parts, root, split_at, leaf_at = [], [], 0, 0
    for depth in trees["depths"].tolist():
        splits = trees["splits"][split_at : split_at + depth]
        size = len(classes) * 2**depth
        values = trees["leaf_values"][leaf_at : leaf_at + size].reshape(-1, len(classes))
        split_at, leaf_at = split_at + depth, leaf_at + size
        for place, klass in enumerate(classes):
            root.append(sum(len(part[0]) for part in parts))
            parts.append(_symmetric(splits, values[:, place], column_of, trees, root[-1], klass))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return TreeNodes(*columns, np.array(root, np.int64), LESS_OR_EQUAL)


def _symmetric(
    splits: np.ndarray, values: np.ndarray, column_of: np.ndarray, trees: Mapping, root: int, klass: int
) -> tuple[np.ndarray, ...]:
    """Return the nodes of one symmetric tree, level by level; level k decides bit depth - 1 - k of the leaf."""
    depth, inner = len(splits), 2 ** len(splits) - 1
    level = np.floor(np.log2(np.arange(1, inner + 1))).astype(np.int64)
    split = splits[depth - 1 - level] if depth else np.empty(0, np.int64)
    leaves, count = np.zeros(inner + 1), 2 * inner + 1
    column, missing = column_of[split], trees["missing"][column_of[split]] != _MISSING_RIGHT
    child = root + 2 * np.arange(inner) + 1
    none = np.full(inner + 1, -1, np.int64)
    return (
        np.concatenate([column, leaves.astype(np.int64)]),
        np.concatenate([trees["borders"][split], leaves]).astype(np.float32),
        np.concatenate([missing, leaves.astype(bool)]), np.concatenate([child, none]),
        np.concatenate([child + 1, none]),
        np.concatenate([np.zeros(inner), values]), np.full(count, klass, np.int64), np.arange(count) - inner,
    )  # fmt: skip


_READERS: dict[str, Callable[..., TreeNodes]] = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}
