"""A finished network as a state dict that other programs read, and the Python that builds its module."""

import numpy as np
import pytest
import torch

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.inference.predict import TrainedModel
from ml_factory.models.registry import build_model
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace

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
