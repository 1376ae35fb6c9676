"""The TFT's batched variables against one network a variable, written out; what its attention may see."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contract import doors

B, T, V, D = 3, 7, 5, 8


class Literal(nn.Module):
    """Section 4.2 as it stands: an embedding and a gated residual network for each variable, in a loop."""

    def __init__(self, ours: doors.VariableSelectionNetwork):
        super().__init__()
        self.ours = ours

    def forward(self, x_BTV):
        ours = self.ours
        embedded = [x_BTV[..., v : v + 1] * ours.scale_VD[v] + ours.shift_VD[v] for v in range(V)]
        weight_BTV = ours.joint(torch.cat(embedded, dim=-1)).softmax(dim=-1)
        chosen_BTD = 0
        for v, one in enumerate(embedded):
            inner = functional.elu(functional.linear(one, ours.outer_VDD[v], ours.outer_VD[v]))
            inner = functional.linear(inner, ours.inner_VDD[v], ours.inner_VD[v])
            passed, door = functional.linear(inner, ours.gate_VGD[v], ours.gate_VG[v]).chunk(2, dim=-1)
            printed = functional.layer_norm(
                one + passed * door.sigmoid(), (D,), ours.norm_VD[v], ours.bias_VD[v], eps=doors.EPS
            )
            chosen_BTD = chosen_BTD + weight_BTV[..., v : v + 1] * printed
        return chosen_BTD, weight_BTV


def selection():
    torch.manual_seed(0)
    ours = doors.VariableSelectionNetwork(V, D, dropout=0.0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return ours


@pytest.mark.parametrize("batch", [B, 8_000])
def test_variable_selection_batched_equals_one_network_per_variable(batch):
    """Outputs and gradients; also of so many rows that a CPU takes them in pieces."""
    ours, x_BTV = selection().double(), torch.randn(batch, T, V).double()
    direction_BTD, gradients = torch.randn(batch, T, D).double(), []
    outputs = []
    for network in (ours, Literal(ours)):
        chosen_BTD, weight_BTV = network(x_BTV)
        outputs.append((chosen_BTD, weight_BTV))
        gradients.append(torch.autograd.grad((chosen_BTD * direction_BTD).sum(), list(ours.parameters())))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert torch.allclose(outputs[0][1].sum(-1), torch.ones(batch, T).double())


def test_variable_selection_of_one_variable_has_weight_1():
    chosen_BTD, weight_BTV = doors.VariableSelectionNetwork(1, D, 0.0)(torch.randn(B, T, 1))
    assert (weight_BTV == 1).all() and chosen_BTD.shape == (B, T, D)


def test_gated_residual_network_equals_paper_equations():
    """Equations 2 to 5 without a context, in NumPy's terms."""
    torch.manual_seed(0)
    grn = doors.GatedResidualNetwork(4, D, outputs=3)
    x = torch.randn(6, 4)
    eta2 = functional.elu(x @ grn.outer.weight.T + grn.outer.bias)
    eta1 = eta2 @ grn.inner.weight.T + grn.inner.bias
    both = eta1 @ grn.gate.linear.weight.T + grn.gate.linear.bias
    total = x @ grn.skip.weight.T + grn.skip.bias + both[:, :3] / (1 + torch.exp(-both[:, 3:]))
    centred = total - total.mean(1, keepdim=True)
    expected = centred / (centred.square().mean(1, keepdim=True) + doors.EPS).sqrt()
    torch.testing.assert_close(grn(x), expected, atol=1e-5, rtol=1e-5)


def test_interpretable_attention_equals_mean_of_heads():
    """Equations 13 to 16, head by head: the last step asks, and the shares sum to 1."""
    torch.manual_seed(0)
    layer, x_BTD = doors.InterpretableMultiHeadAttention(D, 2), torch.randn(B, 9, D)
    mixed_BD, share_BT = layer(x_BTD)
    shares = []
    for head in range(2):
        k = slice(head * D // 2, (head + 1) * D // 2)
        query_BK, key_BTK = x_BTD[:, -1] @ layer.query.weight[k].T, x_BTD @ layer.key.weight[k].T
        shares.append(((key_BTK @ query_BK[..., None])[..., 0] / (D / 2) ** 0.5).softmax(dim=-1))
    torch.testing.assert_close(share_BT, sum(shares) / 2, atol=1e-6, rtol=1e-5)
    value_BTK = x_BTD @ layer.value.weight.T
    expected = (share_BT[..., None] * value_BTK).sum(1) @ layer.out.weight.T
    torch.testing.assert_close(mixed_BD, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(share_BT.sum(-1), torch.ones(B))


@pytest.mark.parametrize(
    ("gate", "silent"),
    [
        ("local", {"encoder"}),
        ("attended", {"attention"}),
        ("decoded", {"enrich", "attention", "attended", "feed"}),
    ],
)
def test_tft_closed_gate_blocks_gradient_to_skipped_layers(gate, silent):
    """Figure 2: each gate can skip its part, the last one all that comes after the LSTM."""
    torch.manual_seed(0)
    network = doors.TFT(V, T, 3, doors.TFTSpec(width=D)).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # else norms with bias 0 hide a part
        door = getattr(network, gate).linear
        door.weight[D:], door.bias[D:] = 0.0, -1e3  # sigmoid of it is 0
    y_BC = network(torch.randn(B, T, V).double())
    (y_BC * torch.randn_like(y_BC)).sum().backward()
    felt = {
        name for name, part in network.named_children()
        if any(p.grad is not None and p.grad.abs().max() > 1e-12 for p in part.parameters())
    }  # fmt: skip
    parts = {name for name, part in network.named_children() if any(True for _ in part.parameters())}
    # A closed gate still has its norm.
    assert felt == parts - silent and gate in felt


def test_tft_explain_returns_shares_that_sum_to_1():
    reported = doors.TFT(V, T, 3, doors.TFTSpec(width=D)).explain(torch.randn(B, T, V))
    for share, shape in zip(reported, ((B, T, V), (B, T)), strict=True):
        assert share.shape == shape and not share.requires_grad
        torch.testing.assert_close(share.sum(-1), torch.ones(shape[:-1]), atol=1e-5, rtol=1e-5)
