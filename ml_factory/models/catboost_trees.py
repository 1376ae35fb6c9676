"""CatBoost models as arrays: symmetric trees, and a CatBoost model made of them.

CatBoost reads a file in its JSON format that is written from the arrays.
"""

import json
from collections.abc import Mapping

import catboost
import numpy as np

from ml_factory.models.base import CLASSES
from ml_factory.storage.scratch_folder import scratch_folder

_MISSING = ("AsIs", "AsFalse", "AsTrue")  # side of a split that a missing value takes; "AsIs": the column has none


def catboost_tree_arrays(model: catboost.CatBoost) -> dict[str, np.ndarray]:
    """Return the trees of a model that this process trained.

    borders (float32), border_counts (int32, of each column), missing (uint8, index into `_MISSING`), depths (int32, of
    each tree), splits (int32, indices into `borders`, tree after tree), leaf_values and leaf_weights (float64), classes
    (int32, those that the training rows had).
    """
    with scratch_folder("catboost-") as folder:
        path = folder / "model.json"
        model.save_model(str(path), format="json")
        stored = json.loads(path.read_bytes())
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
    """Build the CatBoost model of these trees, for rows of `features` columns."""
    edges = np.cumsum(trees["border_counts"])
    column_of = np.repeat(np.arange(features), trees["border_counts"])
    columns = [
        {
            "borders": borders.tolist(), "feature_id": "", "feature_index": column, "flat_feature_index": column,
            "has_nans": bool(missing), "nan_value_treatment": _MISSING[missing],
        }
        for column, (borders, missing) in enumerate(
            zip(np.split(trees["borders"], edges[:-1]), trees["missing"], strict=True)
        )
    ]  # fmt: skip
    leaves = np.cumsum(2 ** trees["depths"])[:-1]
    parts = (
        np.split(trees["splits"], np.cumsum(trees["depths"])[:-1]),
        np.split(trees["leaf_values"], len(trees["classes"]) * leaves), np.split(trees["leaf_weights"], leaves),
    )  # fmt: skip
    stored = {
        "features_info": {"float_features": columns},
        "model_info": {"class_params": {
            "class_label_type": "Integer", "class_names": [], "class_to_label": trees["classes"].tolist(),
            "classes_count": len(CLASSES),
        }, "params": {"loss_function": {"params": {}, "type": "MultiClass"}, "flat_params": {}}},
        "oblivious_trees": [
            {
                "leaf_values": values.tolist(), "leaf_weights": weights.tolist(),
                "splits": [
                    {
                        "border": float(trees["borders"][split]), "float_feature_index": int(column_of[split]),
                        "split_index": int(split), "split_type": "FloatFeature",
                    }
                    for split in splits
                ],
            }
            for splits, values, weights in zip(*parts, strict=True)
        ],
        "scale_and_bias": [1, [0] * len(trees["classes"])],
    }  # fmt: skip
    with scratch_folder("catboost-") as folder:
        path = folder / "model.json"
        path.write_text(json.dumps(stored))
        model = catboost.CatBoost().load_model(str(path), format="json")
    model.set_leaf_values(trees["leaf_values"])  # CatBoost reads decimals inexactly in the last bit
    return model
