"""Layers against torch's own and against numbers worked by hand."""

import pytest
import torch
from torch import nn

from ml_factory.models.transformer import (
    FEW,
    MANY,
    EncoderLayer,
    MultiHeadAttentionLayer,
    TokenDropout,
    cut_patches,
    dot_product_attention,
    instance_norm,
)


def test_patches_equal_hand_computed_windows_and_drop_oldest_rows():
    x_BTF = torch.stack([torch.arange(1.0, 8.0), 10 * torch.arange(1.0, 8.0)], dim=1)[None]
    assert cut_patches(x_BTF, 3, 2)[0, 0].tolist() == [[1, 2, 3], [3, 4, 5], [5, 6, 7]]
    assert cut_patches(x_BTF, 3, 2)[0, 1, 1].tolist() == [30, 40, 50]
    longer = torch.arange(1.0, 9.0)[None, :, None]
    assert cut_patches(longer, 3, 2)[0, 0].tolist() == [[2, 3, 4], [4, 5, 6], [6, 7, 8]]


def test_instance_norm_removes_level_and_scale_of_each_window():
    normal, level = instance_norm(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]), eps=1e-12)
    torch.testing.assert_close(normal, torch.tensor([[[-1.0, 0.0], [1.0, 0.0]]]))
    torch.testing.assert_close(level, torch.tensor([[[2.0, torch.tensor(2.0).log()], [5.0, 0.0]]]), atol=1e-5, rtol=0)


def test_encoder_layer_equals_torch_transformer_encoder_layer():
    torch.manual_seed(0)
    ours = EncoderLayer(16, 4, 32, 0.0).eval()
    theirs = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation="gelu", batch_first=True).eval()
    theirs.self_attn.in_proj_weight.data = ours.attention.qkv.weight.data
    theirs.self_attn.in_proj_bias.data = ours.attention.qkv.bias.data
    theirs.self_attn.out_proj.load_state_dict(ours.attention.out.state_dict())
    theirs.linear1.load_state_dict(ours.feed[0].state_dict())
    theirs.linear2.load_state_dict(ours.feed[2].state_dict())
    theirs.norm1.load_state_dict(ours.norm1.state_dict())
    theirs.norm2.load_state_dict(ours.norm2.state_dict())
    x_BND = torch.randn(5, 7, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x_BND), theirs(x_BND), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [2, FEW, FEW + 1, MANY - 1, MANY, 70])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_mix_values_and_gradients_equal_softmax_attention(tokens, size):
    """Values and all gradients, also where the largest scores are in the hundreds: nothing overflows."""
    torch.manual_seed(0)
    parts, found = [size**0.5 * torch.randn(3, tokens, 2, 4) for _ in range(3)], {}
    for name, dtype in (("ours", torch.float32), ("formula", torch.float64)):
        q, k, v = (part.clone().to(dtype).requires_grad_() for part in parts)
        q_BHNK, k_BHNK, v_BHNK = (part.transpose(1, 2) for part in (q, k, v))
        y = dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
        if name == "formula":
            y = (q_BHNK @ k_BHNK.transpose(2, 3) / 2).softmax(dim=-1) @ v_BHNK
        y.square().sum().backward()
        found[name] = [y.double(), *(part.grad.double() for part in (q, k, v))]
    for ours, formula in zip(found["ours"], found["formula"], strict=True):
        assert (ours - formula).norm() <= 1e-5 * formula.norm()


def test_attention_of_one_token_returns_its_value():
    layer = MultiHeadAttentionLayer(8, 2)
    x_BND = torch.randn(3, 1, 8)
    value = layer.qkv(x_BND)[..., 16:]
    torch.testing.assert_close(layer(x_BND), layer.out(value))


def test_token_dropout_shares_mask_across_tokens_and_is_off_in_evaluation():
    layer, x_BND = TokenDropout(0.25), torch.ones(2000, 3, 8)
    assert layer.eval()(x_BND) is x_BND
    y_BND = layer.train()(x_BND)
    assert (y_BND == y_BND[:, :1]).all()
    assert set(y_BND.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y_BND == 0).float().mean().item() - 0.25) < 0.02
