"""A trained model comes back from its state, and knows its features."""

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.storage.serialization import deserialize_state, serialize_state

NAMES = ("rsi_14", "atr_14", "rsi_14@60m")


def trained(**more) -> TrainedModel:
    state = {"model": "nobody", "weights": np.arange(6, dtype=np.float32).reshape(2, 3), "trees": b"\x00\xff", "n": 3}
    scaler = {"kind": "robust", "center": [0.1, 0.2, 1 / 3], "scale": [1.0, 2.0, 3.0], "clip": 8.0}
    given = {
        "spec": {"base_minutes": 5},
        "calibration": {"temperature": 1.25, "bias": [0.1, 0.0, -0.1]},
        "facts": {"symbol": "MES"},
    } | more
    return TrainedModel(state, scaler, NAMES, **given)


def test_trained_model_comes_back_from_its_state():
    made = trained(lookback=32)
    found = TrainedModel.from_state(deserialize_state(serialize_state(made.to_state())))
    np.testing.assert_array_equal(found.model_state.pop("weights"), made.model_state.pop("weights"))
    assert found == made and found.feature_names == NAMES
    assert TrainedModel.from_state(made.to_state()) == made


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
def test_trained_model_check_features_with_other_columns_raises_with_first_difference(columns, words):
    with pytest.raises(SettingsError, match=words):
        trained().check_features(columns)


def test_trained_model_check_features_with_same_columns_passes():
    trained().check_features(iter(NAMES))


def test_trained_model_of_other_format_or_missing_parts_raises():
    with pytest.raises(CheckpointError, match=r"model/99.*wanted ml_factory.model/2"):
        TrainedModel.from_state({"format": "ml_factory.model/99"})
    with pytest.raises(CheckpointError, match=r"lacks parts.*model_state"):
        TrainedModel.from_state({"format": "ml_factory.model/2", "scaler": {}})


def test_trained_model_with_empty_or_duplicate_feature_names_raises():
    for names in ((), ("a", "b", "a")):
        with pytest.raises(SettingsError, match="each once"):
            TrainedModel({}, {}, names)
    with pytest.raises(SettingsError, match="look-back"):
        trained(lookback=-1)
