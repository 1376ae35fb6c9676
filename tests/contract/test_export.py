"""A finished network as a state dict that other programs read, the Python that builds its module, and what it read."""

import numpy as np
import pandas as pd
import pytest
import torch

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.models.registry import build_model
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import ArtifactRegistry, TrainedModel, build_model_from_state, preprocessing_from_dict

NETWORKS = {
    "gru": {"hidden": 4, "lookback": 6},
    "tcn": {"width": 4, "lookback": 6, "offset_column": 1, "offset_bars": 5},
    "lstm": {"hidden": 4, "lookback": 8, "offset_column": 2, "offset_bars": 5},
    "patchtst": {"lookback": 8, "patch": 4, "stride": 2},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("name", NETWORKS)
def test_export_of_network_predicts_equal_probabilities_by_torch_alone(workspace, name, tmp_path):
    x = np.random.default_rng(2).normal(size=(48, NETWORKS[name]["lookback"], 3)).astype(np.float32)
    model = build_model(name, **NETWORKS[name], num_epochs=1, batch_size=16, threads=1)
    model.fit(x, np.arange(48) % 3 - 1)
    kept = TrainedModel(model.get_state(), {}, ("a", "b", "c"), lookback=model.lookback)
    facts = {"run_id": f"train-{name}", "horizon": 5, "data": "0" * 64, "run": {"quick": False}}
    ArtifactRegistry(workspace.models).register("MES", "model", name, kept.to_state(), facts)
    exported = pipeline.export(workspace, "MES", 5, name, formats=("pth",), out=tmp_path)
    assert exported.paths == {"pth": tmp_path / "model_tpu.pth"} and [*tmp_path.iterdir()] == [
        tmp_path / "model_tpu.pth"
    ]
    state = torch.load(exported.paths["pth"], weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert all(line in exported.summary() for line in exported.python)
    space: dict = {"x": torch.from_numpy(x)}
    with torch.no_grad():
        exec("\n".join(exported.python), space)
        found = torch.softmax(space["module"](space["x"]), dim=1)
    np.testing.assert_allclose(found.numpy(), model.predict_proba(x), rtol=0, atol=1e-6)


def test_export_booster_unknown_format_or_absent_model_raises(workspace, call):
    with pytest.raises(SettingsError, match="Only a network has a state dict"):
        pipeline.export(workspace, "MES", 5, "xgboost", formats=("pth",))
    with pytest.raises(SettingsError, match=r"Unknown export format.*gguf.*bundle"):
        pipeline.export(workspace, "MES", 5, "gru", formats=("gguf",))
    with pytest.raises(NotPreparedError, match="No finished tft"):
        pipeline.export(workspace, "MES", 5, "tft")
    code, _, err = call("export", "--workspace", workspace.root, "--symbol", "MES", "--horizon", 5, "--format", "gguf")
    assert code == 2 and "gguf" in err and len(err.strip().splitlines()) == 1


# ---- what a TFT looked at: the means over validation windows, against one window at a time ---------------------------

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
        shares_BTF, attention_BT = network.explain(torch.from_numpy(scaled[at - 5 : at + 1][None].copy()))
        shares.append(shares_BTF[0].mean(0).numpy())
        attention.append(attention_BT[0].numpy())

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
