"""PatchTST and iTransformer: shapes, independence of channels and rows, gradients, what classes are read off."""

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.models.sequence import LSTM, RecurrentSpec
from ml_factory.models.transformer import ITransformer, ITransformerSpec, PatchTST, PatchTSTSpec

NETWORKS = [
    (PatchTST, PatchTSTSpec(patch=4, stride=2)),
    (ITransformer, ITransformerSpec()),
    (LSTM, RecurrentSpec(hidden=8, layers=2)),
]


@pytest.mark.parametrize(("kind", "spec"), NETWORKS)
def test_transformer_gradient_reaches_every_parameter(kind, spec):
    torch.manual_seed(0)
    network = kind(6, 16, 3, spec)
    logits_BC = network(torch.randn(9, 16, 6))
    assert logits_BC.shape == (9, 3)
    logits_BC.square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(("kind", "spec"), NETWORKS)
def test_transformer_overfits_one_batch(kind, spec):
    torch.manual_seed(0)
    network = kind(6, 16, 3, spec).train()
    x_BTF, y_B = torch.randn(24, 16, 6), torch.arange(24) % 3
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x_BTF), y_B).backward()
        optimizer.step()
    assert torch.nn.functional.cross_entropy(network.eval()(x_BTF), y_B) < 0.1


def test_patchtst_swapped_channels_give_same_logits():
    """Exchange two channels and their parts of the head: the same logits."""
    torch.manual_seed(0)
    network = PatchTST(4, 16, 3, PatchTSTSpec(patch=4, stride=4)).eval()
    x_BTF, swap = torch.randn(5, 16, 4), [0, 3, 2, 1]
    before = network(x_BTF)
    weight = network.head.linear.weight.data.view(3, 4, -1)
    network.head.linear.weight.data = weight[:, swap].reshape(3, -1)
    torch.testing.assert_close(network(x_BTF[:, :, swap]), before, atol=1e-5, rtol=1e-5)


def test_patchtst_with_instance_norm_level_and_scale_reach_head_only():
    torch.manual_seed(0)
    network = PatchTST(4, 16, 3, PatchTSTSpec(patch=4, stride=4)).eval()
    x_BTF = torch.randn(5, 16, 4)
    moved = 3 * x_BTF + 7
    assert (network(moved) - network(x_BTF)).abs().max() > 1e-3
    network.head.linear.weight.data.view(3, 4, -1)[..., -2:] = 0
    torch.testing.assert_close(network(moved), network(x_BTF), atol=1e-3, rtol=1e-3)


def test_transformer_specs_invalid_values_raise_settings_error():
    with pytest.raises(SettingsError, match="divisor of 16"):
        PatchTSTSpec(heads=3)
    with pytest.raises(SettingsError, match="shorter than a patch"):
        PatchTST(4, 8, 3, PatchTSTSpec())
    with pytest.raises(SettingsError, match=r"\[stride\]"):
        PatchTSTSpec(stride=0)
    with pytest.raises(SettingsError, match=r"\[read\].*\[1, inf"):
        ITransformerSpec(read=0)
