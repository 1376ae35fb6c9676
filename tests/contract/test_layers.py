"""Layers of the transformers against their formulas; `test_peers` has the networks as a whole."""

import pytest
import torch

from ml_factory.errors import SettingsError
from tests.contract.doors import PatchTST, PatchTSTSpec, TokenDropout, dot_product_attention, instance_norm


def test_instance_norm_removes_level_and_scale_of_each_window():
    normal, level = instance_norm(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]))
    torch.testing.assert_close(normal, torch.tensor([[[-1.0, 0.0], [1.0, 0.0]]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(level, torch.tensor([[[2.0, torch.tensor(2.0).log()], [5.0, 0.0]]]), atol=4e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_attention_values_and_gradients_equal_formula(tokens, dtype):
    """Also where the largest scores are in the hundreds: nothing overflows."""
    torch.manual_seed(0)
    parts, found = [10 * torch.randn(3, 2, tokens, 4) for _ in range(3)], []
    for kind in (dtype, torch.float64):
        q, k, v = (part.clone().to(kind).requires_grad_() for part in parts)
        y = (q @ k.mT / 2).softmax(dim=-1) @ v if found else dot_product_attention(q, k, v)
        y.square().sum().backward()
        found.append([y.double(), *(part.grad.double() for part in (q, k, v))])
    for ours, formula in zip(*found, strict=True):
        assert (ours - formula).norm() <= 1e-4 * formula.norm()


def test_token_dropout_shares_mask_across_tokens_and_is_off_in_evaluation():
    layer, x_BND = TokenDropout(0.25), torch.ones(2000, 3, 8)
    assert layer.eval()(x_BND) is x_BND
    y_BND = layer.train()(x_BND)
    assert (y_BND == y_BND[:, :1]).all()
    assert set(y_BND.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y_BND == 0).float().mean().item() - 0.25) < 0.02


def test_patchtst_with_instance_norm_level_and_scale_reach_head_only():
    torch.manual_seed(0)
    network = PatchTST(4, 16, 3, PatchTSTSpec(patch=4, stride=4)).eval()
    x_BTF = torch.randn(5, 16, 4)
    moved = 3 * x_BTF + 7
    assert (network(moved) - network(x_BTF)).abs().max() > 1e-3
    network.head.linear.weight.data.view(3, 4, -1)[..., -2:] = 0
    torch.testing.assert_close(network(moved), network(x_BTF), atol=1e-3, rtol=1e-3)
    with pytest.raises(SettingsError, match="shorter than a patch"):
        PatchTST(4, 8, 3, PatchTSTSpec())
