"""A bundle comes back as it was saved, and knows its features."""

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.inference.predict import TrainedModel
from ml_factory.models.base import installed_library_versions
from ml_factory.storage.serialization import deserialize_state, serialize_state

NAMES = ("rsi_14", "atr_14", "rsi_14@60m")


def bundle(**more) -> TrainedModel:
    state = {"model": "nobody", "weights": np.arange(6, dtype=np.float32).reshape(2, 3), "trees": b"\x00\xff", "n": 3}
    scaler = {"kind": "robust", "center": [0.1, 0.2, 1 / 3], "scale": [1.0, 2.0, 3.0], "clip": 8.0}
    given = {
        "spec": {"base_minutes": 5},
        "calibration": {"temperature": 1.25, "bias": [0.1, 0.0, -0.1]},
        "facts": {"symbol": "MES"},
    } | more
    return TrainedModel(state, scaler, NAMES, **given)


def test_trained_model_of_its_state_is_equal():
    made = bundle(lookback=32)
    found = TrainedModel.from_state(deserialize_state(serialize_state(made.to_state())))
    np.testing.assert_array_equal(found.model_state.pop("weights"), made.model_state.pop("weights"))
    assert found == made and found.feature_names == NAMES


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["rsi_14", "rsi_14@60m", "atr_14"], r"column 2.*got 'rsi_14@60m', wanted 'atr_14'.*in its order"),
        (["rsi_14", "atr_14"], r"column 3.*got nothing, wanted 'rsi_14@60m'.*missing: rsi_14@60m"),
        ([*NAMES, "obv"], r"not known to it: obv.*column 4.*got 'obv', wanted nothing"),
        (["roc_5", *NAMES[1:]], r"column 1.*got 'roc_5', wanted 'rsi_14'"),
        ([], r"column 1.*got nothing"),
    ],
)
def test_bundle_check_features_with_other_columns_raises_with_first_difference(columns, words):
    with pytest.raises(SettingsError, match=words):
        bundle().check_features(columns)


def test_bundle_check_features_with_same_columns_passes():
    bundle().check_features(iter(NAMES))


def test_state_of_other_format_or_without_parts_raises():
    with pytest.raises(CheckpointError, match=r"model/99.*wanted ml_factory.model/2"):
        TrainedModel.from_state({"format": "ml_factory.model/99"})
    with pytest.raises(CheckpointError, match=r"lacks parts.*model_state"):
        TrainedModel.from_state({"format": "ml_factory.model/2", "scaler": {}})


def test_bundle_changed_versions_lists_differing_packages():
    made = bundle(versions={"python": "3.11.2", "numpy": "2.1.3", "xgboost": "3.2.0"})
    assert made.changed_versions({"python": "3.11.2", "numpy": "2.4.0"}) == [
        "numpy 2.1.3 when trained, 2.4.0 now",
        "xgboost 3.2.0 when trained, absent now",
    ]
    assert bundle().changed_versions() == []
    assert installed_library_versions(["numpy", "no-such-package-here"]).keys() == {"python", "numpy"}
