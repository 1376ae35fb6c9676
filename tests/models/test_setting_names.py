"""Settings by the guides' names: each is one of ours, does what it says, and what a model lacks is answered."""

import types

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint

from ml_factory.errors import SettingsError
from ml_factory.models.registry import (
    available_models,
    build_model,
    find_model_spec,
    registered_model_settings,
    resolve_registry_entry,
)
from ml_factory.models.setting_names import NETWORK_NAMES, parse_named_settings, parse_setting_value
from ml_factory.notebook_parameters import PARAMETERS_TITLE, check_parameters
from ml_factory.settings import make_run_settings
from ml_factory.training.state import recompute_blocks

LINE = (
    "batch_size=64, gradient_accumulation_steps=4, mixed_precision=bf16, gradient_checkpointing=True, "
    "learning_rate=1e-4, num_epochs=5"
)
SMALL = {"hidden": 4, "lookback": 6, "threads": 1, "num_epochs": 2, "dropout": 0.0, "patience": 0}
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(384, 6, 3)).astype(np.float32), RNG.integers(-1, 2, 384)


def fitted(name="gru", x=X, y=Y, w=None, **settings):
    model = build_model(name, **{**(SMALL if name == "gru" else {}), **settings})
    return model, model.fit(x, y, w)


def weights_of(model) -> torch.Tensor:
    return torch.cat([value.flatten() for value in model.network.state_dict().values()])


def test_read_settings_of_guide_names_maps_to_own_settings():
    given = parse_named_settings(LINE)
    assert given == {
        "batch_size": 64, "gradient_accumulation_steps": 4, "mixed_precision": "bf16", "gradient_checkpointing": True,
        "learning_rate": 1e-4, "num_epochs": 5,
    }  # fmt: skip
    own = {"batch": 256, "accumulate": 4, "precision": "bf16", "recompute": True, "lr": 1e-4, "epochs": 5}
    for name in (name for name in available_models() if find_model_spec(name).windowed):
        assert registered_model_settings(name, given) == own
        built = build_model(name, **given)
        assert {key: getattr(built.settings, key) for key in own} == own
    asked = {"symbol": "A", "horizon": 5, "task": "train", "seed": 0, "quick": True, "data": "x"}
    assert make_run_settings(model="lstm", settings=given, **asked) == make_run_settings(
        model="lstm", settings=own, **asked
    )
    runs = [make_run_settings(model="lightgbm", settings={"rounds": n}, **asked).run_id for n in (np.int64(20), 20, 21)]
    assert runs[0] == runs[1] != runs[2]
    assert (
        parse_named_settings(" a = [1, 2] ,b='x', c=None") == {"a": [1, 2], "b": "x", "c": None}
        and parse_named_settings("") == {}
    )


def test_network_names_do_not_clash_with_network_spec_fields():
    for name in available_models():
        spec = find_model_spec(name)
        theirs = resolve_registry_entry(spec.network).Spec if spec.windowed else None
        assert theirs is None or not set(NETWORK_NAMES) & set(theirs.__dataclass_fields__)


def test_own_settings_num_epochs_of_booster_becomes_rounds():
    assert registered_model_settings("xgboost", {"num_epochs": 5}) == {"rounds": 50}
    model, result = fitted("linear", X[:, 0], Y, num_epochs=3, block=2)
    assert model.settings.rounds == 6 and [one["epoch"] for one in result.history] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "given", "printed"),
    [
        ("xgboost", {"batch_size": 64}, "Unknown setting .*batch_size.*class_weight, column_sample, depth"),
        ("linear", {"learning_rate": 0.1}, "Unknown setting .*block, class_weight, clip"),
        ("lstm", {"max_depth": 3}, "Unknown setting .*accumulate, batch"),
        ("lstm", {"mixed_precision": "fp8"}, "mixed_precision.*no, fp32, bf16, fp16, auto"),
        ("lstm", {"gradient_checkpointing": "yes"}, "gradient_checkpointing.*True or False"),
        ("lstm", {"batch_size": 64, "batch": 64}, "given twice.*batch and batch_size"),
        ("lstm", {"lr": 1e-3, "learning_rate": 1e-3}, "given twice.*lr and learning_rate"),
        ("lstm", {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps.*integer >= 1"),
        ("lstm", {"batch_size": 2.5}, "batch_size.*integer >= 1"),
        ("xgboost", {"num_epochs": "many"}, "num_epochs.*integer >= 1"),
    ],
)
def test_build_model_unsupported_setting_error_lists_available_settings(name, given, printed):
    with pytest.raises(SettingsError, match=printed):
        build_model(name, **given)


def test_gradient_accumulation_steps_gives_weights_of_large_batch():
    large, _ = fitted(batch_size=128)
    parts, _ = fitted(batch_size=32, gradient_accumulation_steps=4)
    other, _ = fitted(batch_size=32)
    assert torch.allclose(weights_of(parts), weights_of(large), atol=2e-5)
    assert not torch.allclose(weights_of(other), weights_of(large), atol=1e-3)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_mixed_precision_setting_selects_autocast_dtype(precision):
    seen = set()

    def reported(module, inputs):
        if module.training:
            seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)

    hook = register_module_forward_pre_hook(reported)
    try:
        _, result = fitted(mixed_precision=precision, num_epochs=1, device="cpu")
    finally:
        hook.remove()
    assert seen == {{"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert np.isfinite(result.history[0]["train_loss"])


def test_gradient_checkpointing_recomputes_and_keeps_weights(monkeypatch):
    small = {"lookback": 16, "threads": 1, "num_epochs": 1, "batch_size": 64}
    x = RNG.normal(size=(128, 16, 2)).astype(np.float32)
    calls = []
    monkeypatch.setattr(
        "ml_factory.training.device.checkpoint",
        lambda *args, **more: calls.append(1) or checkpoint.checkpoint(*args, **more),
    )
    plain, _ = fitted("tcn", x, Y[:128], **small)
    assert not calls
    again, _ = fitted("tcn", x, Y[:128], **small, gradient_checkpointing=True)
    assert calls and recompute_blocks(again.network, None) > 0
    assert torch.allclose(weights_of(again), weights_of(plain), atol=1e-6)


def test_class_weight_balanced_of_network_equals_class_sample_weights():
    y = np.where(np.arange(384) % 8 == 0, 1, np.where(np.arange(384) % 8 == 1, 0, -1))
    share = np.array([(y == c).mean() for c in (-1, 0, 1)])
    by_hand = (1 / (3 * share))[y + 1]
    fast = {"learning_rate": 0.03, "num_epochs": 6, "batch_size": 64}
    balanced, _ = fitted(y=y, **fast, class_weight="balanced")
    weighed, _ = fitted(y=y, w=by_hand, **fast)
    plain, _ = fitted(y=y, **fast)
    assert torch.allclose(weights_of(balanced), weights_of(weighed), atol=1e-5)
    assert balanced.predict_proba(X)[:, 2].mean() > plain.predict_proba(X)[:, 2].mean() + 0.05
    with pytest.raises(SettingsError, match="class_weight"):
        build_model("gru", class_weight="equal")


# ---- the notebooks' SETTINGS ---------------------------------------------------------------------------------------


def chosen(**values):
    lines = [f"{name}: str = {value!r}" for name, value in values.items()]
    cell = "\n".join([PARAMETERS_TITLE, *lines])
    return check_parameters(shell=types.SimpleNamespace(user_ns={"In": [cell], **values}))


def test_check_parameters_settings_invalid_for_model_raise_settings_error(capsys):
    assert chosen(MODEL="lstm", SETTINGS=LINE).settings == parse_named_settings(LINE)
    assert chosen(MODEL="xgboost", SETTINGS="").settings == {}
    assert chosen(MODEL="xgboost", SETTINGS="offset=none").settings == {"offset": "none"}  # the data decide its column
    for model, text, printed in (
        ("xgboost", LINE, "batch_size"), ("lstm", "batch_size", "NAME=VALUE"), ("lstm", "a=1, a=2", "given twice"),
        ("lstm", "seed=3", "Not a setting of the model"), ("lstm", "learning_rate=-1", r"in \(0, inf\)"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=printed):
            chosen(MODEL=model, SETTINGS=text)


def test_check_parameters_stack_settings_apply_to_networks_or_named_model(capsys):
    found = chosen(BASE_MODELS="xgboost,lstm,patchtst", SETTINGS="batch_size=64, xgboost.depth=4").settings
    assert found == {"lstm": {"batch_size": 64}, "patchtst": {"batch_size": 64}, "xgboost": {"depth": 4}}
    assert chosen(BASE_MODELS="xgboost,linear", SETTINGS="num_epochs=3").settings["linear"] == {"num_epochs": 3}
    with pytest.raises(SettingsError, match="No such model among"):
        chosen(BASE_MODELS="xgboost,lstm", SETTINGS="gru.hidden=3")


@pytest.mark.parametrize("text", ["[mine]", '{"a": }', "[1, 2"])
def test_parse_setting_value_of_list_that_is_not_json_raises(text):
    assert parse_setting_value('["mine", 2]') == ["mine", 2]
    with pytest.raises(SettingsError, match=r"written as JSON.*quote it for the shell"):
        parse_setting_value(text)
