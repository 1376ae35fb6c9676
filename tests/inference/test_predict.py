"""Batch predictions equal the steps done by hand; a trained model comes back as it was saved."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.datasets.scaling import RobustScaler
from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.inference import predict
from ml_factory.inference.predict import TrainedModel, predict_features
from ml_factory.models.registry import build_model
from ml_factory.storage.serialization import deserialize_state, serialize_state


def feature_rows(n=400, seed=0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    index = pd.date_range("2025-01-06", periods=n, freq="5min", tz="UTC", name="known_at")
    return pd.DataFrame(rng.normal(size=(n, 4)).astype(np.float32), index, ["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def fitted():
    features = feature_rows()
    y = np.sign(features["a"].to_numpy().round()).astype(int)
    scaler = RobustScaler.fit(features.to_numpy())
    model = build_model("xgboost", rounds=20)
    model.fit(scaler.transform(features.to_numpy()), y, np.ones(len(y)))
    bundle = TrainedModel(
        model.get_state(),
        scaler.to_dict(),
        tuple(features.columns),
        calibration={"temperature": 2.0, "bias": [0.1, 0.2, -0.3]},
    )
    return features, model, scaler, bundle


def test_predict_features_equals_scaling_prediction_and_calibration_by_hand(fitted):
    _, model, scaler, bundle = fitted
    fresh = feature_rows(seed=1)
    fresh.iloc[3, 1] = np.nan
    got = predict_features(bundle, fresh)
    wanted = Calibration(2.0, (0.1, 0.2, -0.3)).apply(model.predict_proba(scaler.transform(fresh.to_numpy())))
    np.testing.assert_array_equal(got.to_numpy(), wanted)
    assert list(got.columns) == ["p_short", "p_neutral", "p_long"] and got.index.equals(fresh.index)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-9)


def test_predict_features_in_batches_or_chosen_rows_is_equal(fitted):
    features, _, _, bundle = fitted
    whole = predict_features(bundle, features)
    pd.testing.assert_frame_equal(predict_features(bundle, features, batch=37), whole, check_freq=False)
    rows = np.array([5, 17, 399])
    pd.testing.assert_frame_equal(predict_features(bundle, features, rows=rows), whole.iloc[rows], check_freq=False)
    assert predict_features(bundle, features.iloc[:0]).empty


class LastMinusFirst:
    """Stands in for a network: it says how far feature a went over its window."""

    def predict_proba(self, windows):
        x_BTF = windows[:]
        move = np.clip(x_BTF[:, -1, 0] - x_BTF[:, 0, 0], -1, 1) / 4
        return np.stack([1 / 3 - move, np.full(len(move), 1 / 3), 1 / 3 + move], axis=1)


def test_predict_features_windows_never_cross_segments(fitted, monkeypatch):
    features, _, scaler, bundle = fitted
    monkeypatch.setattr(predict, "build_model_from_state", lambda state: LastMinusFirst())
    looking_back = TrainedModel(bundle.model_state, bundle.scaler, bundle.feature_names, lookback=8)
    with pytest.raises(FactoryError, match="where sessions end"):
        predict_features(looking_back, features)
    segment = np.arange(400) // 100
    got = predict_features(looking_back, features, segment=segment, batch=50)
    whole = np.arange(400) % 100 >= 7
    assert got.index.equals(features.index[whole])
    a = scaler.transform(features.to_numpy())[:, 0]
    rows = np.flatnonzero(whole)
    np.testing.assert_allclose(got["p_long"] - 1 / 3, np.clip(a[rows] - a[rows - 7], -1, 1) / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("acbd", r"column 2.*got 'c', wanted 'b'.*in its order"),
        ("abc", r"column 4.*got nothing, wanted 'd'.*missing: d"),
        ("abcde", r"not known to it: e.*column 5.*got 'e', wanted nothing"), ("", r"column 1.*got nothing"),
    ],
)  # fmt: skip
def test_predict_features_of_other_columns_names_first_difference(fitted, columns, words):
    features, _, _, bundle = fitted
    with pytest.raises(SettingsError, match=words):
        predict_features(bundle, features.reindex(columns=list(columns)))


def test_trained_model_of_its_state_is_equal_and_other_formats_are_refused(fitted):
    features, _, _, bundle = fitted
    state = bundle.to_state()
    found = TrainedModel.from_state(deserialize_state(serialize_state(state)))
    assert serialize_state(found.to_state()) == serialize_state(state)
    pd.testing.assert_frame_equal(predict_features(found, features), predict_features(bundle, features))
    with pytest.raises(CheckpointError, match=r"model/99.*wanted ml_factory.model/3.*train --fresh"):
        TrainedModel.from_state(state | {"format": "ml_factory.model/99"})


def test_trained_model_lists_versions_that_changed(fitted, monkeypatch):
    made = replace(fitted[3], versions={"python": "3.11.2", "numpy": "2.1.3", "xgboost": "3.2.0"})
    assert fitted[3].changed_versions() == []
    monkeypatch.setattr(predict, "installed_library_versions", lambda: {"python": "3.11.2", "numpy": "2.4.0"})
    wanted = ["numpy 2.1.3 when trained, 2.4.0 now", "xgboost 3.2.0 when trained, absent now"]
    assert made.changed_versions() == wanted
