"""PatchTST and iTransformer: shapes, independence of channels and rows, gradients, what classes are read off."""

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.models.transformer import ITransformerSpec, PatchTST, PatchTSTSpec


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
