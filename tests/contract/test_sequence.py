"""The LSTM's gates, the TCN against its paper's figure at every step."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.contract.doors import LSTM, TCN, RecurrentSpec, TCNSpec


def test_lstm_forget_gate_bias_starts_at_1_in_every_layer():
    network = LSTM(5, 9, 3, RecurrentSpec(hidden=4, layers=2))
    for layer in (0, 1):
        bias = getattr(network.rnn, f"bias_ih_l{layer}")
        assert (bias[4:8] == 1).all() and (bias[:4] != 1).all() and (bias[8:] != 1).all()


def as_published(network: TCN, x_BTF: torch.Tensor) -> torch.Tensor:
    """Bai et al. 2018, figure 1, with torch's own weight norm: padded at both ends, what looks ahead is cut off."""
    x_BXT = x_BTF.transpose(1, 2)
    for level, block in enumerate(network.blocks):
        y_BXT, dilation = x_BXT, 2**level
        for ours in (block.conv1, block.conv2):
            outputs, inputs, kernel = ours.direction.shape
            reach = (kernel - 1) * dilation
            conv = weight_norm(nn.Conv1d(inputs, outputs, kernel, padding=reach, dilation=dilation))
            weight = conv.parametrizations.weight
            weight.original0.data, weight.original1.data, conv.bias.data = ours.length, ours.direction, ours.bias
            y_BXT = conv(y_BXT)[:, :, : x_BXT.shape[2]].relu()
        x_BXT = (y_BXT + block.skip(x_BXT)).relu()
    return network.head(x_BXT[:, :, -1])


@pytest.mark.parametrize("lookback", [1, 2, 7, 32, 45])
@pytest.mark.parametrize(("kernel", "levels"), [(1, 2), (2, 0), (3, 0), (3, 5), (5, 1)])
def test_tcn_output_and_gradients_equal_published_tcn(lookback, kernel, levels):
    torch.manual_seed(0)
    network = TCN(6, lookback, 3, TCNSpec(width=8, kernel=kernel, levels=levels)).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # else a weight's length is that of its direction
    x_BTF, same_BTF = (torch.randn(4, lookback, 6).double().requires_grad_() for _ in range(2))
    same_BTF.data.copy_(x_BTF.data)
    ours, papers = network(x_BTF), as_published(network, same_BTF)
    torch.testing.assert_close(ours, papers, atol=1e-6, rtol=1e-5)
    ours.square().sum().backward()
    papers.square().sum().backward()
    torch.testing.assert_close(x_BTF.grad, same_BTF.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "lookback"), [(2, 16), (3, 2), (3, 5), (3, 13), (3, 14), (3, 32), (5, 96)])
def test_tcn_depth_is_smallest_that_covers_window(kernel, lookback):
    def felt(levels: int) -> torch.Tensor:
        torch.manual_seed(0)
        network = TCN(4, lookback, 3, TCNSpec(width=16, kernel=kernel, levels=levels)).double().eval()
        x_BTF = torch.randn(32, lookback, 4, dtype=torch.float64, requires_grad=True)
        network(x_BTF).sum().backward()
        return x_BTF.grad.abs().sum(dim=(0, 2)) > 0

    depth = TCNSpec(kernel=kernel).level_count(lookback)
    assert felt(0).all() and torch.equal(felt(0), felt(depth))
    assert depth == 1 or not felt(depth - 1)[0]
