"""The scan form of LSTM and GRU against torch's own layers: outputs and gradients, from the same weights."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.contract.doors import recurrent_layers

B, T, F, H = 4, 11, 5, 7
KINDS = [(recurrent_layers.LSTMLayer, nn.LSTM), (recurrent_layers.GRULayer, nn.GRU)]


def layers_of(ours, theirs, layers):
    """Ours with the weights of theirs, loaded by name."""
    torch.manual_seed(0)
    official = theirs(F, H, layers, batch_first=True)
    own = ours(F, H, layers)
    own.load_state_dict(official.state_dict())
    return own, official


@pytest.fixture(autouse=True)
def plain_scan(monkeypatch):
    """Stands in for the scan of torch_xla, in Python."""

    def scan(step, carry, inputs_T, is_fn_pure):
        outputs = []
        for now in inputs_T:
            carry, output = step(carry, now)
            outputs.append(output)
        return carry, torch.stack(outputs)

    monkeypatch.setitem(sys.modules, "torch_xla.experimental.scan", SimpleNamespace(scan=scan))


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_recurrent_scan_equals_torch_layer(ours, theirs):
    """Outputs and gradients."""
    own, official = layers_of(ours, theirs, 2)
    x_BTF, direction_BTH = torch.randn(B, T, F), torch.randn(B, T, H)
    y_BTH, expected_BTH = recurrent_layers.scan_recurrent_layer(own, x_BTF), official(x_BTF)[0]
    torch.testing.assert_close(y_BTH, expected_BTH, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own(x_BTF)[0], expected_BTH, atol=0, rtol=0)
    for one_BTH in (y_BTH, expected_BTH):
        (one_BTH * direction_BTH).sum().backward()
    for (name, one), other in zip(own.named_parameters(), official.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5, msg=name)


def test_recurrent_scan_dropout_applies_between_layers_in_training_only():
    own, x_BTF = recurrent_layers.LSTMLayer(F, H, 2, dropout=0.5), torch.randn(B, T, F)
    first, second = recurrent_layers.LSTMLayer(F, H), recurrent_layers.LSTMLayer(H, H)
    for number, layer in enumerate((first, second)):
        layer.load_state_dict({f"{name}_l0": getattr(own, f"{name}_l{number}").data for name in recurrent_layers.NAMES})
    torch.manual_seed(1)
    dropped_BTH = recurrent_layers.scan_recurrent_layer(own, x_BTF)
    torch.manual_seed(1)
    between_TBH = nn.functional.dropout(first(x_BTF)[0].transpose(0, 1).contiguous(), 0.5)
    torch.testing.assert_close(dropped_BTH, second(between_TBH.transpose(0, 1))[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        recurrent_layers.scan_recurrent_layer(own.eval(), x_BTF), own(x_BTF)[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("step", [recurrent_layers.lstm_recurrent_step, recurrent_layers.gru_recurrent_step])
def test_recurrent_steps_have_no_closure_and_no_defaults(step):
    """A scan traces its step once and gives no gradient to what the step closes over."""
    assert step.__closure__ is None and step.__defaults__ is None
