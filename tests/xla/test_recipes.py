"""Recipes on a real XLA compiler: each trains some steps, is killed in the middle, and resumes to the same bits."""

import pytest

from tests.recipes.image_cases import settings_of, shards  # noqa: F401 - a fixture
from tests.recipes.text_cases import die_at, sdce_settings, trained_sdce, weights  # noqa: F401 - a fixture

SHORT = {"device": "tpu", "num_epochs": 1, "log_steps": 4}


def test_recipe_sdce_on_xla_killed_and_resumed_equals_uninterrupted_to_the_bit(sdce_settings, monkeypatch):  # noqa: F811
    whole = trained_sdce(sdce_settings("whole", **SHORT))
    assert whole["machine"]["device"] == "xla" and whole["loss"] < whole["loss_before"]
    killed = sdce_settings("killed", **SHORT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(7, patch)
        trained_sdce(killed)
    resumed = trained_sdce(killed)
    assert resumed["resumed_step"] and resumed["loss"] == whole["loss"]
    found = weights(resumed)
    assert all((value == found[name]).all() for name, value in weights(whole).items())


def test_recipe_sdce_on_xla_has_the_losses_of_the_cpu(sdce_settings):  # noqa: F811
    on_xla, on_cpu = (trained_sdce(sdce_settings(name, **SHORT | {"device": name})) for name in ("tpu", "cpu"))
    for name in ("loss_before", "loss"):
        assert on_xla[name] == pytest.approx(on_cpu[name], rel=1e-4)


def test_recipe_resnet50_on_xla_killed_and_resumed_equals_uninterrupted_to_the_bit(shards, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("torchvision", reason="not among the packages of this environment")
    import torch

    from ml_factory.recipes.resnet50 import train_resnet50
    from ml_factory.storage.workspace import Workspace
    from tests.recipes.image_cases import weights_of

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    given = settings_of(shards, {"device": "xla", "precision": "fp32", "epochs": 1})
    whole = train_resnet50(Workspace(tmp_path / "whole"), **given, emit=str)

    def stop(line: str) -> None:
        if "Step=3 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_resnet50(Workspace(tmp_path / "cut"), **given, emit=stop)
    result = train_resnet50(Workspace(tmp_path / "cut"), **given, emit=str)
    assert (
        result["accuracy"] == whole["accuracy"] and result["history"][0]["val_loss"] == whole["history"][0]["val_loss"]
    )
    found = weights_of(Workspace(tmp_path / "cut"))
    assert all(torch.equal(value, found[name]) for name, value in weights_of(Workspace(tmp_path / "whole")).items())


def test_recipe_t5_on_xla_compiles_one_program_and_has_the_losses_of_the_cpu(tmp_path):
    from tests.recipes.text_cases import t5_settings, trained_t5

    on_xla, on_cpu = (trained_t5(tmp_path / name, t5_settings(device=name)) for name in ("xla", "cpu"))
    assert on_xla["compiles"]["train"] <= 2
    losses = [[one["val_loss"] for one in facts["history"]] for facts in (on_xla, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout draws other numbers
