"""Every network: what the contract asks of a forward pass."""

import pytest
import torch

from tests.models.cases import CASES, CLASSES

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@every
def test_network_forward_has_expected_shape_and_keeps_inputs(case):
    x_BTF = case.inputs(7)
    before_BTF = x_BTF.clone()
    y_BC = case.build()(x_BTF)
    assert y_BC.shape == (7, CLASSES) and torch.isfinite(y_BC).all() and y_BC.dtype == torch.float32
    assert torch.equal(before_BTF, x_BTF)


@every
def test_network_gradient_reaches_every_parameter_and_input(case):
    network = case.build(dropout=0.0).train().double()  # so that no rounding looks like a gradient
    x_BTF = case.inputs(9).double().requires_grad_()
    y_BC = network(x_BTF)
    (y_BC * torch.randn_like(y_BC)).sum().backward()
    assert not {name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-12}
    assert x_BTF.grad.abs().sum() > 0


@every
def test_network_overfits_one_batch(case):
    network, x_BTF, target_B = case.build(dropout=0.0).train(), case.inputs(12), torch.arange(12) % CLASSES
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x_BTF), target_B)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@every
def test_network_output_of_a_row_does_not_depend_on_other_rows(case):
    network, x_BTF = case.build(dropout=0.0), case.inputs(8)
    for mode in (network.eval, network.train):
        with torch.no_grad():
            mode()
            torch.testing.assert_close(network(x_BTF[3:4]), network(x_BTF)[3:4], atol=1e-5, rtol=1e-5)


@every
def test_network_dropout_is_active_in_training_only(case):
    network, x_BTF = case.build(dropout=0.5), case.inputs(6)
    with torch.no_grad():
        assert torch.equal(network.eval()(x_BTF), network(x_BTF))
        assert not torch.equal(network.train()(x_BTF), network(x_BTF))
