"""LSTM and GRU layers: torch's kernels on CPU and CUDA, one compiled step scanned over time on XLA.

Unrolled, a recurrent layer is thousands of nodes to XLA's compiler, minutes of work; a scan is one step, whatever T. B
batch, T time steps, F features, H hidden units, L layers, G = 4 H (LSTM) or 3 H (GRU) gates.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import rnn as kernels  # torch_xla puts a GRU of its own in the place of `nn.GRU`, on every device


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


NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def scan_steps(step: Callable, carry: tuple, inputs_T: Tensor) -> Tensor:
    """Return the outputs y of carry, y = step(carry, input) along the first axis: one loop in XLA's program, its body
    compiled once. The steps are pure functions, so their trace is cached.
    """
    from torch_xla.experimental.scan import scan  # noqa: PLC0415 - only an XLA device has it

    return scan(step, carry, inputs_T, is_fn_pure=True)[1]
