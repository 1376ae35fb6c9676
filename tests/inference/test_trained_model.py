"""A bundle comes back as it was saved, and knows its features."""

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.inference.trained_model import TrainedModel, installed_library_versions
from ml_factory.storage.serialization import write_state_file

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


def test_bundle_saved_and_loaded_is_equal(tmp_path):
    made = bundle(lookback=32)
    found = TrainedModel.load(made.save(tmp_path / "b.safetensors"))
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
def test_bundle_check_features_with_other_columns_raises_with_first_difference(columns, words):
    with pytest.raises(SettingsError, match=words):
        bundle().check_features(columns)


def test_bundle_check_features_with_same_columns_passes():
    bundle().check_features(iter(NAMES))


def test_bundle_load_of_other_format_or_missing_parts_raises(tmp_path):
    write_state_file(tmp_path / "x", {"format": "ml_factory.model/99"})
    with pytest.raises(CheckpointError, match=r"model/99.*wanted ml_factory.model/2"):
        TrainedModel.load(tmp_path / "x")
    write_state_file(tmp_path / "y", {"format": "ml_factory.model/2", "scaler": {}})
    with pytest.raises(CheckpointError, match=r"lacks parts.*model_state"):
        TrainedModel.load(tmp_path / "y")


def test_bundle_with_empty_or_duplicate_feature_names_raises():
    for names in ((), ("a", "b", "a")):
        with pytest.raises(SettingsError, match="each once"):
            TrainedModel({}, {}, names)
    with pytest.raises(SettingsError, match="look-back"):
        bundle(lookback=-1)


def test_bundle_changed_versions_lists_differing_packages():
    made = bundle(versions={"python": "3.11.2", "numpy": "2.1.3", "xgboost": "3.2.0"})
    assert made.changed_versions({"python": "3.11.2", "numpy": "2.4.0"}) == [
        "numpy 2.1.3 when trained, 2.4.0 now",
        "xgboost 3.2.0 when trained, absent now",
    ]
    assert bundle().changed_versions() == []
    assert installed_library_versions(["numpy", "no-such-package-here"]).keys() == {"python", "numpy"}
