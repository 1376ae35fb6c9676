"""Every network on XLA: the numbers of eager CPU."""

import numpy as np
import pytest
import torch

from ml_factory.training.loop import run_training_loop
from ml_factory.training.spec import TrainSpec
from tests.models.cases import WITHOUT_GRADIENT, felt
from tests.xla.side_by_side import BY_ID, IDENTITY, Rows, device_of

ROWS = 16


def gradients(case, kind: str):
    """Loss of 16 rows and each parameter's gradient, without dropout."""
    device = device_of(kind)
    network, rows = device.to_device(case.build(dropout=0.0)), Rows(case, device, ROWS)
    network.train()
    total, weight = rows.loss(network, rows(np.arange(ROWS)))
    loss = total / weight
    loss.backward()
    device.mark_step("train")
    return loss.item(), {name: p.grad.cpu() for name, p in network.named_parameters()}


@pytest.mark.parametrize("name", BY_ID)
def test_network_on_xla_first_loss_and_gradients_equal_eager_cpu(name):
    loss, expected = gradients(BY_ID[name], "cpu")
    ours, found = gradients(BY_ID[name], "xla")
    assert ours == pytest.approx(loss, rel=1e-6)
    for parameter, gradient in expected.items():
        if not parameter.endswith(WITHOUT_GRADIENT.get(BY_ID[name].name, ("none",))):
            assert (found[parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter


def twenty_steps(case, kind: str) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses, the weights that feel them, and what batch norms remember of their inputs' variance."""
    device = device_of(kind)
    network, rows = case.build(dropout=0.0), Rows(case, device, ROWS)
    spec = TrainSpec(epochs=20, batch=ROWS, lr=1e-4, warmup=0.0)
    result = run_training_loop(network, ROWS, rows, rows.loss, spec, device, identity=IDENTITY)
    # What never feels the loss but for rounding goes its own way in each, as far as others: Adam divides by its size.
    moved = [felt(case, name, p.detach().cpu()) for name, p in network.named_parameters()]
    spread = [value.cpu() for name, value in network.named_buffers() if name.endswith("running_var")]
    return [row["train_loss"] for row in result.history], torch.cat(moved), torch.cat([torch.ones(1), *spread])


@pytest.mark.parametrize("name", [name for name in BY_ID if name.endswith("classes")])
def test_network_on_xla_20_training_steps_equal_eager_cpu(name):
    losses, weights, spread = twenty_steps(BY_ID[name], "cpu")
    ours, found, remembered = twenty_steps(BY_ID[name], "xla")
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert (found - weights).norm() <= 1e-5 * weights.norm()
    np.testing.assert_allclose(remembered, spread, rtol=1e-4)
