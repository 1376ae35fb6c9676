"""Every network on XLA: the numbers of eager CPU."""

import numpy as np
import pytest
import torch

from ml_factory.training.loop import run_training_loop
from ml_factory.training.spec import TrainSpec
from tests.xla.side_by_side import BY_NAME, IDENTITY, Rows, device_of

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


@pytest.mark.parametrize("name", BY_NAME)
def test_network_on_xla_first_loss_and_gradients_equal_eager_cpu(name):
    loss, expected = gradients(BY_NAME[name], "cpu")
    ours, found = gradients(BY_NAME[name], "xla")
    assert ours == pytest.approx(loss, rel=1e-6)
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter


def twenty_steps(case, kind: str) -> tuple[list[float], torch.Tensor]:
    """Losses, and the weights after them."""
    device = device_of(kind)
    network, rows = case.build(dropout=0.0), Rows(case, device, ROWS)
    spec = TrainSpec(epochs=20, batch=ROWS, lr=1e-4, warmup=0.0)
    result = run_training_loop(network, ROWS, rows, rows.loss, spec, device, identity=IDENTITY)
    moved = [p.detach().cpu().flatten() for p in network.parameters()]
    return [row["train_loss"] for row in result.history], torch.cat(moved)


@pytest.mark.parametrize("name", BY_NAME)
def test_network_on_xla_20_training_steps_equal_eager_cpu(name):
    losses, weights = twenty_steps(BY_NAME[name], "cpu")
    ours, found = twenty_steps(BY_NAME[name], "xla")
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert (found - weights).norm() <= 1e-5 * weights.norm()
