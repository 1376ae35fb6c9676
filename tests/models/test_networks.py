"""Every network with every head: what the contract asks of a forward pass."""

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.models.heads import ForecastTask
from tests.models.cases import CASES, NOT_ALONE_IN_TRAINING, POINTS, QUANTILES, WITHOUT_GRADIENT, F, T

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@every
def test_network_forward_has_expected_shape_and_keeps_inputs(case):
    inputs = case.inputs(7)
    before = {name: value.clone() for name, value in inputs.items()}
    y = case.build()(**inputs)
    assert y.shape == case.shape(7) and torch.isfinite(y).all() and y.dtype == torch.float32
    assert all(torch.equal(value, inputs[name]) for name, value in before.items())


@every
def test_network_gradient_reaches_every_parameter_and_input(case):
    network = case.build(dropout=0.0).train().double()  # so that no rounding looks like a gradient
    inputs = {name: value.double().requires_grad_() for name, value in case.inputs(9).items()}
    y = network(**inputs)
    (y * torch.randn_like(y)).sum().backward()
    lost = {name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-12}
    excepted = WITHOUT_GRADIENT.get(case.name, ())
    assert lost == {name for name, _ in network.named_parameters() if name.endswith(excepted or "\n")}
    for name, value in inputs.items():
        assert value.grad.abs().sum() > 0, name


@every
def test_network_overfits_one_batch(case):
    network, inputs = case.build(dropout=0.0).train(), case.inputs(12)
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(case.shape(12)[:3], generator=draw) if case.task != 3 else torch.arange(12) % 3
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        y = network(**inputs)
        if case.task == 3:
            loss = torch.nn.functional.cross_entropy(y, target)
        else:
            loss = (y - (target if case.task == POINTS else target[..., None])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Channels with one network between them cannot tell two rows by heart as fast as one code for all can.
    assert losses[-1] < (0.15 if case.task == 3 else 0.6) * losses[0]


@every
def test_network_output_of_a_row_does_not_depend_on_other_rows(case):
    network, inputs = case.build(dropout=0.0).eval(), case.inputs(8)
    alone = {name: value[3:4] for name, value in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(network(**alone), network(**inputs)[3:4], atol=1e-5, rtol=1e-5)
        network.train()
        gap = (network(**alone) - network(**inputs)[3:4]).abs().max()
    assert gap > 1e-3 if case.name in NOT_ALONE_IN_TRAINING else gap < 1e-5


@every
def test_network_same_seed_repeats_bits_and_other_seed_differs(case):
    inputs = case.inputs(5)
    with torch.no_grad():
        y = [case.build(seed).eval()(**inputs) for seed in (0, 0, 1)]
    assert torch.equal(y[0], y[1]) and not torch.equal(y[0], y[2])


@every
def test_network_load_state_dict_gives_same_output(case):
    inputs, old, new = case.inputs(5), case.build(0).eval(), case.build(1).eval()
    new.load_state_dict(old.state_dict())
    with torch.no_grad():
        assert torch.equal(old(**inputs), new(**inputs))


@every
def test_network_dropout_is_active_in_training_only(case):
    network, inputs = case.build(dropout=0.5), case.inputs(6)
    with torch.no_grad():
        assert torch.equal(network.eval()(**inputs), network(**inputs))
        assert not torch.equal(network.train()(**inputs), network(**inputs))


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if "patchtst" in case.name or case.name == "itransformer"
        if case.task in (POINTS, QUANTILES)
    ],
    ids=lambda case: case.id,
)
def test_network_with_instance_norm_forecasts_follow_input_level_and_scale(case):
    """Reversible instance norm: a x + b in, a y + b out."""
    network, x_BTF = case.build().eval(), case.inputs(5)["x_BTF"]
    with torch.no_grad():
        torch.testing.assert_close(network(40 * x_BTF + 7), 40 * network(x_BTF) + 7, atol=1e-2, rtol=1e-3)


def test_forecast_invalid_values_raise_settings_error():
    for settings, where in (({"steps": 0}, "steps"), ({"steps": 3, "channels": -1}, "channels"),
                            ({"steps": 3, "quantiles": (0.5, 0.1)}, "quantiles"),
                            ({"steps": 3, "quantiles": (0.0, 0.1)}, "quantiles")):  # fmt: skip
        with pytest.raises(SettingsError, match=rf"\[{where}\]"):
            ForecastTask(**settings)
    with pytest.raises(SettingsError, match=rf"\[channels\].*wanted <= {F}"):
        ForecastTask(2, channels=T).channel_count(F)
