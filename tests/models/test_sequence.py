"""The LSTM against its equations, the TCN against its dilated convolutions at every step."""

import pytest
import torch
from torch.nn import functional

from ml_factory.errors import SettingsError
from ml_factory.models.sequence import LSTM, TCN, RecurrentSpec, TCNSpec


def test_the_forward_pass_is_the_papers_equations():
    torch.manual_seed(0)
    network = LSTM(5, 9, 3, RecurrentSpec(hidden=4)).eval()
    weights = dict(network.rnn.named_parameters())
    x_BTF = torch.randn(6, 9, 5)
    h_BH = c_BH = torch.zeros(6, 4)
    with torch.no_grad():
        for step in range(9):
            gates = x_BTF[:, step] @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
            gates = gates + h_BH @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
            i, f, g, o = gates.chunk(4, dim=1)
            c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
            h_BH = o.sigmoid() * c_BH.tanh()
        torch.testing.assert_close(network(x_BTF), network.head(h_BH), atol=1e-5, rtol=1e-5)


def test_forget_gates_start_open_in_every_layer():
    network = LSTM(5, 9, 3, RecurrentSpec(hidden=4, layers=2))
    for layer in (0, 1):
        bias = getattr(network.rnn, f"bias_ih_l{layer}")
        assert (bias[4:8] == 1).all() and (bias[:4] != 1).all() and (bias[8:] != 1).all()


@pytest.mark.parametrize("settings", [{"hidden": 0}, {"layers": 1.5}, {"dropout": 1.0}])
def test_settings_check_themselves(settings):
    with pytest.raises(SettingsError, match=rf"\[{next(iter(settings))}\]"):
        RecurrentSpec(**settings)


def dilated(network: TCN, x_BTF: torch.Tensor) -> torch.Tensor:
    """The paper's: block l dilated by 2^l, everything at all steps; the last one is read."""

    def conv(part, x_BXT, dilation):
        weight = part.direction * part.length / part.direction.norm(dim=(1, 2), keepdim=True)
        before = (weight.shape[2] - 1) * dilation
        return functional.conv1d(functional.pad(x_BXT, (before, 0)), weight, part.bias, dilation=dilation)

    y_BXT = x_BTF.transpose(1, 2)
    for level, block in enumerate(network.blocks):
        inner_BXT = conv(block.conv1, y_BXT, 2**level).relu()
        y_BXT = (conv(block.conv2, inner_BXT, 2**level).relu() + block.skip(y_BXT)).relu()
    return network.head(y_BXT[:, :, -1])


@pytest.mark.parametrize("lookback", [1, 2, 7, 32, 45])
@pytest.mark.parametrize(("kernel", "levels"), [(1, 2), (2, 0), (3, 0), (3, 5), (5, 1)])
def test_steps_that_the_last_one_does_not_read_are_left_out_and_nothing_else(lookback, kernel, levels):
    torch.manual_seed(0)
    network = TCN(6, lookback, 3, TCNSpec(width=8, kernel=kernel, levels=levels)).eval()
    x_BTF, same_BTF = (torch.randn(4, lookback, 6).requires_grad_() for _ in range(2))
    same_BTF.data.copy_(x_BTF.data)
    ours, papers = network(x_BTF), dilated(network, same_BTF)
    torch.testing.assert_close(ours, papers, atol=1e-6, rtol=1e-5)
    ours.square().sum().backward()
    papers.square().sum().backward()
    torch.testing.assert_close(x_BTF.grad, same_BTF.grad, atol=1e-6, rtol=1e-5)
