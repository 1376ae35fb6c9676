"""The LSTM against its equations."""

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.models.sequence import LSTM, RecurrentSpec


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
