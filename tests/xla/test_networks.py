"""Every network on XLA: the numbers of eager CPU."""

import numpy as np
import pytest
import torch

from ml_factory.training.loop import fit
from ml_factory.training.spec import TrainSpec
from tests.models.cases import WITHOUT_GRADIENT
from tests.xla.side_by_side import BY_ID, IDENTITY, Rows, device_of

ROWS = 16


def gradients(case, kind: str):
    """Loss of 16 rows and each parameter's gradient, without dropout."""
    device = device_of(kind)
    network, rows = device.place(case.build(dropout=0.0)), Rows(case, device, ROWS)
    network.train()
    total, weight = rows.loss(network, rows(np.arange(ROWS)))
    loss = total / weight
    loss.backward()
    device.flush("train")
    return loss.item(), {name: p.grad.cpu() for name, p in network.named_parameters()}


@pytest.mark.parametrize("name", BY_ID)
def test_first_loss_and_gradients_are_eagers(name):
    loss, expected = gradients(BY_ID[name], "cpu")
    ours, found = gradients(BY_ID[name], "xla")
    assert ours == pytest.approx(loss, rel=1e-6)
    for parameter, gradient in expected.items():
        if not parameter.endswith(WITHOUT_GRADIENT.get(BY_ID[name].name, ("none",))):
            assert (found[parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter


def twenty_steps(case, kind: str) -> tuple[list[float], torch.Tensor]:
    device = device_of(kind)
    network, rows = case.build(dropout=0.0), Rows(case, device, ROWS)
    spec = TrainSpec(epochs=20, batch=ROWS, lr=1e-4, warmup=0.0)
    result = fit(network, ROWS, rows, rows.loss, spec, device, identity=IDENTITY)
    # What never feels the loss but for rounding goes its own way in each.
    silent = WITHOUT_GRADIENT.get(case.name, ("none",))
    moved = [p.detach().cpu().flatten() for name, p in network.named_parameters() if not name.endswith(silent)]
    weights = torch.cat(moved)
    return [row["train_loss"] for row in result.history], weights


@pytest.mark.parametrize("name", [name for name in BY_ID if name.endswith("classes")])
def test_twenty_steps_are_eagers(name):
    losses, weights = twenty_steps(BY_ID[name], "cpu")
    ours, found = twenty_steps(BY_ID[name], "xla")
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    # Batch norm makes many gradients 0 but for rounding, and Adam walks as far along those as along any other.
    limit = 1e-3 if name.startswith("patchtst-batch") else 1e-5
    assert (found - weights).norm() <= limit * weights.norm()
