"""The loop on a network small enough to follow by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.errors import FactoryError
from ml_factory.training.device import Device
from ml_factory.training.loop import Order, fit
from ml_factory.training.spec import TrainSpec

CPU = Device("cpu", 1)
IDENTITY = {"model": "line", "settings": {}, "data": {}}


class Memory:
    """Checkpoints that remember every save; `due` says what it is told."""

    def __init__(self, due=True):
        self.saves, self.is_due = [], due

    def due(self):
        return self.is_due

    def save(self, state, metrics=None, force=False):
        self.saves.append((state["step"], state["done"], force))

    def load(self):
        return None


def line(seen: list | None = None, rows: int = 10):
    """A linear network, its batches (noting their positions) and a squared loss."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    x = torch.randn(rows, 2)
    y = x @ torch.tensor([[1.0], [-2.0]])

    def batch(positions):
        if seen is not None:
            seen.append(positions.tolist())
        return x[torch.from_numpy(positions)], y[torch.from_numpy(positions)]

    def loss(net, pair):
        return (net(pair[0]) - pair[1]).square().sum(), torch.tensor(float(len(pair[0])))

    return network, batch, loss


def run(spec: TrainSpec, seen=None, rows=10, **more):
    network, batch, loss = line(seen, rows)
    return network, fit(network, rows, batch, loss, spec, CPU, identity=IDENTITY, **more)


def test_each_epoch_is_a_permutation_and_the_remainder_opens_the_next():
    order = Order(10, 4, seed=3)
    stream = np.concatenate([order.positions(step) for step in range(10)])
    assert len(stream) == 40
    for epoch in range(4):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(stream[10 * epoch : 10 * epoch + 10]) for epoch in range(4)}) == 4
    assert [order.steps_until(epoch) for epoch in range(5)] == [0, 2, 5, 7, 10]


def test_a_batch_is_a_function_of_the_step_alone():
    one, other = Order(10, 4, seed=3), Order(10, 4, seed=3)
    forward = [one.positions(step).tolist() for step in range(9)]
    assert [other.positions(step).tolist() for step in reversed(range(9))] == forward[::-1]
    assert Order(10, 4, seed=4).positions(0).tolist() != forward[0]
    assert all(len(positions) == 4 for positions in forward)
    assert sorted(Order(3, 8, seed=0).positions(1)) == [0, 1, 2]


def test_all_batches_are_full():
    seen = []
    _, result = run(TrainSpec(epochs=3, batch=4, seed=3), seen)
    assert [len(positions) for positions in seen] == [4] * 7
    assert len(result.history) == 3 and result.best_epoch == 3 and not result.stopped_early


def test_it_learns_and_reports_the_weighted_mean_loss():
    network, result = run(TrainSpec(epochs=200, batch=5, lr=0.05, weight_decay=0.0, clip=100.0))
    torch.testing.assert_close(network.weight.data, torch.tensor([[1.0, -2.0]]), atol=0.01, rtol=0)
    assert result.history[-1]["train_loss"] < 1e-4
    network, batch, loss = line()
    expected = loss(network, batch(np.arange(10)))[0].item() / 10
    first = fit(network, 10, batch, loss, TrainSpec(epochs=1, batch=10, lr=0.5), CPU, identity=IDENTITY)
    assert first.history[0]["train_loss"] == pytest.approx(expected)


def test_the_best_epochs_weights_come_back():
    losses = iter([3.0, 1.0, 2.0, 1.5, 0.5])
    weights = []
    network, batch, loss = line()

    def validate():
        weights.append(network.weight.detach().clone())
        return next(losses)

    spec = TrainSpec(epochs=5, batch=5, lr=0.1, patience=2)
    result = fit(network, 10, batch, loss, spec, CPU, identity=IDENTITY, validate=validate)
    assert result.best_epoch == 2 and result.stopped_early and len(result.history) == 4
    assert torch.equal(network.weight, weights[1]) and not torch.equal(network.weight, weights[3])
    assert not network.training


def test_saves_at_epochs_when_due_and_always_at_the_end():
    saves = Memory()
    run(TrainSpec(epochs=3, batch=5), checkpoints=saves)
    assert saves.saves == [(2, False, False), (4, False, False), (6, True, True)]
    never = Memory(due=False)
    run(TrainSpec(epochs=3, batch=5), checkpoints=never)
    assert never.saves == [(6, True, True)]


def test_saves_in_mid_epoch_once_time_has_passed():
    saves = Memory()
    run(TrainSpec(epochs=1, batch=2, save_seconds=0.0), checkpoints=saves)
    assert [step for step, _, _ in saves.saves] == [1, 2, 3, 4, 5, 5]


def test_the_whole_gradient_is_clipped():
    network, batch, loss = line()
    before = network.weight.detach().clone(), network.bias.detach().clone()
    norms = []
    network.weight.register_hook(lambda grad: norms.append(grad.norm().item()))
    spec = TrainSpec(epochs=1, batch=10, clip=1e-9, warmup=0.0, lr=0.1, weight_decay=0.0)
    fit(network, 10, batch, loss, spec, CPU, identity=IDENTITY)
    # Adam divides by |g| + 1e-8: a gradient of 1e-9 moves a tenth of the rate at most, an unclipped one all of it.
    assert norms[0] > 0.1
    moved = torch.cat([(network.weight - before[0]).flatten(), network.bias - before[1]]).abs().max()
    assert 0 < moved < 0.011


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_and_is_never_saved(where):
    network, batch, loss = line()
    steps = []

    def broken(net, pair):
        total, weight = loss(net, pair)
        steps.append(1)
        if len(steps) == 4:
            total = total * float("nan") if where == "loss" else total + (net.weight * 0).sqrt().sum()
        return total, weight

    saves = Memory()
    spec = TrainSpec(epochs=3, batch=5, save_seconds=0.0)
    with pytest.raises(FactoryError, match=r"step 3, epoch 2.*lower lr"):
        fit(network, 10, batch, broken, spec, CPU, identity=IDENTITY, checkpoints=saves)
    assert max(step for step, _, _ in saves.saves) == 3


def test_the_step_asks_the_device_for_nothing(monkeypatch):
    """No number leaves the device inside an epoch: the fence that keeps accelerators busy."""
    network, batch, loss = line()
    asked = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name):
            asked.append((name, len(steps)))
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    steps = []

    def counting(net, pair):
        steps.append(1)
        return loss(net, pair)

    fit(network, 10, batch, counting, TrainSpec(epochs=2, batch=2), CPU, identity=IDENTITY)
    assert asked and {at for _, at in asked} == {5, 10}
