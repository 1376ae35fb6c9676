"""The loop on a network small enough to follow by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.checkpoints.manager import REFUSED
from ml_factory.errors import FactoryError
from ml_factory.progress import record_progress
from ml_factory.storage.serialization import serialize_state
from ml_factory.training.device import Device
from ml_factory.training.loop import Validation, run_training_loop, take_training_step
from ml_factory.training.sampler import BatchSampler, StreamSampler
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState

CPU = Device("cpu", 1)
IDENTITY = {"model": "line", "settings": {}, "data": {}}


class EarlyStoppingState:
    """Checkpoints that remember every save; `due` says what it is told."""

    def __init__(self, due=True):
        self.saves, self.is_due = [], due

    def due(self):
        return self.is_due

    def due_in(self):
        return 0.0 if self.is_due else 600.0

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
    return network, run_training_loop(network, rows, batch, loss, spec, CPU, identity=IDENTITY, **more)


def test_fit_every_batch_is_full():
    seen = []
    _, result = run(TrainSpec(epochs=3, batch=4, seed=3), seen)
    assert [len(positions) for positions in seen] == [4] * 7
    assert len(result.history) == 3 and result.best_epoch == 3 and not result.stopped_early


def test_fit_reports_steps_within_an_epoch_and_keeps_metrics_of_the_validation():
    class Steps(list):
        def log_steps(self, epoch, step, loss):
            self.append((epoch, step, loss))

        def __call__(self, epoch, metrics):
            self.append((epoch, metrics["accuracy"]))

    steps = Steps()
    validation = Validation(lambda: 1.0, metrics=lambda: {"accuracy": 0.5})
    spec = TrainSpec(epochs=2, batch=5, log_steps=1, patience=0)
    _, result = run(spec, callbacks=[steps], validation=validation)
    assert [one[:2] for one in steps] == [(1, 1), (1, 2), (1, 0.5), (2, 1), (2, 2), (2, 0.5)]
    assert np.mean([steps[0][2], steps[1][2]]) == pytest.approx(result.history[0]["train_loss"])
    assert [one["accuracy"] for one in result.history] == [0.5, 0.5]


def test_fit_with_a_sampler_of_the_batch_gets_its_positions():
    seen, (network, batch, loss) = [], line(rows=10)

    def stream(positions):
        seen.append(positions.tolist())
        return batch(positions % 10)

    stream.sampler = StreamSampler
    run_training_loop(network, 10, stream, loss, TrainSpec(epochs=2, batch=4), CPU, identity=IDENTITY)
    assert [one for part in seen for one in part] == list(range(20))


def test_fit_converges_and_reports_weighted_mean_loss():
    network, result = run(TrainSpec(epochs=200, batch=5, lr=0.05, weight_decay=0.0, clip=100.0))
    torch.testing.assert_close(network.weight.data, torch.tensor([[1.0, -2.0]]), atol=0.01, rtol=0)
    assert result.history[-1]["train_loss"] < 1e-4
    network, batch, loss = line()
    expected = loss(network, batch(np.arange(10)))[0].item() / 10
    first = run_training_loop(network, 10, batch, loss, TrainSpec(epochs=1, batch=10, lr=0.5), CPU, identity=IDENTITY)
    assert first.history[0]["train_loss"] == pytest.approx(expected)


def test_fit_restores_weights_of_best_epoch():
    losses = iter([3.0, 1.0, 2.0, 1.5, 0.5])
    weights = []
    network, batch, loss = line()

    def validate():
        weights.append(network.weight.detach().clone())
        return next(losses)

    spec = TrainSpec(epochs=5, batch=5, lr=0.1, patience=2)
    result = run_training_loop(network, 10, batch, loss, spec, CPU, identity=IDENTITY, validation=Validation(validate))
    assert result.best_epoch == 2 and result.stopped_early and len(result.history) == 4
    assert torch.equal(network.weight, weights[1]) and not torch.equal(network.weight, weights[3])
    assert not network.training


def test_fit_equal_losses_keep_first_epoch_and_patience_starts_at_first_epoch():
    """An equal loss is no better: with <= the third epoch would be kept, and patience would begin again."""
    losses, weights = iter([2.0, 1.0, 1.0, 1.0, 1.0]), []
    network, batch, loss = line()

    def validate():
        weights.append(network.weight.detach().clone())
        return next(losses)

    spec = TrainSpec(epochs=5, batch=5, lr=0.1, patience=2)
    result = run_training_loop(network, 10, batch, loss, spec, CPU, identity=IDENTITY, validation=Validation(validate))
    assert result.best_epoch == 2 and result.stopped_early and len(result.history) == 4
    assert torch.equal(network.weight, weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_fit_non_finite_validation_loss_raises_error(loss):
    saves = EarlyStoppingState()
    with pytest.raises(FactoryError, match=rf"validation rows is not finite \[epoch 2\].*got {loss}"):
        run(TrainSpec(epochs=3, batch=5), validation=Validation(iter([1.0, loss]).__next__), checkpoints=saves)
    assert [step for step, _, _ in saves.saves] == [2]


def test_fit_saves_at_due_epochs_and_at_end():
    saves = EarlyStoppingState()
    run(TrainSpec(epochs=3, batch=5), checkpoints=saves)
    assert saves.saves == [(2, False, False), (4, False, False), (6, True, True)]
    never = EarlyStoppingState(due=False)
    run(TrainSpec(epochs=3, batch=5), checkpoints=never)
    assert never.saves == [(6, True, True)]


def test_fit_saves_in_mid_epoch_after_save_seconds():
    saves = EarlyStoppingState()
    run(TrainSpec(epochs=1, batch=2, save_seconds=0.0), checkpoints=saves)
    assert [step for step, _, _ in saves.saves] == [1, 2, 3, 4, 5, 5]


def test_fit_after_refused_save_considers_next_without_pause():
    refused = EarlyStoppingState()
    refused.save = lambda *given, **named: EarlyStoppingState.save(refused, *given, **named) or {"status": REFUSED}
    run(TrainSpec(epochs=2, batch=2, save_seconds=600.0), checkpoints=refused)
    assert [step for step, _, _ in refused.saves] == [5, 6, 7, 8, 9, 10, 10]


def test_fit_progress_line_shows_time_to_next_save(monkeypatch, caplog):
    """The timer of the checkpoints is later than our own pause of a minute, and the other way round."""
    monkeypatch.setattr("ml_factory.training.loop.SECONDS_BETWEEN", 0.0)
    caplog.set_level("INFO", "ml_factory.training")
    run(TrainSpec(epochs=1, batch=5, log_steps=1), checkpoints=EarlyStoppingState(due=False))
    assert "next save in 10 min" in caplog.messages[-1]
    run(TrainSpec(epochs=1, batch=5, log_steps=1, save_seconds=1200.0), checkpoints=EarlyStoppingState())
    assert "next save in 20 min" in caplog.messages[-1]


def broken_at(calls: set[int], where: str, loss):
    """The loss, not finite (or its gradient) at those calls, counted from 1; and the list of calls."""
    received = []

    def broken(net, pair):
        total, weight = loss(net, pair)
        received.append(1)
        if len(received) in calls:
            total = total * float("nan") if where == "loss" else total + (net.weight * 0).sqrt().sum()
        return total, weight

    return broken, received


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_fit_non_finite_step_raises_and_is_never_saved(where):
    network, batch, loss = line()
    broken, received = broken_at({4}, where, loss)
    saves = EarlyStoppingState()
    spec = TrainSpec(epochs=3, batch=2, save_seconds=0.0, seed=3)
    with pytest.raises(FactoryError, match=r"step 4, epoch 1, batch of rows (\d, ){2}….*lower lr") as error:
        run_training_loop(network, 10, batch, broken, spec, CPU, identity=IDENTITY, checkpoints=saves)
    # Steps 1 to 3 are saved; 4 is bad, and 5 ends the epoch.
    assert [step for step, _, _ in saves.saves] == [1, 2, 3] and len(received) == 5
    rows = BatchSampler(10, 2, seed=3).positions(3)
    assert ", ".join(map(str, rows)) in str(error.value)


def test_fit_non_finite_step_is_seen_at_next_check_of_long_epoch():
    network, batch, loss = line()
    broken, received = broken_at({2}, "loss", loss)
    spec = TrainSpec(epochs=1, batch=1, log_steps=3)
    with pytest.raises(FactoryError, match="step 2, epoch 1"):
        run_training_loop(network, 10, batch, broken, spec, CPU, identity=IDENTITY)
    assert len(received) == 3


def test_take_step_with_non_finite_gradient_leaves_state_unchanged():
    network, batch, loss = line()
    run = TrainingState(network, 10, TrainSpec(batch=5), CPU, IDENTITY)
    take_training_step(run, batch, loss)
    before = run.state()
    broken, _ = broken_at({1}, "gradient", loss)
    take_training_step(run, batch, broken)
    after = run.state()
    for part in ("network", "totals"):
        assert serialize_state({"": after[part]}) == serialize_state({"": before[part]})
    assert serialize_state(after["optimizer"]) == serialize_state(before["optimizer"])
    assert int(run.flag[0]) == 1


def test_fit_reads_device_values_at_epoch_ends_only(monkeypatch):
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

    run_training_loop(network, 10, batch, counting, TrainSpec(epochs=2, batch=2), CPU, identity=IDENTITY)
    assert asked and {at for _, at in asked} == {5, 10}


def test_fit_with_accumulation_prefetches_each_micro_batch_before_compute():
    network, rows_of, loss = line()
    log = []

    def batch(positions):
        log.append(("asked", positions.tolist()))
        return rows_of(positions)

    def noting(net, pair):
        log.append(("computed",))
        return loss(net, pair)

    batch.prefetch = lambda positions: log.append(("told", positions.tolist()))
    run_training_loop(network, 8, batch, noting, TrainSpec(epochs=2, batch=4, accumulate=2), CPU, identity=IDENTITY)
    asked = [what[1] for what in log if what[0] == "asked"]
    reported = [what[1] for what in log if what[0] == "told"]
    assert len(asked) == 2 * 2 * 2
    # All but the first of each epoch, each of them right behind the call before it: the computing comes after.
    assert reported == asked[1:4] + asked[5:8]
    steps = [what[0] for what in log]
    assert steps == (["asked", "told", "computed"] * 3 + ["asked", "computed"]) * 2


def test_fit_resumed_callback_receives_history_of_earlier_epochs():
    class Curves:
        def __init__(self):
            self.before, self.now = [], []

        def remember(self, history):
            self.before = [epoch["epoch"] for epoch in history]

        def __call__(self, epoch, metrics):
            self.now.append(epoch)

    class Stopped(EarlyStoppingState):
        def save(self, state, metrics=None, force=False):
            super().save(state, metrics, force)
            self.state = state
            if len(state["memory"]["history"]) == 2:
                raise KeyboardInterrupt

    memory, curves = Stopped(), Curves()
    with pytest.raises(KeyboardInterrupt):
        run(TrainSpec(epochs=4, batch=5), checkpoints=memory, callbacks=(curves,))
    assert (curves.before, curves.now) == ([], [1])
    memory.load, memory.save, again = (lambda: {"state": memory.state}), (lambda *args, **more: None), Curves()
    run(TrainSpec(epochs=4, batch=5), checkpoints=memory, callbacks=(again, lambda epoch, metrics: None))
    assert (again.before, again.now) == ([1, 2], [3, 4])


def test_fit_reports_progress_in_rows():
    with record_progress() as ended:
        run(TrainSpec(epochs=3, batch=4))
    (training,) = [one for one in ended if one.name == "training"]
    assert (training.rows, training.done, training.start) == (28, 28, 0)


def test_fit_loss_with_step_numbers_gets_those_of_each_step_on_device():
    network, batch, squared = line()
    seen = []

    class Scheduled:
        def step_numbers(self, step, steps):
            return torch.tensor([step / steps])

        def __call__(self, net, data):
            seen.append(data[-1].item())
            return squared(net, data[:-1])

    spec = TrainSpec(epochs=2, batch=4, accumulate=2)
    scheduled = run_training_loop(network, 10, batch, Scheduled(), spec, CPU, identity=IDENTITY)
    assert seen == [pytest.approx(step / 5) for step in range(5) for _ in range(2)]
    plain, batch, squared = line()
    result = run_training_loop(plain, 10, batch, squared, spec, CPU, identity=IDENTITY)
    assert [row["train_loss"] for row in result.history] == [row["train_loss"] for row in scheduled.history]
    assert torch.equal(plain.weight, network.weight)
