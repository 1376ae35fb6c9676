"""A network of one's own: registered in a cell, held to the contract, trained and loaded like the others."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract import doors


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
def clean(restored_models):
    """No test leaves a model behind."""


def test_register_model_custom_network_trains_and_loads_like_built_in(tmp_path):
    spec = doors.register_model("mine", Mine, family="sequence")
    assert (
        available_models()[-1] == "mine"
        and doors.find_model_spec("mine") is spec
        and spec.notebook == "03_train_sequence"
    )
    x_NTF, y = np.random.default_rng(0).normal(size=(64, 8, 3)).astype(np.float32), np.arange(64) % 3 - 1
    model = build_model("mine", lookback=8, width=4, epochs=2, device="cpu", threads=1)
    model.fit(x_NTF, y)
    again = doors.build_model_from_state(model.get_state())
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
        doors.register_model("mine", broken)
    assert complaint in str(reported.value) and "mine" not in available_models()


def test_register_model_as_decorator_gives_changed_network_another_signature():
    assert doors.register_model("mine")(Mine) is Mine and doors.find_model_spec("mine").family == "advanced"
    first = doors.find_model_spec("mine").signature
    other = type("Mine", (Mine,), {"forward": lambda self, x_BTF: Mine.forward(self, 2 * x_BTF)})
    assert doors.register_model("mine", other).signature != first != ""
    assert doors.registered_source_hash("lstm") == "" == doors.registered_source_hash("stack")


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


TORCH_NETS = {"__module__": "torch_nets", "width": 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: _closed_over(doors.LSTM, 1), lambda: _closed_over(doors.GRU, 1)),
        (lambda: _closed_over(doors.LSTM, 1), lambda: _closed_over(doors.LSTM, 2)),
        (lambda: _behind(Same), lambda: _behind(Bent)),
        (lambda: type("Net", (), TORCH_NETS), lambda: type("Net", (), TORCH_NETS | {"width": 2})),
    ],
    ids=["the network behind", "a number closed over", "a layer next to it", "in a module of a name like torch"],
)
def test_network_signature_depends_on_wrapped_network_and_arguments(one, other):
    assert doors.user_code_hash(one()) == doors.user_code_hash(one()) != doors.user_code_hash(other())


def test_user_code_hash_of_self_containing_containers_ends():
    cyclic, mapping = [1], {}
    cyclic.append(cyclic)
    mapping["self"] = [mapping]
    twice = [[1], [1]]
    twice[1] = twice[0]
    assert len({doors.user_code_hash(cyclic), doors.user_code_hash(mapping), doors.user_code_hash([1, [1]])}) == 3
    assert doors.user_code_hash(twice) == doors.user_code_hash([[1], [1]])


def test_register_model_invalid_name_or_family_raises_settings_error():
    for name in ("xgboost", "Mine", "", "a b"):
        with pytest.raises(SettingsError, match=r"\[name\]"):
            doors.register_model(name, Mine)
    with pytest.raises(SettingsError, match="did you mean 'advanced'"):
        doors.register_model("mine", Mine, family="advance")
    with pytest.raises(SettingsError, match=r"\[network\]"):
        doors.register_model("mine", nn.Linear)
