import torch

from ml_factory.models.transformer import PatchTST
from ml_factory.training.device import Device
from ml_factory.training.recompute import recompute_blocks

CPU = Device("cpu", 1)


def step(recompute: bool):
    """Loss, gradients and the bytes kept for the backward pass, with dropout."""
    torch.manual_seed(0)
    network = PatchTST(4, 32, 3, PatchTST.Spec(patch=8, stride=4, layers=3, dropout=0.3))
    assert not recompute or recompute_blocks(network, CPU) == 3
    x_BTF, kept = torch.randn(64, 32, 4), []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        loss = network(x_BTF).square().sum()
    loss.backward()
    return loss, {name: p.grad for name, p in network.named_parameters()}, sum(kept)


def test_the_same_numbers_from_less_memory():
    plain, spared = step(False), step(True)
    assert torch.equal(plain[0], spared[0])
    assert plain[1].keys() == spared[1].keys()
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, spared[1][name]), name
    assert spared[2] < plain[2] / 3


def test_a_network_without_blocks_has_nothing_to_recompute():
    assert recompute_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), CPU) == 0
