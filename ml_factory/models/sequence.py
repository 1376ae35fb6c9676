"""Networks that read a window step by step: LSTM, GRU, TCN.

B batch, T time steps, F features, H hidden units, X channels, C classes.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_factory.models.base import check_settings
from ml_factory.models.recurrent_layers import GRULayer, LSTMLayer


@dataclass(frozen=True)
class RecurrentSpec:
    """hidden : units a layer. dropout : between layers and before the head."""

    SEARCH: ClassVar = {"hidden": (16, 128, "log"), "layers": (1, 2), "dropout": (0.0, 0.5)}
    hidden: int = 64
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self):
        check_settings(self, hidden="[1, inf)", layers="[1, inf)", dropout="[0, 1)")


class _Recurrent(nn.Module):
    """x_BTF -> logits_BC from the last step's hidden state."""

    Spec = RecurrentSpec
    layers: type[nn.RNNBase]

    def __init__(self, features: int, lookback: int, classes: int, spec: RecurrentSpec):
        super().__init__()
        self.rnn = self.layers(features, spec.hidden, spec.layers, spec.dropout)
        self.drop = nn.Dropout(spec.dropout)
        self.head = nn.Linear(spec.hidden, classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        hidden_BTH, _ = self.rnn(x_BTF)
        return self.head(self.drop(hidden_BTH[:, -1]))


class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; forget gate: Gers et al. 2000)."""

    layers = LSTMLayer

    def __init__(self, features: int, lookback: int, classes: int, spec: RecurrentSpec):
        super().__init__(features, lookback, classes, spec)
        # Forget gates open at the start, so that memory is kept (Jozefowicz et al. 2015); torch's order of gates is
        # input, forget, cell, output.
        for name, parameter in self.rnn.named_parameters():
            if name.startswith("bias_ih"):
                nn.init.ones_(parameter.data[spec.hidden : 2 * spec.hidden])


class GRU(_Recurrent):
    """Gated recurrent unit (Cho et al. 2014; reset after the product, as cuDNN has it): like the LSTM, one state."""

    layers = GRULayer


@dataclass(frozen=True)
class TCNSpec:
    """width : channels of every level.
    kernel : steps a convolution reads.
    dropout : of whole channels.

    levels : residual blocks, dilated 1, 2, 4, …; 0 takes as many as the window needs to be seen whole.
    """

    SEARCH: ClassVar = {"width": (16, 64, "log"), "kernel": (2, 5), "dropout": (0.0, 0.5)}
    width: int = 32
    kernel: int = 3
    levels: int = 0
    dropout: float = 0.1

    def __post_init__(self):
        check_settings(self, width="[1, inf)", kernel="[1, inf)", levels="[0, inf)", dropout="[0, 1)")

    def level_count(self, lookback: int) -> int:
        """Return the number of levels for windows of this length: 1 + 2 (kernel - 1)(2^levels - 1) steps are seen."""
        if self.levels or self.kernel == 1:
            return self.levels or 1
        return max(1, math.ceil(math.log2((lookback - 1) / (2 * (self.kernel - 1)) + 1)))


class _TCNCausalConv(nn.Module):
    """Causal convolution over x_BXT, at every `stride`-th step up to the last, with weight normalisation.

    Weight normalisation (Salimans and Kingma 2016): a direction, and its length as a parameter of its own.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__()
        start = nn.Conv1d(inputs, outputs, kernel)
        self.direction = nn.Parameter(start.weight.detach().clone())
        self.length = nn.Parameter(start.weight.detach().norm(dim=(1, 2), keepdim=True))
        self.bias = nn.Parameter(start.bias.detach().clone())
        self.before, self.stride = kernel - 1, stride

    def forward(self, x_BXT: Tensor) -> Tensor:
        weight = self.direction * (self.length / self.direction.norm(dim=(1, 2), keepdim=True))
        padded = functional.pad(x_BXT, (self.before - _first(x_BXT, self.stride), 0))
        return functional.conv1d(padded, weight, self.bias, self.stride)


class _TCNResidualBlock(nn.Module):
    """Two causal convolutions, each with ReLU and dropout, added to their input (Bai et al. 2018, figure 1b), at every
    second step up to the last: x_BXT -> x_BXS with S = ceil(T / 2).
    """

    def __init__(self, inputs: int, width: int, kernel: int, dropout: float):
        super().__init__()
        self.conv1 = _TCNCausalConv(inputs, width, kernel)
        self.conv2 = _TCNCausalConv(width, width, kernel, stride=2)
        # Whole channels are dropped, as the paper says (its code drops single numbers). In place and before ReLU, which
        # is equal: no other layer reads what a convolution writes, and new memory costs more.
        self.drop = nn.Dropout1d(dropout, inplace=True)
        self.skip = nn.Conv1d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x_BXT: Tensor) -> Tensor:
        y_BXT = torch.relu_(self.drop(self.conv1(x_BXT)))
        y_BXS = torch.relu_(self.drop(self.conv2(y_BXT)))
        return torch.relu_(y_BXS + self.skip(x_BXT[:, :, _first(x_BXT, 2) :: 2]))


def _first(x_BXT: Tensor, stride: int) -> int:
    """Return the step from which every `stride`-th one ends with the last."""
    return (x_BXT.shape[2] - 1) % stride


class TCN(nn.Module):
    """Temporal convolutional network (Bai, Kolter and Koltun 2018): x_BTF -> logits_BC from the last step.

    The last step reads a block that is dilated by d at every d-th step alone. Those are all that is computed: each
    block leaves out every second step, so that neighbours are what the next one's dilation asks for.
    """

    Spec = TCNSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: TCNSpec):
        super().__init__()
        widths = [features] + [spec.width] * spec.level_count(lookback)
        self.blocks = nn.Sequential(
            *(_TCNResidualBlock(inputs, outputs, spec.kernel, spec.dropout) for inputs, outputs in pairwise(widths))
        )
        self.head = nn.Linear(spec.width, classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self.blocks(x_BTF.transpose(1, 2))[:, :, -1])
