"""Networks that read a window step by step: LSTM, GRU, TCN.

On CPU and CUDA recurrent layers are torch's kernels, on XLA one compiled step scanned over time: unrolled, a layer is
thousands of nodes to XLA's compiler, minutes of work. B batch, T time steps, F features, H hidden units, L layers,
G = 4 H (LSTM) or 3 H (GRU) gates, X channels, C classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import rnn as kernels  # torch_xla puts a GRU of its own in the place of `nn.GRU`, on every device

from ml_factory.argument_checks import check_settings

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class _ScannedOnXla(nn.RNNBase):
    """A layer of torch, batch first: the same weights by the same names, and the same outputs on every device."""

    def __init__(self, features: int, hidden: int, layers: int = 1, dropout: float = 0.0):
        super().__init__(features, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)

    def forward(self, x_BTF: Tensor):
        return (scan_recurrent_layer(self, x_BTF), None) if x_BTF.device.type == "xla" else super().forward(x_BTF)


class LSTMLayer(_ScannedOnXla, kernels.LSTM):
    """`nn.LSTM`."""


class GRULayer(_ScannedOnXla, kernels.GRU):
    """`nn.GRU`."""


def lstm_recurrent_step(carry: tuple, gates_BG: Tensor) -> tuple[tuple, Tensor]:
    """Compute one step: carry = (h_BH, c_BH, weight_GH), gates_BG = the input's part. Gates: input, forget, cell,
    output.
    """
    h_BH, c_BH, weight_GH = carry
    i, f, g, o = (gates_BG + h_BH @ weight_GH.T).chunk(4, dim=1)
    c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
    h_BH = o.sigmoid() * c_BH.tanh()
    return (h_BH, c_BH, weight_GH), h_BH


def gru_recurrent_step(carry: tuple, gates_BG: Tensor) -> tuple[tuple, Tensor]:
    """Compute one step: carry = (h_BH, weight_GH, bias_G). Gates: reset, update, new; the reset acts after the
    product.
    """
    h_BH, weight_GH, bias_G = carry
    (r, z, n), (h_r, h_z, h_n) = gates_BG.chunk(3, dim=1), (h_BH @ weight_GH.T + bias_G).chunk(3, dim=1)
    n = (n + (r + h_r).sigmoid() * h_n).tanh()
    z = (z + h_z).sigmoid()
    h_BH = n + z * (h_BH - n)
    return (h_BH, weight_GH, bias_G), h_BH


def scan_recurrent_layer(rnn: nn.RNNBase, x_BTF: Tensor) -> Tensor:
    """Run an LSTM or GRU as a scan with its own weights; equals `rnn(x_BTF)[0]` (batch first, one direction).

    The products of all inputs are computed first, as one; the scan holds the recurrent part. Weights are part of the
    carry, since a scan gives no gradient to what its step closes over.
    """
    start_BH, x_TBF = x_BTF.new_zeros(x_BTF.shape[0], rnn.hidden_size), x_BTF.transpose(0, 1)
    for layer in range(rnn.num_layers):
        weight_GF, weight_GH, bias_G, inner_G = (getattr(rnn, f"{name}_l{layer}") for name in NAMES)
        if layer and rnn.dropout:
            x_TBF = functional.dropout(x_TBF, rnn.dropout, rnn.training)
        if isinstance(rnn, kernels.LSTM):
            gates_TBG = functional.linear(x_TBF, weight_GF, bias_G + inner_G)
            x_TBF = scan_steps(lstm_recurrent_step, (start_BH, start_BH, weight_GH), gates_TBG)
        else:
            gates_TBG = functional.linear(x_TBF, weight_GF, bias_G)
            x_TBF = scan_steps(gru_recurrent_step, (start_BH, weight_GH, inner_G), gates_TBG)
    return x_TBF.transpose(0, 1)


def scan_steps(step: Callable, carry: tuple, inputs_T: Tensor) -> Tensor:
    """Return the outputs y of carry, y = step(carry, input) along the first axis: one loop in XLA's program, its body
    compiled once. The steps are pure functions, so their trace is cached.
    """
    from torch_xla.experimental.scan import scan  # noqa: PLC0415 - only an XLA device has it

    return scan(step, carry, inputs_T, is_fn_pure=True)[1]


# ---- networks --------------------------------------------------------------------------------------------------------


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
