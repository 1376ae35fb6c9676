"""Fast prediction of LightGBM models: trees as flat arrays and one compiled walk, with the library's decisions and
sums.

M nodes of all trees, T trees, K classes. On float32 rows every decision is the library's: a threshold becomes the
largest float32 that is not above it, missing values take the side the node names, and leaves are added in float64 in
the order of the trees.
"""

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numba import njit

_END = "end of trees"
_SIZES = re.compile(r"^tree_sizes=.*$", re.MULTILINE)

_TREE = re.compile(r"^(?=Tree=\d+$)", re.MULTILINE)

ROWS = 64  # rows walked together: their features, nodes and scores fit the L1 cache
SHARE = 4096  # rows below which a second thread costs more than it gives
_ZERO = np.float32(1e-35)  # LightGBM reads anything smaller as 0
_DEFAULT_LEFT = 2  # bit of a decision
_NAN = 2  # kind of missing value; 0: none
_FIELD = re.compile(r"^(\w+)=(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class CompiledLightGBMTrees:
    """Trees of K classes in turn.

    code_M : feature · 2 + (1: a missing value goes left).
    threshold_M : float32, x <= threshold goes left.
    child_M : the left child, the right one follows it; a leaf is its own left child, and everything goes left.
    value_M : float64, of leaves.
    root_T, depth_T : first node, and steps to the deepest leaf.
    """

    code_M: np.ndarray
    threshold_M: np.ndarray
    child_M: np.ndarray
    value_M: np.ndarray
    root_T: np.ndarray
    depth_T: np.ndarray
    classes: int

    def add_leaf_values(self, score_NK: np.ndarray, x_NF: np.ndarray, threads: int = 1) -> None:
        """Add every tree's leaf to the rows' scores (float64, C order), tree after tree."""
        trees = (self.code_M, self.threshold_M, self.child_M, self.value_M, self.root_T, self.depth_T)
        parts = min(threads, len(x_NF) // SHARE)
        if parts <= 1:
            _walk(x_NF, *trees, score_NK)
            return
        edges = np.linspace(0, len(x_NF), parts + 1).astype(np.int64)
        with ThreadPoolExecutor(parts) as pool:
            for _ in pool.map(lambda a, b: _walk(x_NF[a:b], *trees, score_NK[a:b]), edges[:-1], edges[1:]):
                pass

    def probabilities(self, x_NF: np.ndarray, threads: int = 1) -> np.ndarray:
        """Return the softmax of the scores, float64 (N, K)."""
        score_NK = np.zeros((len(x_NF), self.classes))
        self.add_leaf_values(score_NK, x_NF, threads)
        _softmax(score_NK)
        return score_NK


def compile_lightgbm_trees(trees: Sequence[str], classes: int) -> CompiledLightGBMTrees:
    """Compile the `Tree=` sections of a LightGBM model's text, one at least, of numeric splits."""
    read = [_read(text) for text in trees]
    counts = [len(tree[0]) for tree in read]
    root_T = (np.cumsum(counts) - counts).astype(np.int64)
    code_M, threshold_M, child_M, value_M = (
        np.concatenate(column) for column in zip(*[t[:4] for t in read], strict=True)
    )
    child_M = child_M + np.repeat(root_T, counts)
    return CompiledLightGBMTrees(
        code_M.astype(np.uint32), threshold_M.astype(np.float32), child_M.astype(np.uint32),
        value_M.astype(np.float64), root_T, np.array([tree[4] for tree in read], np.int64), classes,
    )  # fmt: skip


def _read(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Parse one tree: code, threshold, child and value of its nodes, children counted from its root; and its depth."""
    fields = dict(_FIELD.findall(text))
    value = np.array(fields["leaf_value"].split(), dtype=np.float64)
    if len(value) == 1:
        return np.array([1]), np.array([np.inf]), np.array([0]), value, 0
    feature, decision, left, right = (
        np.array(fields[name].split(), dtype=np.int64)
        for name in ("split_feature", "decision_type", "left_child", "right_child")
    )
    threshold, missing = _as_float32(np.array(fields["threshold"].split(), dtype=np.float64)), decision >> 2 & 3
    nan_left = np.where(missing == _NAN, (decision & _DEFAULT_LEFT) > 0, threshold >= 0)
    return _laid_out(feature << 1 | nan_left, threshold, left, right, value)


def _as_float32(threshold: np.ndarray) -> np.ndarray:
    """Return the largest float32 not above each; between -1e-35 and 1e-35 the ones that split rows as the float64
    does.
    """
    rounded = np.clip(threshold, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
    rounded = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    rounded = np.where((rounded >= -_ZERO) & (rounded < 0), np.nextafter(-_ZERO, np.float32(-1)), rounded)
    return np.where((rounded >= 0) & (rounded < _ZERO), _ZERO, rounded)


def _laid_out(code, threshold, left, right, value):
    """Lay out nodes level by level, children adjacent; LightGBM counts leaves as -1, -2, …"""
    order, depth, level = [0], 0, [0]
    child = []
    while level:
        below = []
        for node in level:
            if node < 0:
                child.append(len(child))
                continue
            child.append(len(order))
            below += [int(left[node]), int(right[node])]
            order += below[-2:]
        level, depth = below, depth + bool(below)
    order = np.array(order)
    leaf = order < 0
    inner, outer = np.where(leaf, 0, order), np.where(leaf, -order - 1, 0)
    return (
        np.where(leaf, 1, code[inner]), np.where(leaf, np.inf, threshold[inner]), np.array(child),
        np.where(leaf, value[outer], 0.0), depth,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _walk(x_NF, code_M, threshold_M, child_M, value_M, root_T, depth_T, score_NK):
    """Walk a block of rows through all trees, one level at a time, so that the step becomes vector code.

    Every row takes as many steps as its tree is deep: one that has reached its leaf stays there. Indices are unsigned:
    signed ones may count from the end, which costs a comparison each.
    """
    n, classes = score_NK.shape
    features = x_NF.shape[1]
    node_R = np.zeros(ROWS, np.uint32)
    x_FR = np.zeros(features * ROWS, np.float32)
    score_KR = np.zeros((classes, ROWS))
    for first in range(0, n, ROWS):
        count = min(ROWS, n - first)
        for row in range(count):
            for feature in range(features):
                x_FR[feature * ROWS + row] = x_NF[first + row, feature]
            for k in range(classes):
                score_KR[k, row] = score_NK[first + row, k]
        for tree in range(len(root_T)):
            node_R[:] = root_T[tree]
            for _ in range(depth_T[tree]):
                for row in range(ROWS):
                    node = node_R[row]
                    code = code_M[node]
                    value = x_FR[(code >> np.uint32(1)) * np.uint32(ROWS) + np.uint32(row)]
                    known_or_right = (value == value) | ((code & np.uint32(1)) == np.uint32(0))
                    right = (not (value <= threshold_M[node])) & known_or_right
                    node_R[row] = child_M[node] + np.uint32(right)
            k = tree % classes
            for row in range(ROWS):
                score_KR[k, row] += value_M[node_R[row]]
        for row in range(count):
            for k in range(classes):
                score_NK[first + row, k] = score_KR[k, row]


@njit(nogil=True, cache=True)
def _softmax(score_NK):
    """Apply softmax in place, as LightGBM does it: from the largest score down."""
    n, classes = score_NK.shape
    for row in range(n):
        top = score_NK[row, 0]
        for k in range(1, classes):
            top = max(top, score_NK[row, k])
        total = 0.0
        for k in range(classes):
            score_NK[row, k] = math.exp(score_NK[row, k] - top)
            total += score_NK[row, k]
        for k in range(classes):
            score_NK[row, k] /= total


@dataclass(frozen=True)
class LightGBMModelText:
    """A LightGBM model's text in its three parts: the head, a section per tree, the tail."""

    head: str
    trees: tuple[str, ...]
    tail: str

    @classmethod
    def split(cls, text: str) -> "LightGBMModelText":
        body, end, tail = text.partition(_END)
        head, *trees = _TREE.split(body)
        return cls(head, tuple(trees), end + tail)

    def join(self) -> str:
        """Return the text that LightGBM reads: trees counted from 0, their sizes in the head."""
        trees = [re.sub(r"^Tree=\d+", f"Tree={number}", tree) for number, tree in enumerate(self.trees)]
        sizes = " ".join(str(len(tree.encode())) for tree in trees)
        return _SIZES.sub(f"tree_sizes={sizes}", self.head) + "".join(trees) + self.tail
