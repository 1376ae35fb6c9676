"""Transformers over windows: PatchTST and iTransformer, and their layers.

B batch, T time steps, F features (channels), N patches or tokens, P patch length, D width, H heads, K width of a head,
X width of a code, C classes.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_factory.argument_checks import check_settings
from ml_factory.errors import SettingsError

FEW = 15  # tokens


def instance_norm(x_BTF: Tensor) -> tuple[Tensor, Tensor]:
    """Remove each window's own mean and deviation per channel; returns them as mean and log(1 + deviation), level_BF2.

    Instance normalisation (Kim et al. 2022, section 3.2) without its affine part, as PatchTST and iTransformer use it.
    The head reads the levels with the codes: in features that are scale-free already they are information, not
    nuisance.
    """
    mean_B1F = x_BTF.mean(dim=1, keepdim=True)
    centred_BTF = x_BTF - mean_B1F
    deviation_B1F = (centred_BTF.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    return centred_BTF / deviation_B1F, torch.cat([mean_B1F, deviation_B1F.log1p()], dim=1).transpose(1, 2)


def _cut_patches(x_BTF: Tensor, length: int, stride: int) -> Tensor:
    """Return each channel's patches (Nie et al. 2023, section 3.1), x_BFNP, the last one ending at the last step.

    N = (T - P) // stride + 1: where the patches do not fill the window the oldest steps are left out.
    """
    x_BFT = x_BTF.transpose(1, 2)
    return x_BFT[:, :, (x_BFT.shape[2] - length) % stride :].unfold(dimension=2, size=length, step=stride)


class ChannelHead(nn.Module):
    """Class logits read off a code for each channel, code_BFX, and the levels that instance norm removed.

    read : width of a map, shared by all channels, from each code to the logits' input (None: the whole code). The whole
        code has weights of its own per channel, more than overlapping labels can fit.
    """

    def __init__(self, width: int, features: int, classes: int, read: int | None = None):
        super().__init__()
        self.read = nn.Identity() if read is None else nn.Linear(width + 2, read)
        self.linear = nn.Linear(features * (read or width + 2), classes)

    def forward(self, code_BFX: Tensor, level_BF2: Tensor) -> Tensor:
        return self.linear(self.read(torch.cat([code_BFX, level_BF2], dim=-1)).flatten(1))


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
    """softmax(q k^T / sqrt(K)) v: one kernel where it is fast, for many tokens on a CPU in fp32; elsewhere products,
    whose gradients are deterministic.
    """
    if q_BHNK.device.type == "cpu" and q_BHNK.dtype == torch.float32 and q_BHNK.shape[2] > FEW:
        return functional.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
    score_BHNN = (q_BHNK / math.sqrt(q_BHNK.shape[-1])) @ k_BHNK.mT
    # `softmax` by hand: its own kernel is slow over few tokens, 7 % of a step of PatchTST.
    share_BHNN = (score_BHNN - score_BHNN.detach().amax(dim=-1, keepdim=True)).exp()
    return share_BHNN @ v_BHNK / share_BHNN.sum(dim=-1, keepdim=True)


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


# ---- networks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ITransformerSpec:
    """inner : width of the feed-forward part. read : see `ChannelHead`. Few heads and layers, for 100 features on two
    cores.
    """

    SEARCH: ClassVar = {"width": (8, 32, 8), "layers": (1, 3), "inner": (16, 96, 16), "dropout": (0.0, 0.5)}
    width: int = 16
    heads: int = 2
    layers: int = 2
    inner: int = 32
    dropout: float = 0.3
    read: int = 4

    def __post_init__(self):
        some = "[1, inf)"
        check_settings(self, width=some, heads=some, layers=some, inner=some, read=some, dropout="[0, 1)")
        check_heads(self)


class ITransformer(nn.Module):
    """iTransformer (Liu et al. 2024): a channel's whole window is one token, and attention runs over the channels.

    Classes are read off all tokens, and the levels that instance norm took out.
    """

    Spec = ITransformerSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: ITransformerSpec):
        super().__init__()
        self.embed = nn.Linear(lookback, spec.width)
        self.drop = TokenDropout(spec.dropout)
        self.encoder = nn.Sequential(
            *(EncoderLayer(spec.width, spec.heads, spec.inner, spec.dropout) for _ in range(spec.layers)),
            nn.LayerNorm(spec.width),
        )
        self.head_drop = nn.Dropout(spec.dropout)
        self.head = ChannelHead(spec.width, features, classes, spec.read)

    def forward(self, x_BTF: Tensor) -> Tensor:
        x_BTF, level_BF2 = instance_norm(x_BTF)
        code_BFD = self.encoder(self.drop(self.embed(x_BTF.transpose(1, 2))))
        return self.head(self.head_drop(code_BFD), level_BF2)


@dataclass(frozen=True)
class PatchTSTSpec:
    """Patch, stride and width are the paper's for small data; few heads and layers, for 100 features on two cores.

    patch, stride : in time steps.
    inner : width of the feed-forward part.
    """

    SEARCH: ClassVar = {"width": (8, 32, 8), "layers": (1, 3), "inner": (16, 96, 16), "dropout": (0.0, 0.5)}
    patch: int = 16
    stride: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2
    inner: int = 32
    dropout: float = 0.3

    def __post_init__(self):
        some = "[1, inf)"
        check_settings(self, patch=some, stride=some, width=some, heads=some, layers=some, inner=some, dropout="[0, 1)")
        check_heads(self)


class PatchTST(nn.Module):
    """A time series is worth 64 words (Nie et al. 2023).

    Channels are independent: each feature's patches pass alone through one shared encoder. The head reads every
    channel's mean token, and the levels that instance norm took out. The paper normalises over the batch, here over
    each token, so that a row's output depends on that row alone.
    """

    Spec = PatchTSTSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: PatchTSTSpec):
        super().__init__()
        if lookback < spec.patch:
            raise SettingsError(
                "The window is shorter than a patch", where="patch", got=spec.patch, wanted=f"<= {lookback}",
                next_step="a longer lookback, or a shorter patch",
            )  # fmt: skip
        self.patch, self.stride = spec.patch, spec.stride
        self.embed = nn.Linear(spec.patch, spec.width)
        count = (lookback - spec.patch) // spec.stride + 1
        self.position_ND = nn.Parameter(torch.empty(count, spec.width).uniform_(-0.02, 0.02))
        self.drop = TokenDropout(spec.dropout)
        self.encoder = nn.Sequential(
            *(EncoderLayer(spec.width, spec.heads, spec.inner, spec.dropout) for _ in range(spec.layers))
        )
        self.head_drop = nn.Dropout(spec.dropout)
        self.head = ChannelHead(spec.width, features, classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        B, _, F = x_BTF.shape
        x_BTF, level_BF2 = instance_norm(x_BTF)
        token_BFND = self.embed(_cut_patches(x_BTF, self.patch, self.stride)) + self.position_ND
        code_BFND = self.encoder(self.drop(token_BFND.flatten(0, 1))).unflatten(0, (B, F))
        return self.head(self.head_drop(code_BFND.mean(dim=2)), level_BF2)


def check_heads(spec: Any) -> None:
    """Raise SettingsError unless `spec.heads` divides `spec.width`."""
    if spec.width % spec.heads:
        raise SettingsError("No such heads", where="heads", got=spec.heads, wanted=f"a divisor of {spec.width}")
