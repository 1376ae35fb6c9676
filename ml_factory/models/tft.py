"""Temporal fusion transformer (Lim et al. 2021) with observed inputs alone, as a classifier.

B batch, T time steps, F features or V variables, D width, H heads, K width of a head, N = B T, C classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_factory.argument_checks import check_settings
from ml_factory.models.sequence import LSTMLayer
from ml_factory.models.transformer import check_heads

EPS = 1e-3  # of the layer norms, as in the authors' code
PIECE = 2**21  # numbers per piece on a CPU: larger tensors would need new pages each time


def _tft_elu(x: Tensor) -> Tensor:
    """Return x above 0, exp(x) - 1 below. torch_xla 2.9 has a wrong gradient for its own elu: 1 + x below 0, not
    e^x.
    """
    return torch.relu(x) + x.clamp_max(0).expm1() if x.device.type == "xla" else functional.elu(x)


def _tft_glu(x: Tensor) -> Tensor:
    """Return the first half, gated by the second. torch_xla 2.9 computes its own glu's gradient on the CPU."""
    if x.device.type != "xla":
        return functional.glu(x)
    first, second = x.chunk(2, dim=-1)
    return first * second.sigmoid()


class GateAddNorm(nn.Module):
    """LayerNorm(skipped + GLU(x)): a gate that can close, and what went past it (equation 5)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)
        self.norm = nn.LayerNorm(outputs, eps=EPS)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.norm(skipped + _tft_glu(self.linear(x)))


class GatedResidualNetwork(nn.Module):
    """Gated residual network (equations 2 to 4): two linear maps with ELU between, behind a gate.

    outputs : None keeps the inputs' width, and they skip the gate as they are; otherwise through a linear map.
    """

    def __init__(self, inputs: int, width: int, outputs: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.outer = nn.Linear(inputs, width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.skip = nn.Linear(inputs, outputs) if outputs else nn.Identity()
        self.gate = GateAddNorm(width, outputs or inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_first_linear_output(self.outer(x), self.skip(x))

    def gate_first_linear_output(self, first: Tensor, skipped: Tensor) -> Tensor:
        """Compute the layer from the output of the first linear map on."""
        return self.gate(self.drop(self.inner(_tft_elu(first))), skipped)


class VariableSelectionNetwork(nn.Module):
    """Variable selection: V numbers a step become one vector, weighted by a softmax over the variables (section 4.2).

    x_BTV -> (chosen_BTD, weight_BTV). The V embeddings and V networks are one tensor each, V first, and run at once. A
    number's embedding is linear in it, so a linear map of embeddings is folded into one map of the numbers: the same
    sums in another order, without V D numbers a step in between.
    """

    def __init__(self, variables: int, width: int, dropout: float):
        super().__init__()
        V, D = variables, width
        # The V networks: x * scale + shift, outer, ELU, inner, gate, norm. Weights are (V, out, in), as nn.Linear's.
        self.scale_VD, self.shift_VD = _uniform(1, V, D), _uniform(1, V, D)
        self.outer_VDD, self.outer_VD = _uniform(D, V, D, D), _uniform(D, V, D)
        self.inner_VDD, self.inner_VD = _uniform(D, V, D, D), _uniform(D, V, D)
        self.gate_VGD, self.gate_VG = _uniform(D, V, 2 * D, D), _uniform(D, V, 2 * D)
        self.norm_VD, self.bias_VD = nn.Parameter(torch.ones(V, D)), nn.Parameter(torch.zeros(V, D))
        # One variable is always chosen whole.
        self.joint = GatedResidualNetwork(V * D, D, V, dropout) if V > 1 else None

    def forward(self, x_BTV: Tensor) -> tuple[Tensor, Tensor]:
        weight_BTV = self._weights(x_BTV)
        x_VN1 = x_BTV.flatten(0, 1).T.contiguous().unsqueeze(-1)
        share_VN1 = weight_BTV.flatten(0, 1).T.unsqueeze(-1)
        chosen_ND = self._chosen(x_VN1, share_VN1, self.norm_VD[:, None], *self._maps())
        return chosen_ND.view(*x_BTV.shape[:2], -1) + weight_BTV @ self.bias_VD, weight_BTV

    def _chosen(self, x_VN1: Tensor, *parts: Tensor) -> Tensor:
        """The weighted sum of all networks' answers (N, D), on a CPU in pieces of rows."""
        rows = max(PIECE // self.scale_VD.numel(), 1)
        if x_VN1.device.type != "cpu" or torch.compiler.is_exporting():  # whole; an export does not know the rows
            return self._sum(x_VN1, *parts)
        share_VN1, *maps = parts
        pieces = zip(x_VN1.split(rows, 1), share_VN1.split(rows, 1), strict=True)
        return torch.cat([self._sum(x_VN1, share_VN1, *maps) for x_VN1, share_VN1 in pieces])

    def _sum(self, x_VN1: Tensor, share_VN1: Tensor, norm_V1D: Tensor, *maps: Tensor) -> Tensor:
        return (share_VN1 * self._networks(x_VN1, *maps) * norm_V1D).sum(0)

    def _weights(self, x_BTV: Tensor) -> Tensor:
        if self.joint is None:
            return torch.ones_like(x_BTV)
        first, skipped = (functional.linear(x_BTV, *self._folded(part)) for part in (self.joint.outer, self.joint.skip))
        return self.joint.gate_first_linear_output(first, skipped).softmax(dim=-1)

    def _folded(self, part: nn.Linear) -> tuple[Tensor, Tensor]:
        """Weight and bias over the numbers x_BTV themselves of a linear map over their embeddings (B, T, V D)."""
        weight_OVD = part.weight.unflatten(1, self.scale_VD.shape)
        weight_OV = torch.einsum("ovd,vd->ov", weight_OVD, self.scale_VD)
        return weight_OV, part.bias + torch.einsum("ovd,vd->o", weight_OVD, self.shift_VD)

    def _maps(self) -> tuple[Tensor, ...]:
        """The V networks as they are run: (scale, shift) of the embedding, (slope, start) of the first linear map, and
        (weight, bias) of the other two, which are one.
        """
        scale_V1D, shift_V1D = self.scale_VD[:, None], self.shift_VD[:, None]
        slope_V1D = (self.outer_VDD @ self.scale_VD[..., None]).mT
        start_V1D = (self.outer_VDD @ self.shift_VD[..., None]).mT + self.outer_VD[:, None]
        inner_VDD, inner_V1D = self.inner_VDD.mT, self.inner_VD[:, None]
        gate_VDG, gate_V1G = self.gate_VGD.mT, self.gate_VG[:, None]
        return scale_V1D, shift_V1D, slope_V1D, start_V1D, inner_VDD @ gate_VDG, inner_V1D @ gate_VDG + gate_V1G

    def _networks(
        self, x_VN1: Tensor, scale_V1D: Tensor, shift_V1D: Tensor, slope_V1D: Tensor, start_V1D: Tensor,
        weight_VDG: Tensor, bias_V1G: Tensor,
    ) -> Tensor:  # fmt: skip
        """Each variable's gated residual network, up to the scale and bias of its norm."""
        inner_VNX = _tft_elu(torch.addcmul(start_V1D, x_VN1, slope_V1D))
        inner_VNX = torch.baddbmm(bias_V1G, inner_VNX, weight_VDG)
        embedded_VND = torch.addcmul(shift_V1D, x_VN1, scale_V1D)
        return functional.layer_norm(embedded_VND + _tft_glu(inner_VNX), scale_V1D.shape[2:], eps=EPS)


class InterpretableMultiHeadAttention(nn.Module):
    """Heads that share their values, so that the mean of their weights is the attention (equations 13 to 16).

    The last position of x_BTD asks, and looks at all. Returns (mixed_BD, attention_BT).
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width // heads, bias=False)
        self.out = nn.Linear(width // heads, width, bias=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        q_BH1K = self.query(x_BTD[:, -1:]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BHTK = self.key(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        score_BH1T = (q_BH1K / math.sqrt(q_BH1K.shape[-1])) @ k_BHTK.mT
        # Values are shared: the mean over heads of what they mix is what the mean of their weights mixes.
        attention_B1T = score_BH1T.softmax(dim=-1).mean(dim=1)
        return self.out(attention_B1T @ self.value(x_BTD))[:, 0], attention_B1T[:, 0]


def _uniform(inputs: int, *shape: int) -> nn.Parameter:
    """Return a parameter initialised as `nn.Linear` with that many inputs."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


@dataclass(frozen=True)
class TFTSpec:
    """width : of everything.
    layers : of the LSTM.
    dropout : inside gated networks and before gates, not inside each variable's own network: with 170 variables that
        would be most of the training's time.
    """

    SEARCH: ClassVar = {"width": (8, 32, 8), "layers": (1, 2), "dropout": (0.0, 0.5)}
    width: int = 16
    heads: int = 2
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self):
        some, share = "[1, inf)", "[0, 1)"
        check_settings(self, width=some, heads=some, layers=some, dropout=share)
        check_heads(self)


class TFT(nn.Module):
    """x_BTF -> logits_BC, at the window's last step."""

    Spec = TFTSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: TFTSpec):
        super().__init__()
        D = spec.width
        self.past = VariableSelectionNetwork(features, D, spec.dropout)
        self.encoder = LSTMLayer(D, D, spec.layers, spec.dropout)
        self.drop = nn.Dropout(spec.dropout)
        self.local = GateAddNorm(D, D)
        self.enrich = GatedResidualNetwork(D, D, dropout=spec.dropout)
        self.attention = InterpretableMultiHeadAttention(D, spec.heads)
        self.attended = GateAddNorm(D, D)
        self.feed = GatedResidualNetwork(D, D, dropout=spec.dropout)
        self.decoded = GateAddNorm(D, D)
        self.head = nn.Linear(D, classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self._decode(x_BTF)[0])

    @torch.no_grad()
    def explain(self, x_BTF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share of each variable in what is selected at each step, (B, T, F), and the attention of the
        answer over the window's steps, (B, T); both sum to 1 over the last axis.
        """
        return self._decode(x_BTF)[1:]

    def _decode(self, x_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # ---------------------------------------------------------------- select variables, step by step (4.2)
        chosen_BTD, shares_BTF = self.past(x_BTF)
        # ---------------------------------------------------------------- local order, then what is far (4.5)
        local_BTD, _ = self.encoder(chosen_BTD)
        local_BTD = self.local(self.drop(local_BTD), chosen_BTD)
        enriched_BTD = self.enrich(local_BTD)
        mixed_BD, attention_BT = self.attention(enriched_BTD)
        y_BD = self.attended(self.drop(mixed_BD), enriched_BTD[:, -1])
        y_BD = self.decoded(self.feed(y_BD), local_BTD[:, -1])
        return y_BD, shares_BTF, attention_BT
