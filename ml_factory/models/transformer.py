"""Transformers over windows. B batch, T time steps, F features, N patches, P patch length, D width, C classes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models.layers import EncoderLayer, InstanceNorm, Patches, TokenDropout


@dataclass(frozen=True)
class PatchTSTSpec:
    """Patch, stride and width are the paper's for small data; few heads and layers, for 100 features on two cores.

    patch, stride : in time steps. pad : see `Patches`. inner : width of the feed-forward part.
    instance_norm : see `InstanceNorm`.
    """

    patch: int = 16
    stride: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2
    inner: int = 32
    dropout: float = 0.3
    pad: bool = False
    instance_norm: bool = True

    def __post_init__(self):
        for name in ("patch", "stride", "width", "heads", "layers", "inner"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SettingsError("Cannot build a PatchTST", where=name, got=value, wanted="an integer >= 1")
        if self.width % self.heads:
            raise SettingsError(
                "Cannot build a PatchTST", where="heads", got=self.heads, wanted=f"a divisor of {self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise SettingsError("Cannot build a PatchTST", where="dropout", got=self.dropout, wanted="in [0, 1)")


class PatchTST(nn.Module):
    """A time series is worth 64 words (Nie et al. 2023), as a classifier.

    Channels are independent: each feature's patches pass alone through one shared encoder. Its tokens are averaged,
    and one linear head reads all features' averages (and the levels that instance norm took out). The paper's encoder
    normalises over the batch; here over each token, so that a row's output depends on that row alone.
    """

    Spec = PatchTSTSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: PatchTSTSpec):
        super().__init__()
        if lookback < spec.patch:
            raise SettingsError(
                "The window is shorter than a patch", where="patch", got=spec.patch, wanted=f"<= {lookback}"
            )
        self.norm = InstanceNorm() if spec.instance_norm else None
        self.patches = Patches(spec.patch, spec.stride, spec.pad)
        self.embed = nn.Linear(spec.patch, spec.width)
        self.position_ND = nn.Parameter(torch.empty(self.patches.count(lookback), spec.width).uniform_(-0.02, 0.02))
        self.drop = TokenDropout(spec.dropout)
        self.encoder = nn.Sequential(
            *(EncoderLayer(spec.width, spec.heads, spec.inner, spec.dropout) for _ in range(spec.layers))
        )
        self.head_drop = nn.Dropout(spec.dropout)
        self.head = nn.Linear(features * (spec.width + (2 if spec.instance_norm else 0)), classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        B, _, F = x_BTF.shape
        levels = []
        if self.norm is not None:
            x_BTF, level_BF2 = self.norm(x_BTF)
            levels = [level_BF2]
        token_BFND = self.embed(self.patches(x_BTF)) + self.position_ND
        code_BFND = self.encoder(self.drop(token_BFND.flatten(0, 1))).unflatten(0, (B, F))
        pooled_BFX = torch.cat([code_BFND.mean(dim=2), *levels], dim=-1)
        return self.head(self.head_drop(pooled_BFX.flatten(1)))
