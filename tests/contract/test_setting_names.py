"""Settings by the guides' names: each is one of ours, does what it says, and what a model lacks is answered."""

import types

import numpy as np
import pytest

from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract import doors

LINE = (
    "batch_size=64, gradient_accumulation_steps=4, mixed_precision=bf16, gradient_checkpointing=True, "
    "learning_rate=1e-4, num_epochs=5"
)


def test_read_settings_of_guide_names_maps_to_own_settings():
    given = doors.parse_named_settings(LINE)
    assert given == {
        "batch_size": 64, "gradient_accumulation_steps": 4, "mixed_precision": "bf16", "gradient_checkpointing": True,
        "learning_rate": 1e-4, "num_epochs": 5,
    }  # fmt: skip
    own = {"batch": 256, "accumulate": 4, "precision": "bf16", "recompute": True, "lr": 1e-4, "epochs": 5}
    for name in (name for name in available_models() if doors.find_model_spec(name).windowed):
        assert doors.registered_model_settings(name, given) == own
        built = build_model(name, **given)
        assert {key: getattr(built.settings, key) for key in own} == own
    asked = {"symbol": "A", "horizon": 5, "task": "train", "seed": 0, "quick": True, "data": "x"}
    assert doors.make_run_settings(model="lstm", settings=given, **asked) == doors.make_run_settings(
        model="lstm", settings=own, **asked
    )
    runs = [
        doors.make_run_settings(model="lightgbm", settings={"rounds": n}, **asked).run_id
        for n in (np.int64(20), 20, 21)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert (
        doors.parse_named_settings(" a = [1, 2] ,b='x', c=None") == {"a": [1, 2], "b": "x", "c": None}
        and doors.parse_named_settings("") == {}
    )


def test_own_settings_num_epochs_of_booster_becomes_rounds():
    assert doors.registered_model_settings("xgboost", {"num_epochs": 5}) == {"rounds": 50}
    assert build_model("linear", num_epochs=3, block=2).settings.rounds == 6


@pytest.mark.parametrize(
    ("name", "given", "printed"),
    [
        ("xgboost", {"batch_size": 64}, "Unknown setting .*batch_size.*class_weight, column_sample, depth"),
        ("linear", {"learning_rate": 0.1}, "Unknown setting .*block, class_weight, clip"),
        ("lstm", {"max_depth": 3}, "Unknown setting .*accumulate, batch"),
        ("catboost", {"min_leaf": 5.0}, "Unknown setting .*min_leaf"),
        ("lstm", {"mixed_precision": [1]}, r"mixed_precision.*got \[1\].*no, fp32"),
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


# ---- the notebooks' SETTINGS ---------------------------------------------------------------------------------------


def chosen(**values):
    lines = [f"{name}: str = {value!r}" for name, value in values.items()]
    cell = "\n".join([doors.PARAMETERS_TITLE, *lines])
    return doors.check_parameters(shell=types.SimpleNamespace(user_ns={"In": [cell], **values}))


def test_check_parameters_settings_invalid_for_model_raise_settings_error(capsys):
    assert chosen(MODEL="lstm", SETTINGS=LINE).settings == doors.parse_named_settings(LINE)
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


def test_parse_setting_value_of_list_that_is_not_json_raises():
    assert doors.parse_setting_value('["mine", 2]', "--set a") == ["mine", 2]
    with pytest.raises(SettingsError, match=r"written as JSON.*quote it for the shell"):
        doors.parse_setting_value("[mine]", "--set a")
