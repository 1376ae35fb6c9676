"""The loop on a network small enough to follow by hand."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FactoryError, SessionOverError
from tests.contract.doors import (
    BatchSampler,
    StreamSampler,
    TrainingState,
    TrainSpec,
    Validation,
    record_progress,
    run_training_loop,
    serialize_state,
    take_training_step,
)
from tests.contract.test_training_state import CPU
from tests.training.small_run import Kept

IDENTITY = {"model": "line", "settings": {}, "data": {}}


def line():
    """A linear network, batches of its ten rows and a squared loss."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    x = torch.randn(10, 2)
    y = x @ torch.tensor([[1.0], [-2.0]])

    def batch(positions):
        return x[torch.from_numpy(positions)], y[torch.from_numpy(positions)]

    def loss(net, pair):
        return (net(pair[0]) - pair[1]).square().sum(), torch.tensor(float(len(pair[0])))

    return network, batch, loss


def run(spec: TrainSpec, **more):
    network, batch, loss = line()
    return run_training_loop(network, 10, batch, loss, spec, CPU, identity=IDENTITY, **more)


def test_fit_reports_steps_within_an_epoch_and_keeps_metrics_of_the_validation():
    class Steps(list):
        def log_steps(self, epoch, step, loss):
            self.append((epoch, step, loss))

        def __call__(self, epoch, metrics):
            self.append((epoch, metrics["accuracy"]))

    steps = Steps()
    validation = Validation(lambda: 1.0, metrics=lambda: {"accuracy": 0.5})
    spec = TrainSpec(epochs=2, batch=5, log_steps=1, patience=0)
    result = run(spec, callbacks=[steps], validation=validation)
    assert [one[:2] for one in steps] == [(1, 1), (1, 2), (1, 0.5), (2, 1), (2, 2), (2, 0.5)]
    assert np.mean([steps[0][2], steps[1][2]]) == pytest.approx(result.history[0]["train_loss"])
    assert [one["accuracy"] for one in result.history] == [0.5, 0.5]


def test_fit_with_a_sampler_of_the_batch_gets_its_positions():
    seen, (network, batch, loss) = [], line()

    def stream(positions):
        seen.extend(positions.tolist())
        return batch(positions % 10)

    stream.sampler = StreamSampler
    with record_progress() as ended:
        run_training_loop(network, 10, stream, loss, TrainSpec(epochs=2, batch=4), CPU, identity=IDENTITY)
    (training,) = [one for one in ended if one.name == "training"]
    assert seen == list(range(20)) and (training.rows, training.done, training.start) == (20, 20, 0)


def test_fit_ends_with_weights_of_first_best_epoch():
    """An equal loss is no better: with <= the third epoch would be kept, and patience would begin again."""
    losses, weights = iter([2.0, 1.0, 1.0, 1.5, 0.5]), []
    network, batch, loss = line()

    def validate():
        weights.append(network.weight.detach().clone())
        return next(losses)

    spec = TrainSpec(epochs=5, batch=5, lr=0.1, patience=2)
    result = run_training_loop(network, 10, batch, loss, spec, CPU, identity=IDENTITY, validation=Validation(validate))
    assert result.best_epoch == 2 and result.stopped_early and len(result.history) == 4
    assert torch.equal(network.weight, weights[1]) and not torch.equal(weights[1], weights[2])
    assert not network.training


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_fit_non_finite_validation_loss_raises_error(loss):
    saves = Kept()
    with pytest.raises(FactoryError, match=rf"validation rows is not finite \[epoch 2\].*got {loss}"):
        run(TrainSpec(epochs=3, batch=5), validation=Validation(iter([1.0, loss]).__next__), checkpoints=saves)
    assert saves.steps == [2]


@pytest.mark.parametrize(
    ("due", "seconds", "steps"), [(True, 60.0, [2, 4, 6]), (False, 0.0, [6]), (True, 0.0, [1, 2, 2, 3, 4, 4, 5, 6, 6])]
)
def test_fit_saves_in_mid_epoch_after_save_seconds_at_epochs_when_due_and_at_end(due, seconds, steps):
    saves = Kept(due=due)
    run(TrainSpec(epochs=3, batch=5, save_seconds=seconds), checkpoints=saves)
    assert saves.steps == steps and saves.last == (True, True)


def fit_of_three_seconds_a_step(folder, *, full: ExitStack | None = None, room_at=0.0, ending_at=999.0) -> list[int]:
    """Fit one epoch of a hundred steps; return the steps at which checkpoints of it were first on the disk.

    full : holds the limit of a full disk, until `room_at` seconds.
    ending_at : seconds at which the session ends.
    """
    (network, rows_of, loss), seconds, saved, full = line(), [0.0], {}, full or ExitStack()

    def batch(positions):
        manager.wait()
        if (last := manager.phase("p").last_save) and last["status"] == "saved":
            saved.setdefault(last["sequence"], int(seconds[0] / 3))
        if seconds[0] >= room_at:
            full.close()
        seconds[0] += 3.0
        return rows_of(positions % 10)

    now = {"clock": lambda: seconds[0], "ending": lambda _: seconds[0] >= ending_at}
    with full, CheckpointManager(folder, run="r", **now) as manager:
        spec = TrainSpec(epochs=1, batch=2)
        run_training_loop(network, 200, batch, loss, spec, CPU, identity=IDENTITY, checkpoints=manager.phase("p"))
    return list(saved.values())


def test_fit_saves_in_mid_epoch_a_minute_after_begin_then_every_two_minutes(tmp_path):
    assert fit_of_three_seconds_a_step(tmp_path) == [20, 60]


def test_fit_saves_in_mid_epoch_within_seconds_after_the_disk_has_room_again(tmp_path, disk_full_beyond):
    """The thread that writes learns of a refusal after `save` has returned."""
    full = ExitStack()
    full.enter_context(disk_full_beyond(100))
    assert fit_of_three_seconds_a_step(tmp_path, full=full, room_at=70.0) == [26, 66]


def test_fit_saves_in_mid_epoch_at_once_when_the_session_ends(tmp_path):
    with pytest.raises(SessionOverError, match="saved and stopped here"):
        fit_of_three_seconds_a_step(tmp_path, ending_at=66.0)
    assert CheckpointManager(tmp_path, run="r").load_latest_checkpoint("p")["state"]["step"] == 22


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
    saves = Kept()
    spec = TrainSpec(epochs=3, batch=2, save_seconds=0.0, seed=3)
    with pytest.raises(FactoryError, match=r"step 4, epoch 1, batch of rows (\d, ){2}….*lower lr") as error:
        run_training_loop(network, 10, batch, broken, spec, CPU, identity=IDENTITY, checkpoints=saves)
    # Steps 1 to 3 are saved; 4 is bad, and 5 ends the epoch.
    assert saves.steps == [1, 2, 3] and len(received) == 5
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
    loaded = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name):
            loaded.append((name, len(steps)))
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    steps = []

    def counting(net, pair):
        steps.append(1)
        return loss(net, pair)

    run_training_loop(network, 10, batch, counting, TrainSpec(epochs=2, batch=2), CPU, identity=IDENTITY)
    assert loaded and {at for _, at in loaded} == {5, 10}


def test_fit_with_accumulation_prefetches_each_micro_batch_before_compute():
    network, rows_of, loss = line()
    log = []

    def batch(positions):
        log.append(("read", positions.tolist()))
        return rows_of(positions)

    def noting(net, pair):
        log.append(("computed",))
        return loss(net, pair)

    batch.prefetch = lambda positions: log.append(("prefetched", positions.tolist()))
    run_training_loop(network, 8, batch, noting, TrainSpec(epochs=2, batch=4, accumulate=2), CPU, identity=IDENTITY)
    read = [what[1] for what in log if what[0] == "read"]
    reported = [what[1] for what in log if what[0] == "prefetched"]
    assert len(read) == 2 * 2 * 2
    # All but the first of each epoch, each of them right behind the call before it: the computing comes after.
    assert reported == read[1:4] + read[5:8]
    steps = [what[0] for what in log]
    assert steps == (["read", "prefetched", "computed"] * 3 + ["read", "computed"]) * 2


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
