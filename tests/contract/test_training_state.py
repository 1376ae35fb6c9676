"""What a run remembers, and how it goes on: in parts, when memory runs out, after a kill."""

import numpy as np
import pytest
import torch

from ml_factory.errors import CheckpointError, FactoryError
from tests.contract import doors
from tests.training.small_run import ROWS, Kept, flat, small, weighted

CPU = doors.Device("cpu", 1)
IDENTITY = {"model": "small", "settings": {}, "data": {}}


def trained(spec: doors.TrainSpec, device=CPU, loss=weighted, dropout=0.0, **more):
    network, batch, _ = small(dropout)
    result = doors.run_training_loop(network, ROWS, batch, loss, spec, device, identity=IDENTITY, **more)
    return network, result


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_take_step_descends_on_clipped_gradient_of_weighted_mean_loss(accumulate, share):
    """Not the mean of the parts' means, nor of the rows': with these weights they are far apart."""
    network, batch, loss = small()
    total, weight = loss(network, batch(np.arange(ROWS)))
    assert weight < 0.4 * ROWS
    expected = torch.autograd.grad(total / weight, list(network.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in expected]).norm().item()
    spec = doors.TrainSpec(batch=ROWS, accumulate=accumulate, clip=share * norm)
    run = doors.TrainingState(network, ROWS, spec, CPU, IDENTITY)
    doors.take_training_step(run, batch, loss)
    means = {id(p): 10 * mean for p, mean in zip(run.optimizer.parameters, run.optimizer.means, strict=True)}
    for parameter, gradient in zip(network.parameters(), expected, strict=True):  # a tenth of it is the first mean
        torch.testing.assert_close(means[id(parameter)], min(share, 1.0) * gradient, rtol=1e-4, atol=1e-6)
    assert (run.totals[0] / run.totals[1]).item() == pytest.approx((total / weight).item(), rel=1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_take_step_computes_in_precision_of_device_and_keeps_float32_weights(precision):
    device = doors.Device("cpu", 1, {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[precision])
    (network, batch, loss), seen = small(), []
    network[0].register_forward_hook(lambda layer, given, output: seen.append(output.dtype))
    doors.take_training_step(
        doors.TrainingState(network, ROWS, doors.TrainSpec(batch=16), device, IDENTITY), batch, loss
    )
    assert seen == [precision] and flat(network).dtype == torch.float32


def test_fit_with_accumulation_draws_new_random_numbers_per_micro_batch():
    drawn = []

    def noting(net, batch):
        drawn.append(torch.rand(1).item())
        return weighted(net, batch)

    for _ in range(2):
        trained(doors.TrainSpec(epochs=1, batch=16, accumulate=2), loss=noting)
    assert len(set(drawn)) == 6 and drawn[:6] == drawn[6:]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError()]
)
def test_fit_out_of_memory_raises_error_that_says_what_to_do(error):
    def full(net, batch):
        raise error

    with pytest.raises(FactoryError, match=r"Memory ran out .*step 1, 8 rows at once.*half of batch_size") as caught:
        trained(doors.TrainSpec(epochs=1, batch=16, accumulate=2), loss=full)
    assert caught.value.__cause__ is error
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1"):
        trained(doors.TrainSpec(epochs=1, batch=16), loss=full)


@pytest.mark.parametrize(("accumulate", "precision"), [(2, "fp32"), (1, "bf16")])
def test_fit_in_parts_or_bf16_resumed_after_kill_equals_uninterrupted_run_bitwise(accumulate, precision):
    spec, device = (
        doors.TrainSpec(epochs=3, batch=16, accumulate=accumulate, save_seconds=0.0),
        doors.Device("cpu", 1, precision),
    )
    expected, whole = trained(spec, device, dropout=0.3)
    kept, calls = Kept(), []

    def killing(net, batch):
        calls.append(1)
        if len(calls) > 4 * accumulate:
            raise KeyboardInterrupt
        return weighted(net, batch)

    with pytest.raises(KeyboardInterrupt):
        trained(spec, device, killing, 0.3, checkpoints=kept)
    network, again = trained(spec, device, dropout=0.3, checkpoints=kept)
    assert torch.equal(flat(network), flat(expected)) and not again.nondeterminism and again.resumed_step == 4
    assert [row["train_loss"] for row in again.history] == [row["train_loss"] for row in whole.history]


def test_training_run_restore_in_smaller_parts_is_marked_and_ends_alike():
    kept = Kept()
    network, batch, loss = small()
    run = doors.TrainingState(network, ROWS, doors.TrainSpec(batch=16), CPU, IDENTITY)
    doors.take_training_step(run, batch, loss)
    kept.save(run.state())
    smaller = doors.TrainingState(small()[0], ROWS, doors.TrainSpec(batch=16, accumulate=4), CPU, IDENTITY)
    smaller.restore(kept.load()["state"])
    assert smaller.memory.inexact == ["micro-batch: began with 16, now 4"]
    for one in (run, smaller):
        doors.take_training_step(one, batch, loss)
    torch.testing.assert_close(flat(smaller.network), flat(network), rtol=2e-5, atol=1e-6)


def test_training_run_restore_with_other_batch_size_raises_checkpoint_error():
    run = doors.TrainingState(small()[0], ROWS, doors.TrainSpec(batch=16), CPU, IDENTITY)
    with pytest.raises(CheckpointError, match="another number of rows"):
        doors.TrainingState(small()[0], ROWS, doors.TrainSpec(batch=12), CPU, IDENTITY).restore(run.state())
    with pytest.raises(FactoryError, match="Fewer rows than devices"):
        doors.TrainingState(small()[0], 3, doors.TrainSpec(batch=16), doors.Device("cpu", 1, chips=4), IDENTITY)


def test_fit_mid_epoch_save_has_metrics_of_last_epoch():
    """So that the best of a long run is among the slots also where the timer is used up in mid-epoch."""
    received = {}

    class Saved(Kept):
        def save(self, state, metrics=None, force=False):
            received[state["step"]] = metrics

    losses = iter([0.5, 0.25, 0.75])
    spec = doors.TrainSpec(epochs=3, batch=16, save_seconds=0.0)
    trained(spec, validation=doors.Validation(lambda: next(losses)), checkpoints=Saved())
    assert received[1] is received[2] is None
    assert [received[step]["val_loss"] for step in range(3, 10)] == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.75]
    assert set(received[4]) == {"train_loss", "val_loss", "seconds"}


HALF = doors.Device("cpu", 1, "fp16")


def steep(net, batch):
    """Its gradients overflow at the first scale of fp16."""
    total, weight = weighted(net, batch)
    return total * 64, weight


def test_take_step_fp16_overflow_halves_loss_scale_and_skips_step():
    """fp16 on the CPU: the first scale overflows these gradients, is halved until it does not, and nothing is lost."""
    network, batch, _ = small()
    run, scale = doors.TrainingState(network, ROWS, doors.TrainSpec(batch=16, epochs=20, lr=0.01), HALF, IDENTITY), []
    for _ in range(40):
        scale.append(run.scale.scale.item())
        doors.take_training_step(run, batch, steep)
    assert int(run.flag[0]) == -1 and scale[-1] < scale[0]
    assert torch.isfinite(flat(network)).all()
    first, last = (float(t[0] / t[1]) for t in (_loss_of(small()[0]), _loss_of(network)))
    assert last < 0.8 * first


def test_take_step_fp16_gradient_norm_equals_fp32():
    """Adam would not notice: what is clipped and handed to it has the size that it has in fp32."""
    norms = []
    for device in (CPU, HALF):
        network, batch, loss = small()
        run = doors.TrainingState(network, ROWS, doors.TrainSpec(batch=16, clip=1e9), device, IDENTITY)
        run.optimizer.step = lambda numbers, factor, ok, run=run: norms.append(
            float(factor * doors.total_gradient_norm(run.optimizer.gradients()))
        )
        doors.take_training_step(run, batch, loss)
    assert norms[1] == pytest.approx(norms[0], rel=0.01) and norms[0] > 0


def test_training_run_restore_fp16_continues_loss_scale():
    def after(steps, run):
        batch = small()[1]
        for _ in range(steps):
            doors.take_training_step(run, batch, steep)
        return run

    def fresh():
        return doors.TrainingState(small()[0], ROWS, doors.TrainSpec(batch=4, epochs=2, lr=0.01), HALF, IDENTITY)

    kept, whole, again = Kept(), after(14, fresh()), fresh()
    kept.save(after(7, fresh()).state())
    again.restore(kept.load()["state"])
    assert again.scale.scale < fresh().scale.scale and again.scale.good > 0
    assert torch.equal(flat(after(7, again).network), flat(whole.network))
    assert again.scale.state() == whole.scale.state()


def _loss_of(network):
    with torch.no_grad():
        return weighted(network, small()[1](np.arange(ROWS)))
