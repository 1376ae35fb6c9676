import torch

from tests.contract.doors import Device, PatchTST, TrainingState, TrainSpec, recompute_blocks

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


def test_recompute_blocks_gives_same_values_with_less_memory():
    plain, spared = step(False), step(True)
    assert torch.equal(plain[0], spared[0]) and plain[1].keys() == spared[1].keys()
    for name, value in plain[1].items():
        assert torch.equal(value, spared[1][name]), name
    assert spared[2] < plain[2] / 3


def test_training_state_with_recompute_recomputes_blocks_or_warns(caplog):
    network, spec = PatchTST(4, 32, 3, PatchTST.Spec()), TrainSpec(recompute=True)
    TrainingState(network, 64, spec, CPU, {"model": "mine"})
    assert all("forward" in vars(block) for block in network.encoder) and not caplog.messages
    TrainingState(torch.nn.Linear(2, 2), 64, spec, CPU, {"model": "mine"})
    assert caplog.messages == ["recompute changes nothing: mine has no stack of blocks"]


class _Scaled(torch.nn.Module):
    """A block that is called with a named argument, as those of Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, scale=None):
        return self.linear(x) * scale


def test_recomputed_blocks_pass_named_arguments_on():
    blocks = torch.nn.ModuleList([_Scaled(), _Scaled()])
    x = torch.randn(4, 3)
    expected = [block(x, scale=2.0) for block in blocks]
    assert recompute_blocks(blocks, CPU) == 2
    for training in (True, False):
        for block, one in zip(blocks, expected, strict=True):
            assert torch.equal(block.train(training)(x, scale=2.0), one)
