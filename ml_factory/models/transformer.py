"""Transformers over windows.

B batch, T time steps, F features, N patches, P patch length, D width, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models.base import check_model_setting_ranges
from ml_factory.models.heads import ChannelHead
from ml_factory.models.layers import EncoderLayer, InstanceNorm, PatchLayer, TokenDropout


@dataclass(frozen=True)
class PatchTSTSpec:
    """Patch, stride and width are the paper's for small data; few heads and layers, for 100 features on two cores.

    patch, stride : in time steps.
    inner : width of the feed-forward part.
    instance_norm : see `InstanceNorm`.
    """

    patch: int = 16
    stride: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2
    inner: int = 32
    dropout: float = 0.3
    instance_norm: bool = True

    def __post_init__(self):
        check_model_setting_ranges(self, "a PatchTST", whole=("patch", "stride", "width", "heads", "layers", "inner"))
        _check_heads(self, "a PatchTST")


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
        self.norm = InstanceNorm() if spec.instance_norm else None
        self.patches = PatchLayer(spec.patch, spec.stride)
        count = self.patches.patch_count(lookback)
        self.embed = nn.Linear(spec.patch, spec.width)
        self.position_ND = nn.Parameter(torch.empty(count, spec.width).uniform_(-0.02, 0.02))
        self.drop = TokenDropout(spec.dropout)
        self.encoder = nn.Sequential(
            *(EncoderLayer(spec.width, spec.heads, spec.inner, spec.dropout) for _ in range(spec.layers))
        )
        self.head_drop = nn.Dropout(spec.dropout)
        self.head = ChannelHead(spec.width, features, classes, self.norm is not None)

    def forward(self, x_BTF: Tensor) -> Tensor:
        B, _, F = x_BTF.shape
        x_BTF, *taken = self.norm(x_BTF) if self.norm is not None else (x_BTF,)
        token_BFND = self.embed(self.patches(x_BTF)) + self.position_ND
        code_BFND = self.encoder(self.drop(token_BFND.flatten(0, 1))).unflatten(0, (B, F))
        return _answer(self.head, self.head_drop(code_BFND.mean(dim=2)), taken)


@dataclass(frozen=True)
class ITransformerSpec:
    """width, heads, layers, inner, instance_norm : as in PatchTST. read : see `ChannelHead`; None is the paper's."""

    width: int = 16
    heads: int = 2
    layers: int = 2
    inner: int = 32
    dropout: float = 0.3
    instance_norm: bool = True
    read: int | None = 4

    def __post_init__(self):
        given = ("read",) if self.read is not None else ()
        check_model_setting_ranges(self, "an iTransformer", whole=("width", "heads", "layers", "inner", *given))
        _check_heads(self, "an iTransformer")


class ITransformer(nn.Module):
    """iTransformer (Liu et al. 2024): a channel's whole window is one token, and attention runs over the channels.

    Classes are read off all tokens (the authors' library: `read=None`), and the levels that instance norm took out.
    """

    Spec = ITransformerSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: ITransformerSpec):
        super().__init__()
        self.norm = InstanceNorm() if spec.instance_norm else None
        self.embed = nn.Linear(lookback, spec.width)
        self.drop = TokenDropout(spec.dropout)
        self.encoder = nn.Sequential(
            *(EncoderLayer(spec.width, spec.heads, spec.inner, spec.dropout) for _ in range(spec.layers)),
            nn.LayerNorm(spec.width),
        )
        self.head_drop = nn.Dropout(spec.dropout)
        self.head = ChannelHead(spec.width, features, classes, self.norm is not None, spec.read)

    def forward(self, x_BTF: Tensor) -> Tensor:
        x_BTF, *taken = self.norm(x_BTF) if self.norm is not None else (x_BTF,)
        code_BFD = self.encoder(self.drop(self.embed(x_BTF.transpose(1, 2))))
        return _answer(self.head, self.head_drop(code_BFD), taken)


def _answer(head: ChannelHead, code_BFX: Tensor, taken: list[Tensor]) -> Tensor:
    """Return the logits; the levels that instance norm took out join the codes."""
    return head(code_BFX, InstanceNorm.mean_and_log_deviation(*taken) if taken else None)


def _check_heads(spec: PatchTSTSpec | ITransformerSpec, what: str) -> None:
    if spec.width % spec.heads:
        raise SettingsError(f"Cannot build {what}", where="heads", got=spec.heads, wanted=f"a divisor of {spec.width}")
