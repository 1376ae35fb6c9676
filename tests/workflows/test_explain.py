"""What a TFT looked at: the means over validation windows, against one window at a time."""

import numpy as np
import pandas as pd
import pytest
import torch

from ml_factory import pipeline
from ml_factory.datasets.preprocessing import preprocessing_from_dict
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.inference.predict import TrainedModel
from ml_factory.models.registry import build_model_from_state
from ml_factory.storage.artifact_registry import ArtifactRegistry

SMALL = {"epochs": 1, "width": 4, "lookback": 6, "threads": 1}


def test_explain_tft_shares_and_attention_equal_means_of_single_windows(prepared):
    pipeline.train(prepared, "DEMO", 5, "tft", quick=True, model_settings=SMALL)
    reported = pipeline.explain(prepared, "DEMO", 5, "tft", rows=70)

    labels, splits = pipeline.load_labels(prepared, "DEMO", 5), pipeline.load_splits(prepared, "DEMO", 5)
    features = pipeline.load_features(prepared, "DEMO")
    bundle = TrainedModel.from_state(ArtifactRegistry(prepared.models).find("DEMO", 5, "tft").load_state())
    scaled = preprocessing_from_dict(bundle.scaler).transform(features.to_numpy(np.float32))
    whole = [row for row in splits["validation"] if _steps_of(features, labels.index[row], 6)]
    some = [whole[place] for place in np.unique(np.linspace(0, len(whole) - 1, 70).astype(int))]
    network, shares, attention = build_model_from_state(bundle.model_state).network, [], []
    for row in some:
        at = features.index.get_loc(labels.index[row])
        one = network.explain(torch.from_numpy(scaled[at - 5 : at + 1][None].copy()))
        shares.append(one.shares_BTF[0].mean(0).numpy())
        attention.append(one.attention_BT[0].numpy())

    assert reported.rows == len(some)
    mean = pd.Series(np.mean(shares, axis=0), features.columns)
    np.testing.assert_allclose(reported.shares["share"], mean[reported.shares.index], atol=1e-6)
    assert reported.shares["share"].is_monotonic_decreasing and reported.shares["share"].sum() == pytest.approx(
        1, abs=1e-5
    )
    # The window's last step is the newest bar.
    np.testing.assert_allclose(reported.attention["attention"], np.mean(attention, axis=0), atol=1e-6)
    assert reported.attention.index.tolist() == [5, 4, 3, 2, 1, 0]
    low, high = np.percentile(attention, [10, 90], axis=0)
    np.testing.assert_allclose(reported.attention[["low", "high"]], np.stack([low, high], axis=1), atol=1e-6)
    assert len(reported.pictures) == 2 and reported.shares.index[0] in reported.summary()


def _steps_of(features: pd.DataFrame, moment: pd.Timestamp, lookback: int) -> bool:
    """Whether the window's bars follow each other at five minutes: on this market only a session's end breaks them."""
    at = features.index.get_loc(moment)
    if at < lookback - 1:
        return False
    return moment - features.index[at - lookback + 1] == pd.Timedelta(minutes=5 * (lookback - 1))


def test_explain_booster_or_absent_model_raises(prepared):
    with pytest.raises(SettingsError, match="importances"):
        pipeline.explain(prepared, "DEMO", 5, "xgboost")
    with pytest.raises(NotPreparedError, match="No finished tft"):
        pipeline.explain(prepared, "DEMO", 5, "tft")
