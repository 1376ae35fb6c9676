"""Equal blocks are compiled once, and only where they are trained."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ml_factory.models.sequence import TCN
from ml_factory.models.transformer import PatchTST
from ml_factory.training.device import Device
from ml_factory.training.network_blocks import compile_network
from ml_factory.training.recompute import recompute_blocks

# torch hides this warning of its own, which fails where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
X_BTF = torch.randn(8, 32, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def without_code_generation(monkeypatch):
    """The graphs are those of the usual backend; what generates their code takes many seconds."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def patchtst(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return PatchTST(4, 32, 3, PatchTST.Spec(patch=8, stride=4, layers=layers, dropout=0.0))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [2, 5])
def test_compile_network_compiles_one_program_for_all_layers(layers, recompute):
    plain, network = patchtst(layers), patchtst(layers)
    if recompute:
        assert recompute_blocks(network, Device("cpu", 1)) == layers
    compiled = compile_network(network)
    for one in (plain, compiled):
        one.train()(X_BTF).square().sum().backward()
    assert graphs() == 1
    for (name, wanted), got in zip(plain.named_parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)
    assert list(network.state_dict()) == list(plain.state_dict())


def test_compiled_network_evaluates_as_it_is(monkeypatch):
    plain, compiled = patchtst(2).eval(), compile_network(patchtst(2)).eval()
    with torch.no_grad():
        assert torch.equal(compiled(X_BTF), plain(X_BTF))
    assert graphs() == 0


def test_compile_network_with_blocks_of_several_kinds_compiles_each_kind():
    network = compile_network(TCN(4, 32, 3, TCN.Spec(dropout=0.0)))
    network.train()(X_BTF).sum().backward()
    assert 1 <= graphs() <= 3


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(4, 2), nn.ReLU()),
        nn.Sequential(nn.Sequential(nn.Linear(4, 2))),
        nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4), nn.Sequential(block(4), block(4)), nn.Linear(4, 2)),
    ],
    ids=["no block", "one block", "blocks with few of the weights"],
)
def test_compile_network_without_a_stack_of_most_weights_compiles_it_whole(network):
    compiled = compile_network(network)
    assert compiled is not network and compiled(X_BTF).shape == (8, 32, 2) and graphs() == 1
