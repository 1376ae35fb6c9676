"""A network of one's own: registered in a cell, held to the contract, trained and loaded like the others."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.code_fingerprint import user_code_hash
from ml_factory.errors import SettingsError
from ml_factory.models import registry
from ml_factory.models.registry import (
    available_models,
    build_model,
    build_model_from_state,
    find_model_spec,
    register_model,
)
from ml_factory.models.sequence import GRU, LSTM


@dataclass(frozen=True)
class Spec:
    width: int = 16


class Mine(nn.Module):
    Spec = Spec

    def __init__(self, features, lookback, classes, spec):
        super().__init__()
        self.read = nn.Linear(features * lookback, spec.width)
        self.head = nn.Linear(spec.width, classes)

    def forward(self, x_BTF):
        return self.head(torch.relu(self.read(x_BTF.flatten(1))))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))


def test_register_model_custom_network_trains_and_loads_like_built_in(tmp_path):
    spec = register_model("mine", Mine, family="sequence")
    assert available_models()[-1] == "mine" and find_model_spec("mine") is spec and spec.notebook == "03_train_sequence"
    x_NTF, y = np.random.default_rng(0).normal(size=(64, 8, 3)).astype(np.float32), np.arange(64) % 3 - 1
    model = build_model("mine", lookback=8, width=4, epochs=2, device="cpu", threads=1)
    model.fit(x_NTF, y)
    again = build_model_from_state(model.get_state())
    np.testing.assert_array_equal(again.predict_proba(x_NTF), model.predict_proba(x_NTF))


BROKEN = {
    "IndexError: Target 2 is out of bounds": {"forward": lambda self, x: Mine.forward(self, x)[:, :2]},
    "loss or its gradient is not finite": {"forward": lambda self, x: Mine.forward(self, x) * float("inf")},
    "AttributeError: 'list' object": {"forward": lambda self, x: [1]},
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_register_model_that_cannot_train_raises_and_is_not_registered(complaint):
    broken = type("Broken", (Mine,), BROKEN[complaint])
    with pytest.raises(SettingsError, match="cannot be trained") as reported:
        register_model("mine", broken)
    assert complaint in str(reported.value) and "mine" not in available_models()


def test_register_model_as_decorator_gives_changed_network_another_signature():
    assert register_model("mine")(Mine) is Mine and find_model_spec("mine").family == "advanced"
    first = find_model_spec("mine").signature
    other = type("Mine", (Mine,), {"forward": lambda self, x_BTF: Mine.forward(self, 2 * x_BTF)})
    assert register_model("mine", other).signature != first != ""
    assert registry.registered_source_hash("lstm") == "" == registry.registered_source_hash("stack")


class Same(nn.Module):
    def forward(self, x):
        return x


class Bent(nn.Module):
    def forward(self, x):
        return x.tanh()


def _behind(layer: type) -> type:
    """A network that reads a layer beside it, as one in a notebook's cells does."""

    class Network(Mine):
        def forward(self, x_BTF):
            return Mine.forward(self, layer()(x_BTF))

    return Network


def _closed_over(network: type, number: int) -> type:
    """A network that wraps another and reads a number of the function around it."""

    class Network(Mine):
        def forward(self, x_BTF):
            return number * network.forward(self, x_BTF)

    return Network


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: _closed_over(LSTM, 1), lambda: _closed_over(GRU, 1)),
        (lambda: _closed_over(LSTM, 1), lambda: _closed_over(LSTM, 2)),
        (lambda: _behind(Same), lambda: _behind(Bent)),
    ],
    ids=["the network behind", "a number closed over", "a layer beside it"],
)
def test_network_signature_depends_on_wrapped_network_and_arguments(one, other):
    assert user_code_hash(one()) == user_code_hash(one()) != user_code_hash(other())


def test_user_code_hash_of_self_containing_containers_ends():
    cyclic, mapping = [1], {}
    cyclic.append(cyclic)
    mapping["self"] = [mapping]
    twice = [[1], [1]]
    twice[1] = twice[0]
    assert len({user_code_hash(cyclic), user_code_hash(mapping), user_code_hash([1, [1]])}) == 3
    assert user_code_hash(twice) == user_code_hash([[1], [1]])


def test_register_model_invalid_name_or_family_raises_settings_error():
    for name in ("xgboost", "Mine", "", "a b"):
        with pytest.raises(SettingsError, match=r"\[name\]"):
            register_model(name, Mine)
    with pytest.raises(SettingsError, match="did you mean 'advanced'"):
        register_model("mine", Mine, family="advance")
    with pytest.raises(SettingsError, match=r"\[network\]"):
        register_model("mine", nn.Linear)
