"""CatBoost models as arrays: symmetric trees, checked, and a CatBoost model made of them.

CatBoost reads a model's bytes without checks of its indices: changed ones end the process. A model is therefore stored
as numeric arrays, which are checked here; CatBoost reads a file in its JSON format that is written from them.
"""

import json
from collections.abc import Mapping
from functools import partial

import catboost
import numpy as np

from ml_factory.models.base import CLASSES, checked_stored_vectors, damaged_model_state_error
from ml_factory.storage.scratch_folder import scratch_folder

_MISSING = ("AsIs", "AsFalse", "AsTrue")  # side of a split that a missing value takes; "AsIs": the column has none
_damaged = partial(damaged_model_state_error, "CatBoost")
_DEEPEST = 16
_TYPES = {
    "borders": np.float32, "border_counts": np.int32, "missing": np.uint8, "depths": np.int32, "splits": np.int32,
    "leaf_values": np.float64, "leaf_weights": np.float64, "classes": np.int32,
}  # fmt: skip


def catboost_tree_arrays(model: catboost.CatBoost) -> dict[str, np.ndarray]:
    """Return the trees of a model that this process trained.

    borders (float32), border_counts (int32, of each column), missing (uint8, index into `_MISSING`), depths (int32, of
    each tree), splits (int32, indices into `borders`, tree after tree), leaf_values and leaf_weights (float64), classes
    (int32, those that the training rows had).
    """
    with scratch_folder("catboost-") as folder:
        path = folder / "model.json"
        try:
            model.save_model(str(path), format="json")
        except catboost.CatBoostError as error:  # a number that is not finite, of a changed snapshot
            raise _damaged("its numbers", " ".join(str(error).split())) from error
        stored = json.loads(path.read_bytes())
    scale, bias = stored["scale_and_bias"]
    if scale != 1 or any(bias):
        raise _damaged("its scale and bias", stored["scale_and_bias"], "none")
    columns = stored["features_info"]["float_features"]
    borders = [one.get("borders") or [] for one in columns]
    splits = [[split["split_index"] for split in tree.get("splits") or []] for tree in stored["oblivious_trees"]]
    return {
        "borders": np.array([value for one in borders for value in one], np.float32),
        "border_counts": np.array([len(one) for one in borders], np.int32),
        "missing": np.array([_MISSING.index(one["nan_value_treatment"]) for one in columns], np.uint8),
        "depths": np.array([len(one) for one in splits], np.int32),
        "splits": np.array([value for one in splits for value in one], np.int32),
        "leaf_values": np.array(model.get_leaf_values(), np.float64),
        # Not get_leaf_weights, which fails on a model that was shrunk.
        "leaf_weights": np.array([one for tree in stored["oblivious_trees"] for one in tree["leaf_weights"]], float),
        "classes": np.array(stored["model_info"]["class_params"]["class_to_label"], np.int32),
    }


def catboost_model_from_trees(trees: Mapping[str, np.ndarray], features: int) -> catboost.CatBoost:
    """Build the CatBoost model of these trees, for rows of `features` columns.

    Raises CheckpointError where they are not the trees of a classifier of three classes.
    """
    arrays = _checked(trees, features)
    edges = np.cumsum(arrays["border_counts"])
    column_of = np.repeat(np.arange(features), arrays["border_counts"])
    columns = [
        {
            "borders": borders.tolist(), "feature_id": "", "feature_index": column, "flat_feature_index": column,
            "has_nans": bool(missing), "nan_value_treatment": _MISSING[missing],
        }
        for column, (borders, missing) in enumerate(
            zip(np.split(arrays["borders"], edges[:-1]), arrays["missing"], strict=True)
        )
    ]  # fmt: skip
    leaves = np.cumsum(2 ** arrays["depths"])[:-1]
    parts = (
        np.split(arrays["splits"], np.cumsum(arrays["depths"])[:-1]),
        np.split(arrays["leaf_values"], len(arrays["classes"]) * leaves), np.split(arrays["leaf_weights"], leaves),
    )  # fmt: skip
    stored = {
        "features_info": {"float_features": columns},
        "model_info": {"class_params": {
            "class_label_type": "Integer", "class_names": [], "class_to_label": arrays["classes"].tolist(),
            "classes_count": len(CLASSES),
        }, "params": {"loss_function": {"params": {}, "type": "MultiClass"}, "flat_params": {}}},
        "oblivious_trees": [
            {
                "leaf_values": values.tolist(), "leaf_weights": weights.tolist(),
                "splits": [
                    {
                        "border": float(arrays["borders"][split]), "float_feature_index": int(column_of[split]),
                        "split_index": int(split), "split_type": "FloatFeature",
                    }
                    for split in splits
                ],
            }
            for splits, values, weights in zip(*parts, strict=True)
        ],
        "scale_and_bias": [1, [0] * len(arrays["classes"])],
    }  # fmt: skip
    with scratch_folder("catboost-") as folder:
        path = folder / "model.json"
        path.write_text(json.dumps(stored))
        model = catboost.CatBoost().load_model(str(path), format="json")
    model.set_leaf_values(arrays["leaf_values"])  # CatBoost reads decimals inexactly in the last bit
    return model


def _checked(trees: Mapping[str, np.ndarray], features: int) -> dict[str, np.ndarray]:
    """Return the arrays. Raises CheckpointError for anything that is not a tree."""
    arrays = checked_stored_vectors("CatBoost", trees, _TYPES)
    if arrays["classes"].tolist() not in ([0, 1, 2], [0, 1], [0, 2], [1, 2]):
        raise _damaged("its classes", arrays["classes"][:4], "two or three of 0, 1, 2")
    counts, depths, splits = arrays["border_counts"], arrays["depths"], arrays["splits"]
    if len(counts) != features or len(arrays["missing"]) != features or (counts < 0).any():
        raise _damaged("its columns", f"{len(counts)} columns", f"{features}")
    if not len(depths) or (depths < 0).any() or (depths > _DEEPEST).any():
        raise _damaged("its trees", f"{len(depths)} trees, at most {depths.max(initial=0)} deep", f"{_DEEPEST} at most")
    leaves = int((2 ** depths.astype(np.int64)).sum())
    sizes = {
        "borders": int(counts.astype(np.int64).sum()), "splits": int(depths.sum()),
        "leaf_values": len(arrays["classes"]) * leaves, "leaf_weights": leaves,
    }  # fmt: skip
    for name, size in sizes.items():
        if len(arrays[name]) != size:
            raise _damaged(f"the size of its {name}", len(arrays[name]), size)
    if len(splits) and not 0 <= splits.min() <= splits.max() < len(arrays["borders"]):
        raise _damaged("a split", f"at border {splits.min()} or {splits.max()}", f"0 to {len(arrays['borders']) - 1}")
    column_of = np.repeat(np.arange(features), counts)
    rising = (np.diff(arrays["borders"]) > 0) | (np.diff(column_of) > 0)
    finite = all(np.isfinite(arrays[name]).all() for name in ("borders", "leaf_values", "leaf_weights"))
    if not rising.all() or not finite:
        raise _damaged("its numbers", "borders that do not rise, or values that are not finite")
    if (arrays["missing"] >= len(_MISSING)).any() or (arrays["leaf_weights"] < 0).any():
        raise _damaged("its numbers", "an unknown side for missing values, or a negative weight")
    return arrays
