"""Batch predictions equal the steps done by hand; a trained model comes back as it was saved."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import build_model
from tests.contract import doors


def feature_rows(n=400, seed=0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    index = pd.date_range("2025-01-06", periods=n, freq="5min", tz="UTC", name="known_at")
    return pd.DataFrame(rng.normal(size=(n, 4)).astype(np.float32), index, ["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def fitted():
    features = feature_rows()
    y = np.sign(features["a"].to_numpy().round()).astype(int)
    scaler = doors.RobustScaler.fit(features.to_numpy())
    model = build_model("xgboost", rounds=20)
    model.fit(scaler.transform(features.to_numpy()), y, np.ones(len(y)))
    bundle = doors.TrainedModel(
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
    got = doors.predict_features(bundle, fresh)
    wanted = doors.Calibration(2.0, (0.1, 0.2, -0.3)).apply(model.predict_proba(scaler.transform(fresh.to_numpy())))
    np.testing.assert_array_equal(got.to_numpy(), wanted)
    assert list(got.columns) == ["p_short", "p_neutral", "p_long"] and got.index.equals(fresh.index)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-9)


def test_predict_features_in_batches_or_chosen_rows_is_equal(fitted, monkeypatch):
    features, _, _, bundle = fitted
    whole = doors.predict_features(bundle, features)
    with monkeypatch.context() as patch:
        patch.setattr("ml_factory.inference.predict.ROWS_AT_ONCE", 37)
        pd.testing.assert_frame_equal(doors.predict_features(bundle, features), whole, check_freq=False)
    rows = np.array([5, 17, 399])
    pd.testing.assert_frame_equal(
        doors.predict_features(bundle, features, rows=rows), whole.iloc[rows], check_freq=False
    )
    assert doors.predict_features(bundle, features.iloc[:0]).empty


def test_predict_features_windows_never_cross_segments(fitted, monkeypatch):
    features, _, scaler, bundle = fitted
    x_NF, segment = scaler.transform(features.to_numpy()), np.arange(400) // 100
    network = build_model("gru", hidden=4, lookback=8, epochs=1, device="cpu", threads=1, precision="fp32")
    rows = np.flatnonzero(np.arange(400) % 100 >= 7)
    windows = np.stack([x_NF[row - 7 : row + 1] for row in rows])
    network.fit(windows, np.sign(windows[:, -1, 0].round()).astype(int))
    looking_back = doors.TrainedModel(network.get_state(), bundle.scaler, bundle.feature_names, lookback=8)
    monkeypatch.setattr("ml_factory.inference.predict.ROWS_AT_ONCE", 50)
    got = doors.predict_features(looking_back, features, segment=segment)
    assert got.index.equals(features.index[rows])
    np.testing.assert_allclose(got.to_numpy(), network.predict_proba(windows), atol=1e-6)


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
        doors.predict_features(bundle, features.reindex(columns=list(columns)))


def test_trained_model_of_its_state_is_equal_and_other_formats_are_refused(fitted):
    features, _, _, bundle = fitted
    state = bundle.to_state()
    found = doors.TrainedModel.from_state(doors.deserialize_state(doors.serialize_state(state)))
    assert doors.serialize_state(found.to_state()) == doors.serialize_state(state)
    pd.testing.assert_frame_equal(doors.predict_features(found, features), doors.predict_features(bundle, features))
    with pytest.raises(CheckpointError, match=r"model/99.*wanted ml_factory.model/4.*train --fresh"):
        doors.TrainedModel.from_state(state | {"format": "ml_factory.model/99"})


def test_trained_model_lists_versions_that_changed(fitted):
    made = replace(fitted[3], versions=fitted[3].versions | {"numpy": "1.1.3", "absent_library": "3.2.0"})
    assert fitted[3].changed_versions() == []
    wanted = [f"numpy 1.1.3 when trained, {np.__version__} now", "absent_library 3.2.0 when trained, absent now"]
    assert made.changed_versions() == wanted
