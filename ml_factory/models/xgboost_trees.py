"""XGBoost models as arrays: the trees of a booster, and a booster made of them.

The bytes that XGBoost reads are written from the arrays (UBJSON, in the schema that XGBoost publishes as
doc/model.schema; https://ubjson.org for the encoding).
"""

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import xgboost as xgb

CLASSES = 3
_NO_PARENT = 2**31 - 1
# Arrays of all nodes, tree after tree; children are counted from the root of their tree, -1 for a leaf.
_NODES = {
    "left_children": np.int32, "right_children": np.int32, "split_indices": np.int32, "split_conditions": np.float32,
    "default_left": np.uint8, "base_weights": np.float32, "loss_changes": np.float32, "sum_hessian": np.float32,
}  # fmt: skip
_UBJSON = {np.dtype(np.uint8): b"U", np.dtype(np.int32): b"l", np.dtype(np.int64): b"L", np.dtype(np.float32): b"d"}


def xgboost_tree_arrays(booster: xgb.Booster) -> dict[str, np.ndarray]:
    """Return the trees of a booster that this process trained: the arrays of `_NODES`, `nodes` (int32, of each tree),
    and `base_score` (float32, of each class).
    """
    model = json.loads(bytes(booster.save_raw("json")))["learner"]
    trees = model["gradient_booster"]["model"]["trees"]
    arrays = {
        name: np.array([value for tree in trees for value in tree[name]], dtype) for name, dtype in _NODES.items()
    }
    base = np.array(json.loads(model["learner_model_param"]["base_score"].lower()), np.float32)
    counts = np.array([len(tree["left_children"]) for tree in trees], np.int32)
    return {**arrays, "nodes": counts, "base_score": base}


def merge_xgboost_trees(blocks: Sequence[Mapping[str, np.ndarray]], rounds: int) -> dict[str, np.ndarray]:
    """Merge the first rounds of boosters, each started from the scores of those before, into the trees of one."""
    nodes = np.concatenate([block["nodes"] for block in blocks])[: rounds * CLASSES]
    merged = {name: np.concatenate([block[name] for block in blocks])[: nodes.sum()] for name in _NODES}
    return {**merged, "nodes": nodes, "base_score": np.asarray(blocks[0]["base_score"])}


def xgboost_booster_from_trees(
    trees: Mapping[str, np.ndarray], features: int, threads: int, device: str = "cpu"
) -> xgb.Booster:
    """Build the booster of these trees, for rows of `features` columns."""
    ends = np.cumsum(trees["nodes"])
    one_by_one = [
        _tree({name: trees[name][end - count : end] for name in _NODES}, number, features)
        for number, (end, count) in enumerate(zip(ends.tolist(), trees["nodes"].tolist(), strict=True))
    ]
    empty = np.zeros(0, np.int32)
    model = {
        "cats": {"enc": [], "feature_segments": empty, "sorted_idx": empty},
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(ends))},
        "iteration_indptr": list(range(0, len(ends) + 1, CLASSES)),
        "tree_info": [number % CLASSES for number in range(len(ends))],
        "trees": one_by_one,
    }
    learner = {
        "attributes": {}, "feature_names": [], "feature_types": [],
        "gradient_booster": {"model": model, "name": "gbtree"},
        "learner_model_param": {
            "base_score": json.dumps(trees["base_score"].tolist()), "boost_from_average": "1",
            "num_class": str(CLASSES), "num_feature": str(features), "num_target": "1",
        },
        "objective": {"name": "multi:softprob", "softmax_multiclass_param": {"num_class": str(CLASSES)}},
    }  # fmt: skip
    version = [int(part) for part in xgb.__version__.split(".")[:3]]
    booster = xgb.Booster(model_file=bytearray(_encode({"learner": learner, "version": version})))
    booster.set_param({"nthread": threads, "device": device})
    return booster


def _tree(nodes: dict[str, np.ndarray], number: int, features: int) -> dict:
    count = len(nodes["left_children"])
    parents = np.full(count, _NO_PARENT, np.int32)
    inner = np.flatnonzero(nodes["left_children"] != -1)
    for children in (nodes["left_children"], nodes["right_children"]):
        parents[children[inner]] = inner
    none, none_long = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return {
        **nodes, "parents": parents, "id": number, "split_type": np.zeros(count, np.uint8), "categories": none,
        "categories_nodes": none, "categories_segments": none_long, "categories_sizes": none_long,
        "tree_param": {
            "num_deleted": "0", "num_feature": str(features), "num_nodes": str(count), "size_leaf_vector": "1",
        },
    }  # fmt: skip


def _encode(value: object) -> bytes:
    """Encode dictionaries, lists, text, whole numbers and vectors as UBJSON."""
    if isinstance(value, dict):
        return b"{" + b"".join(_text(key) + _encode(one) for key, one in value.items()) + b"}"
    if isinstance(value, list):
        return b"[#L" + struct.pack(">q", len(value)) + b"".join(_encode(one) for one in value)
    if isinstance(value, str):
        return b"S" + _text(value)
    if isinstance(value, np.ndarray):
        head = b"[$" + _UBJSON[value.dtype] + b"#L" + struct.pack(">q", len(value))
        return head + value.astype(value.dtype.newbyteorder(">")).tobytes()
    return b"l" + struct.pack(">i", value)


def _text(text: str) -> bytes:
    return b"L" + struct.pack(">q", len(text.encode())) + text.encode()
