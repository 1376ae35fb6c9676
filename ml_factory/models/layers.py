"""Layers of networks.

B batch, T time steps, F features (channels), N patches of length P, D model width, H heads, K width of a head.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class InstanceNorm(nn.Module):
    """Remove each window's own mean and deviation per channel.

    Instance normalisation (Kim et al. 2022, section 3.2) without its affine part, as PatchTST and iTransformer use it.
    The head reads the removed levels with the codes (`mean_and_log_deviation`): in features that are scale-free already
    the level is information, not nuisance.
    """

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(normalised x_BTF, mean_B1F, deviation_B1F)."""
        mean_B1F = x_BTF.mean(dim=1, keepdim=True)
        centred_BTF = x_BTF - mean_B1F
        deviation_B1F = (centred_BTF.square().mean(dim=1, keepdim=True) + self.eps).sqrt()
        return centred_BTF / deviation_B1F, mean_B1F, deviation_B1F

    @staticmethod
    def mean_and_log_deviation(mean_B1F: Tensor, deviation_B1F: Tensor) -> Tensor:
        """Return mean and log(1 + deviation) of each window as level_BF2."""
        return torch.cat([mean_B1F, deviation_B1F.log1p()], dim=1).transpose(1, 2)


class PatchLayer(nn.Module):
    """x_BTF -> x_BFNP: each channel's patches (Nie et al. 2023, section 3.1), the last one ending at the last step.

    N = (T - P) // stride + 1: where the patches do not fill the window the oldest steps are left out.
    """

    def __init__(self, length: int, stride: int):
        super().__init__()
        self.length, self.stride = length, stride

    def patch_count(self, lookback: int) -> int:
        """N for windows of this length."""
        return (lookback - self.length) // self.stride + 1

    def forward(self, x_BTF: Tensor) -> Tensor:
        x_BFT = x_BTF.transpose(1, 2)
        x_BFT = x_BFT[:, :, (x_BFT.shape[2] - self.length) % self.stride :]
        return x_BFT.unfold(dimension=2, size=self.length, step=self.stride)


class TokenDropout(nn.Module):
    """Dropout whose mask is shared by the tokens of a sequence (Gal and Ghahramani 2016).

    A hundred channels of tokens want millions of random numbers a step, which on a CPU cost more than the layer.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x_BND: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x_BND
        B, _, D = x_BND.shape
        return x_BND * functional.dropout(x_BND.new_ones(B, 1, D), self.p)


# Tokens up to which a CPU's softmax, made for long rows, costs more than the products; and from which one kernel pays.
FEW, MANY = 15, 48


class MultiHeadAttentionLayer(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2) over the middle axis of x_BND, nothing masked.

    Weights are not dropped out, as in the paper's supervised runs.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BND: Tensor) -> Tensor:
        B, N, D = x_BND.shape
        # Taken apart before they are turned: so their gradients are put together in one pass.
        parts_BNHK = self.qkv(x_BND).view(B, N, 3, self.heads, D // self.heads).unbind(2)
        q_BHNK, k_BHNK, v_BHNK = (part_BNHK.transpose(1, 2) for part_BNHK in parts_BNHK)
        mixed_BHNK = dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
        return self.out(mixed_BHNK.transpose(1, 2).reshape(B, N, D))


def dot_product_attention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, in the way that is fastest for so many tokens where it runs."""
    B, H, N, K = q_BHNK.shape
    on_cpu = q_BHNK.device.type == "cpu"
    # In bf16 the fused kernel is slower than fp32 step by step.
    if on_cpu and N >= MANY and q_BHNK.dtype == torch.float32:
        return functional.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
    q_MNK, k_MNK, v_MNK = (part_BHNK.reshape(B * H, N, K) for part_BHNK in (q_BHNK, k_BHNK, v_BHNK))
    score_MNN = torch.bmm(q_MNK / math.sqrt(K), k_MNK.mT)
    if on_cpu and N <= FEW:
        # The same softmax, divided by its sum at the end; what is taken off for safety changes nothing, slopes neither.
        share_MNN = (score_MNN - score_MNN.detach().amax(dim=-1, keepdim=True)).exp()
        mixed_MNK = torch.bmm(share_MNN, v_MNK) / share_MNN.sum(dim=-1, keepdim=True)
    else:
        mixed_MNK = torch.bmm(score_MNN.softmax(dim=-1), v_MNK)
    return mixed_MNK.view(B, H, N, K)


class EncoderLayer(nn.Module):
    """Attention, then two linear maps with GELU; each added to its input and normalised after (post-norm)."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float):
        super().__init__()
        self.attention = MultiHeadAttentionLayer(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm2 = nn.LayerNorm(width)
        self.drop1, self.drop2 = TokenDropout(dropout), TokenDropout(dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = self.norm1(x_BND + self.drop1(self.attention(x_BND)))
        return self.norm2(x_BND + self.drop2(self.feed(x_BND)))
