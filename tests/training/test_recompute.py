import pytest
import torch

from ml_factory.models.transformer import PatchTST
from ml_factory.training.device import Device
from ml_factory.training.recompute import recompute_blocks

CPU = Device("cpu", 1)


def step(recompute: bool, norm: str):
    """Loss, gradients and the bytes kept for the backward pass, with dropout; and what batch norms remember."""
    torch.manual_seed(0)
    network = PatchTST(4, 32, 3, PatchTST.Spec(patch=8, stride=4, layers=3, dropout=0.3, norm=norm))
    assert not recompute or recompute_blocks(network, CPU) == 3
    x_BTF, kept = torch.randn(64, 32, 4), []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        loss = network(x_BTF).square().sum()
    loss.backward()
    return loss, {name: p.grad for name, p in network.named_parameters()}, sum(kept), dict(network.named_buffers())


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_recompute_blocks_gives_same_values_with_less_memory(norm):
    plain, spared = step(False, norm), step(True, norm)
    assert torch.equal(plain[0], spared[0])
    # What is computed twice is seen once: else batch norms would remember twice as much of the last step.
    assert len(plain[3]) == (18 if norm == "batch" else 0)
    for part in (1, 3):
        assert plain[part].keys() == spared[part].keys()
        for name, value in plain[part].items():
            assert torch.equal(value, spared[part][name]), name
    assert spared[2] < plain[2] / 3


def test_recompute_blocks_of_network_without_blocks_returns_0():
    assert recompute_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), CPU) == 0
