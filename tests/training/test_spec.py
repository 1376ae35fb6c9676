import pytest

from ml_factory.errors import SettingsError
from ml_factory.training.spec import TrainSpec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"\[epochs\]"),
        ({"batch": True}, r"\[batch\]"),
        ({"lr": float("inf")}, r"\[lr\]"),
        ({"clip": 0}, r"\[clip\]"),
        ({"warmup": 1.0}, r"\[warmup\]"),
        ({"weight_decay": -0.1}, r"\[weight_decay\]"),
        ({"device": "gpu"}, "wanted auto, cpu, cuda, xla"),
        *(({name: "abc"}, rf"\[{name}\]\. got 'abc', wanted a") for name in ("lr", "clip", "weight_decay", "warmup")),
    ],
)
def test_train_spec_invalid_values_raise_settings_error(settings, message):
    with pytest.raises(SettingsError, match=message):
        TrainSpec(**settings)
