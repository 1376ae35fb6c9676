"""recipe sdce as a whole: killed and resumed to the same bits, also on another machine from a bucket."""

import numpy as np
import pytest

from ml_factory.errors import SettingsError
from tests.contract.doors import surrogate
from tests.recipes.text_cases import die_at, trained_sdce, weights


@pytest.mark.parametrize(
    "loss_type", ["surrogate", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("kl", "standard"))]
)
def test_recipe_sdce_killed_in_mid_epoch_resumes_to_same_bits(loss_type, sdce_settings, monkeypatch):
    whole = trained_sdce(sdce_settings("whole", loss_type=loss_type))
    steps = len(whole["history"]) and (whole["sequences"] * 2) // whole["batch"]
    assert steps > 6 and whole["loss"] < whole["loss_before"] and whole["resumed_step"] is None
    killed = sdce_settings("killed", loss_type=loss_type)
    for call in (3, 2 * (steps // 2) + 3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            die_at(call if call == 3 else call - 4, patch)
            trained_sdce(killed)
    resumed = trained_sdce(killed)
    assert resumed["resumed_step"] and resumed["exact"] and not resumed["inexact"]
    assert resumed["loss"] == whole["loss"] and resumed["ngram_loss"] == whole["ngram_loss"]
    theirs = weights(resumed)
    assert all(np.array_equal(value, theirs[name]) for name, value in weights(whole).items())
    assert trained_sdce(killed)["lines"][-1].startswith("finished before")


def test_recipe_sdce_on_worker_of_slice_writes_to_bucket_and_another_machine_continues(
    sdce_settings, gcs_bucket, monkeypatch, tmp_path
):
    monkeypatch.setenv("ML_FACTORY_ROOT", f"{gcs_bucket}/my-tpu")
    monkeypatch.chdir(tmp_path)
    place = {"output_dir": "./outputs", "num_epochs": 1}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(5, patch)
        trained_sdce(sdce_settings(**place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    result = trained_sdce(sdce_settings(**place))
    assert result["resumed_step"] and not (tmp_path / "outputs").exists()
    assert result["loss"] == trained_sdce(sdce_settings("whole", num_epochs=1))["loss"]


def test_recipe_sdce_unknown_model_or_too_few_common_tokens_is_refused(sdce_settings, hub, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match=r"cannot be loaded \[own/none\].*builtin:small"):
        trained_sdce(sdce_settings("none", base_model="own/none"))
    monkeypatch.setattr(surrogate, "LEAST_SHARE", 0.9)  # 256 bytes and the end of a text are matched
    with pytest.raises(SettingsError, match=r"too few tokens in common \[.*gpt and builtin:tiny\].*at least 90%"):
        trained_sdce(sdce_settings("few", base_model=hub["base_model"]))
