"""The TFT's batched variables against one network a variable, written out; what its attention may see."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ml_factory.errors import SettingsError
from ml_factory.models import tft_layers
from ml_factory.models.heads import ForecastTask
from ml_factory.models.tft import TFT, TFTSpec
from ml_factory.models.tft_layers import (
    EPS,
    GatedResidualNetwork,
    InterpretableMultiHeadAttention,
    VariableSelectionNetwork,
)

B, T, V, D = 3, 7, 5, 8


class Literal(nn.Module):
    """Section 4.2 as it stands: an embedding and a gated residual network for each variable, in a loop."""

    def __init__(self, ours: VariableSelectionNetwork):
        super().__init__()
        self.ours = ours

    def forward(self, x_BTV, context_B1D=None):
        ours = self.ours
        embedded = [x_BTV[..., v : v + 1] * ours.scale_VD[v] + ours.shift_VD[v] for v in range(V)]
        weight_BTV = ours.joint(torch.cat(embedded, dim=-1), context_B1D).softmax(dim=-1)
        chosen_BTD = 0
        for v, one in enumerate(embedded):
            inner = functional.elu(functional.linear(one, ours.outer_VDD[v], ours.outer_VD[v]))
            inner = functional.linear(inner, ours.inner_VDD[v], ours.inner_VD[v])
            passed, door = functional.linear(inner, ours.gate_VGD[v], ours.gate_VG[v]).chunk(2, dim=-1)
            printed = functional.layer_norm(
                one + passed * door.sigmoid(), (D,), ours.norm_VD[v], ours.bias_VD[v], eps=EPS
            )
            chosen_BTD = chosen_BTD + weight_BTV[..., v : v + 1] * printed
        return chosen_BTD, weight_BTV


def selection(context=0):
    torch.manual_seed(0)
    ours = VariableSelectionNetwork(V, D, context, dropout=0.0, each_dropout=0.0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return ours


@pytest.mark.parametrize("context", [0, D])
@pytest.mark.parametrize("piece", [10**6, 3 * V * D, 3 * D])
def test_variable_selection_batched_equals_one_network_per_variable(context, piece, monkeypatch):
    """Outputs and gradients; also when a CPU takes the rows in pieces."""
    monkeypatch.setattr(tft_layers, "PIECE", piece)
    ours, x_BTV = selection(context), torch.randn(B, T, V)
    context_B1D = torch.randn(B, 1, D) if context else None
    direction_BTD, gradients = torch.randn(B, T, D), []
    outputs = []
    for network in (ours, Literal(ours)):
        chosen_BTD, weight_BTV = network(x_BTV, context_B1D)
        outputs.append((chosen_BTD, weight_BTV))
        gradients.append(torch.autograd.grad((chosen_BTD * direction_BTD).sum(), list(ours.parameters())))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert torch.allclose(outputs[0][1].sum(-1), torch.ones(B, T))


def test_variable_selection_dropout_is_off_in_evaluation():
    plain, x_BTV = selection(), torch.randn(B, T, V)
    dropping = VariableSelectionNetwork(V, D, 0, dropout=0.0, each_dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    assert not torch.allclose(dropping(x_BTV)[0], plain(x_BTV)[0], atol=1e-3)
    torch.testing.assert_close(dropping.eval()(x_BTV)[0], plain(x_BTV)[0], atol=1e-5, rtol=1e-5)


def test_variable_selection_of_one_variable_has_weight_1():
    chosen_BTD, weight_BTV = VariableSelectionNetwork(1, D, 0, 0.0, 0.0)(torch.randn(B, T, 1))
    assert (weight_BTV == 1).all() and chosen_BTD.shape == (B, T, D)


def test_gated_residual_network_equals_paper_equations():
    """Equations 2 to 5 with a context, in NumPy's terms."""
    torch.manual_seed(0)
    grn = GatedResidualNetwork(4, D, outputs=3, context=2)
    x, c = torch.randn(6, 4), torch.randn(6, 2)
    eta2 = functional.elu(x @ grn.outer.weight.T + grn.outer.bias + c @ grn.context.weight.T)
    eta1 = eta2 @ grn.inner.weight.T + grn.inner.bias
    both = eta1 @ grn.gate.linear.weight.T + grn.gate.linear.bias
    total = x @ grn.skip.weight.T + grn.skip.bias + both[:, :3] / (1 + torch.exp(-both[:, 3:]))
    centred = total - total.mean(1, keepdim=True)
    expected = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(grn(x, c), expected, atol=1e-5, rtol=1e-5)


def test_interpretable_attention_is_causal():
    torch.manual_seed(0)
    layer, x_BUD = InterpretableMultiHeadAttention(D, 2, positions=9, asking=4), torch.randn(B, 9, D)
    before, share_BSU = layer(x_BUD)
    assert torch.allclose(share_BSU.sum(-1), torch.ones(B, 4))
    assert (share_BSU[:, 1, :7] > 0).all() and (share_BSU[:, 1, 7:] == 0).all()
    x_BUD[:, 7:] += 5
    after, _ = layer(x_BUD)
    assert torch.equal(after[:, :2], before[:, :2]) and not torch.allclose(after[:, 2], before[:, 2])


def test_tft_forecast_step_ignores_known_inputs_of_later_steps():
    torch.manual_seed(0)
    network = TFT(V, T, ForecastTask(4), TFTSpec(width=D, known=("k0", "k1"))).eval()
    x_BTF, known_BSK = torch.randn(B, T, V), torch.randn(B, 4, 2)
    before = network(x_BTF, known_BSK)
    known_BSK[:, 2:] += 3
    after = network(x_BTF, known_BSK)
    torch.testing.assert_close(after[:, :2], before[:, :2], atol=1e-6, rtol=1e-6)
    assert (after[:, 2:] - before[:, 2:]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("gate", "silent"),
    [
        ("local", {"encoder", "decoder"}),
        ("attended", {"attention"}),
        ("decoded", {"enrich", "attention", "attended", "feed"}),
    ],
)
def test_tft_closed_gate_blocks_gradient_to_skipped_layers(gate, silent):
    """Figure 2: each gate can skip its part, the last one all that comes after the LSTMs."""
    torch.manual_seed(0)
    network = TFT(V, T, ForecastTask(4), TFTSpec(width=D, known=("k0", "k1"))).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # else norms with bias 0 hide a part
        door = getattr(network, gate).linear
        door.weight[D:], door.bias[D:] = 0.0, -1e3  # sigmoid of it is 0
    y_BSC = network(torch.randn(B, T, V).double(), torch.randn(B, 4, 2).double())
    (y_BSC * torch.randn_like(y_BSC)).sum().backward()
    felt = {
        name for name, part in network.named_children()
        if any(p.grad is not None and p.grad.abs().max() > 1e-12 for p in part.parameters())
    }  # fmt: skip
    parts = {name for name, part in network.named_children() if any(True for _ in part.parameters())}
    # A closed gate still has its norm.
    assert felt == parts - silent and gate in felt


def test_tft_explain_returns_shares_that_sum_to_1():
    network = TFT(V, T, ForecastTask(4), TFTSpec(width=D, known=("k0", "k1"), static=("s0", "s1", "s2")))
    reported = network.explain(torch.randn(B, T, V), torch.randn(B, 4, 2), torch.randn(B, 3))
    shapes = {"past_BTF": (B, T, V), "future_BSK": (B, 4, 2), "static_BV": (B, 3), "attention_BSU": (B, 4, T + 4)}
    for name, shape in shapes.items():
        share = getattr(reported, name)
        assert share.shape == shape and not share.requires_grad, name
        torch.testing.assert_close(share.sum(-1), torch.ones(shape[:-1]), atol=1e-5, rtol=1e-5)
    reported = TFT(V, T, 3, TFTSpec(width=D)).explain(torch.randn(B, T, V))
    assert reported.future_BSK is None and reported.static_BV is None and reported.attention_BSU.shape == (B, 1, T)


@pytest.mark.parametrize(
    "settings", [{"width": 0}, {"heads": 3}, {"static": ("s", "s")}, {"known": 2}, {"ahead": -1}, {"each_dropout": 1.0}]
)
def test_tft_spec_invalid_values_raise_settings_error(settings):
    with pytest.raises(SettingsError, match=rf"\[{next(iter(settings))}\]"):
        TFTSpec(**settings)


def test_tft_classifier_uses_known_and_static_inputs():
    torch.manual_seed(0)
    network = TFT(V, T, 3, TFTSpec(width=D, known=("clock",), static=("symbol",), ahead=4)).eval()
    x_BTF, known_BSK, static_BV = torch.randn(B, T, V), torch.randn(B, 4, 1), torch.randn(B, 1)
    y_BC = network(x_BTF, known_BSK, static_BV)
    for other in (
        (x_BTF, known_BSK + 1, static_BV),
        (x_BTF, known_BSK, static_BV + 1),
        (x_BTF + 1, known_BSK, static_BV),
    ):
        assert y_BC.shape == (B, 3) and (network(*other) - y_BC).abs().min() > 1e-5
    assert network.explain(x_BTF, known_BSK, static_BV).attention_BSU.shape == (B, 1, T + 4)
    for alone in ({"known": ("clock",)}, {"ahead": 4}):
        with pytest.raises(SettingsError, match=r"\[ahead\]"):
            TFT(V, T, 3, TFTSpec(width=D, **alone))
