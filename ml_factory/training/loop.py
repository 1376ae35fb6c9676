"""The one training loop. Network, batches and loss are arguments; it imports none of them.

Everything a step uses is a function of (seed, step): the rows of its batch, the learning rate and the random numbers
drawn on the device. The state of a training is the step, the weights, the optimizer's moments, the running sums of the
epoch and the early-stopping state; one resumed from it equals an uninterrupted training bit for bit.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import FactoryError
from ml_factory.models.base import ModelFitResult, log_flat_training_loss, restore_callback_history
from ml_factory.progress import format_duration, progress_phase
from ml_factory.seeding import derive_seed
from ml_factory.training.batches import Loss
from ml_factory.training.device import Device, deterministic_device
from ml_factory.training.optim import (
    LEAST_SCALE,
    optimizer_step_scalars,
    total_gradient_norm,
    warmup_cosine_learning_rate,
)
from ml_factory.training.sampler import BatchSampler
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState

SECONDS_BETWEEN = 10.0  # two lines, at least
_log = logging.getLogger("ml_factory.training")


class TrainingReports:
    """Reports within an epoch: a progress line, and calls of the callbacks that have `log_steps`.

    clock : returns seconds.
    """

    def __init__(self, training: TrainingState, callbacks: Sequence[Callable] = (), clock=time.perf_counter):
        self.training, self.clock, self.first_step = training, clock, training.step
        self.began = self.last_line = clock()
        self._callbacks = [one.log_steps for one in callbacks if hasattr(one, "log_steps")]
        self._last: tuple[int, float, float] = (0, 0.0, 0.0)  # epoch, sum of w * loss, sum of w at the last calls

    def rows_per_second(self) -> float:
        """Return rows a second of this session."""
        return (self.training.step - self.first_step) * self.training.order.batch / max(self.clock() - self.began, 1e-9)

    def report(self, save_in: float | None) -> None:
        """Log the line when it is due, and make the calls; either waits for the epoch's sums on the device.

        save_in : seconds until a save is due; None without checkpoints.
        """
        training, order = self.training, self.training.order
        due = self.clock() - self.last_line >= SECONDS_BETWEEN and training.device.processes.is_rank_zero
        if not due and not self._callbacks:
            return
        loss_sum, weight = training.totals.tolist()
        if due:
            self.last_line, speed, total = (
                self.clock(),
                self.rows_per_second(),
                order.steps_until_epoch(training.spec.epochs),
            )
            _log.info(
                "epoch %d/%d, step %s/%s, loss %.4f, %s samples/s, %d compiles, %s left, %s",
                min(training.epoch, training.spec.epochs), training.spec.epochs, f"{training.step:,}", f"{total:,}",
                loss_sum / weight if weight else 0.0, f"{speed:,.0f}", sum(training.device.compiles.values()),
                format_duration((total - training.step) * order.batch / max(speed, 1e-9)),
                "no saves" if save_in is None else f"next save in {format_duration(save_in)}",
            )  # fmt: skip
        _, before, weight_before = self._last if self._last[0] == training.epoch else (0, 0.0, 0.0)
        self._last = training.epoch, loss_sum, weight
        for callback in self._callbacks:
            step, mean = training.step - order.steps_until_epoch(training.epoch - 1), loss_sum - before
            callback(training.epoch, step, mean / max(weight - weight_before, 1e-12))


class OutOfMemoryError(FactoryError):
    """Memory ran out in a step. divisible : whether this process can compute its rows in smaller parts."""

    def __init__(self, training: TrainingState, error: BaseException):
        self.divisible = training.device.processes.world == 1 and training.micro > training.device.chips
        super().__init__(
            "Memory ran out in a training step", where=f"step {training.step + 1}, {training.micro} rows at once",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            next_step="half of batch_size and twice the gradient_accumulation_steps: the same batch in smaller parts, "
            "and the training continues from its last checkpoint; or gradient_checkpointing=True",
        )  # fmt: skip


Batch = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Validation:
    """Validation after every epoch, by which the best one is chosen.

    loss : function that returns the mean loss on the validation rows.
    from_start : True where the untrained network, as epoch 0, is a candidate for the best epoch and starts the count of
        `patience`.
    metrics : function that returns further numbers of the last call of `loss`, kept in the history.
    """

    loss: Callable[[], float]
    from_start: bool = False
    metrics: Callable[[], dict] = dict


def run_training_loop(
    network: nn.Module,
    rows: int,
    batch: Batch,
    loss: Loss,
    spec: TrainSpec,
    device: Device,
    *,
    identity: Mapping,
    validation: Validation | None = None,
    callbacks: Sequence[Callable] = (),
    checkpoints: Any = None,
) -> ModelFitResult:
    """Train `network` in place; it ends with the weights of its best epoch, on the device.

    batch : function from int64 positions to the inputs of `loss`, on the device; its `prefetch(positions)`, if any, is
        called with each next part of a step; its `sampler`, if any, is the class of the order of positions.
    loss : (network, batch) -> (sum, weight); one step descends on their ratio over all its parts. The float32 tensor of
        its `step_numbers(step, steps of the whole training)`, if any, is appended to each batch of the step.
    callbacks : called with (epoch from 1, metrics) after each epoch; `log_steps(epoch, step, loss)`, where one has it,
        every `spec.log_steps` steps with the step in the epoch and the mean loss since the last call.
    identity : values that a checkpoint must match to be resumed: "model", "settings", "data".
    Raises FactoryError where a loss or its gradient is not finite, OutOfMemoryError where memory runs out.
    """
    with deterministic_device(device):
        training = TrainingState(network, rows, spec, device, identity, getattr(batch, "sampler", BatchSampler))
        saver = _Saver(training, checkpoints)
        resumed = saver.resume()
        if resumed:
            restore_callback_history(callbacks, training.memory.history)
        elif validation is not None and validation.from_start:
            training.memory.best_loss, training.memory.best_weights = (
                _validate(training, validation, 0),
                training.weights(),
            )
        history_before, step_before, reports = (
            len(training.memory.history),
            training.step,
            TrainingReports(training, callbacks),
        )
        total, before = (
            steps * training.order.batch for steps in (training.order.steps_until_epoch(spec.epochs), training.step)
        )
        with progress_phase("training", total, start=before) as moved:
            while not training.done:
                began, end = time.perf_counter(), training.order.steps_until_epoch(training.epoch)
                while training.step < end:
                    # -------------------------------------------------- the step: no wait for the device
                    try:
                        take_training_step(training, batch, loss, end)
                    except (RuntimeError, MemoryError) as error:
                        if not device.is_out_of_memory_error(error):
                            raise
                        raise OutOfMemoryError(training, error) from error
                    # -------------------------------------------------- the log, and periodic jobs
                    moved(training.order.batch)
                    if training.step % training.spec.log_steps == 0:
                        training.raise_if_not_finite()
                        reports.report(saver.due_in())
                    saver.save_within_epoch()
                # ------------------------------------------------------ the epoch's losses, its checkpoint, callbacks
                training.raise_if_not_finite()
                metrics = _end_epoch(training, validation, began)
                saver.save_after_epoch(metrics)
                for callback in callbacks:
                    callback(training.epoch - 1, dict(metrics))
        memory = training.memory
        if memory.best_weights is not None:
            training.network.load_state_dict(memory.best_weights)
            device.mark_step("restore")
        training.network.eval()
    return ModelFitResult(
        history=list(memory.history), best_epoch=memory.best_epoch, stopped_early=len(memory.history) < spec.epochs,
        resumed_from=history_before if resumed else None, resumed_step=step_before if resumed else None,
        nondeterminism=tuple(memory.inexact), compiles=dict(device.compiles),
        machine={
            "device": device.kind, "threads": device.threads, "precision": device.precision,
            "parameters": sum(item.numel() for item in training.network.parameters()),
            "peak_bytes": device.peak_memory_bytes(), "rows_per_second": reports.rows_per_second(),
        },
    )  # fmt: skip


def take_training_step(training: TrainingState, batch: Batch, loss: Loss, end: int = 0) -> None:
    """Take one step on sum(w * loss) / sum(w) over the step's rows, of all micro-batches and all processes.

    Nothing in this function waits for the device, so that its queue never runs empty.

    end : first step of the next epoch; the batch of every earlier part is prefetched.
    """
    steps = training.order.steps_until_epoch(training.spec.epochs)  # of the whole training
    rate = warmup_cosine_learning_rate(training.step, steps, training.spec)
    numbers = training.device.to_device(optimizer_step_scalars(training.step, rate, training.spec))
    totals, parts, ahead = None, training.rows_of(training.step), getattr(batch, "prefetch", None)
    for part, rows in enumerate(parts):
        data = batch(rows)
        if hasattr(loss, "step_numbers"):  # a tensor: a compiler would build a program for each value of a constant
            data = (*data, training.device.to_device(loss.step_numbers(training.step, steps)))
        last = part == len(parts) - 1
        if ahead is not None and not (last and training.step + 1 >= end):
            ahead(training.rows_of(training.step + 1)[0] if last else parts[part + 1])
        # The only place that seeds the device.
        training.device.seed_step(
            derive_seed(training.spec.seed, "step", training.step, part, training.device.processes.rank)
        )
        # Processes add up their gradients once, with the last part.
        with nullcontext() if last or not hasattr(training.forward, "no_sync") else training.forward.no_sync():
            with training.device.autocast():
                loss_sum, weight = loss(training.forward, data)
            # Divided by the batch's rows to stay near the size of a mean; the sum of weights is known at the end.
            scaled = loss_sum / training.order.batch
            (scaled if training.scale is None else scaled * training.scale.scale).backward()
        part_totals = torch.stack([loss_sum.detach().float(), weight.detach().float()])
        del loss_sum, weight, scaled  # with them the part's graph
        totals = part_totals if totals is None else totals + part_totals
        if not last:
            training.device.mark_step("accumulate")
    _descend(training, numbers, training.device.processes.all_reduce_sum(totals))
    training.optimizer.zero_grad()
    training.device.mark_step("train")
    training.step += 1


@torch.no_grad()
def _descend(training: TrainingState, numbers: Tensor, totals: Tensor) -> None:
    """Update weights and the epoch's sums; where loss or gradient is not finite, only the flag."""
    # DDP averages gradients over processes; `world` makes the average a sum.
    to_mean = training.order.batch * training.device.processes.world / totals[1].clamp_min(1e-12)
    if training.scale is not None:
        to_mean = to_mean / training.scale.scale
    norm = total_gradient_norm(training.optimizer.gradients()) * to_mean
    finite, loss_finite = torch.isfinite(norm), torch.isfinite(totals[0])
    ok = finite & loss_finite
    clip = (training.spec.clip / (norm + 1e-6)).clamp(max=1.0)
    training.optimizer.step(numbers, torch.where(ok, to_mean * clip, torch.zeros_like(norm)), ok)
    training.totals = training.totals + torch.where(ok, totals, torch.zeros_like(totals)).double()
    bad = ~ok
    if training.scale is not None:
        # An overflow may only mean that the scale is too large, unless no smaller scale is left.
        bad = ~loss_finite | (~finite & (training.scale.scale <= LEAST_SCALE))
        training.scale.adapt(finite)
    first_bad, counter = training.flag.unbind()
    training.flag = torch.stack([torch.where(bad & (first_bad < 0), counter, first_bad), counter + 1])


def _validate(training: TrainingState, validation: Validation, epoch: int) -> float:
    """Return the validation loss of the network as it is. Raises FactoryError where it is not finite."""
    training.network.eval()
    val_loss = validation.loss()
    training.network.train()
    if not math.isfinite(val_loss):
        raise FactoryError(
            "The loss on the validation rows is not finite", where=f"epoch {epoch}", got=val_loss,
            wanted="a number: the epoch is chosen by it",
            next_step="look for values that are not finite, or extreme, in the validation rows alone",
        )  # fmt: skip
    return val_loss


def _end_epoch(training: TrainingState, validation: Validation | None, began: float) -> dict:
    """Record the losses of the epoch that just ended; keep the best weights. Returns the metrics."""
    memory, (loss_sum, weight) = training.memory, training.totals.tolist()
    epoch, spec = training.epoch, training.spec
    val_loss = _validate(training, validation, epoch) if validation is not None else None
    if val_loss is None:
        memory.best_epoch = epoch
    elif val_loss < memory.best_loss:
        memory.best_loss, memory.best_epoch, memory.best_weights = val_loss, epoch, training.weights()
    metrics = {
        "train_loss": loss_sum / weight if weight else 0.0,
        "val_loss": val_loss,
        "seconds": time.perf_counter() - began,
    } | (validation.metrics() if validation is not None else {})
    memory.history = [*memory.history, {"epoch": epoch, **metrics}]
    log_flat_training_loss(memory.history, spec.lr)
    training.reset_loss_totals()
    has_best = memory.best_epoch > 0 or memory.best_weights is not None  # epoch 0 is the untrained network
    training.done = epoch == spec.epochs or (has_best and 0 < spec.patience <= epoch - memory.best_epoch)
    return metrics


class _Saver:
    """Saves checkpoints: at an epoch's end when one is due, at the fit's end always, in mid-epoch when time has passed.

    Of several processes rank 0 loads, saves and decides.
    """

    def __init__(self, training: TrainingState, checkpoints: Any):
        self.training, self.checkpoints = training, checkpoints if training.device.processes.is_rank_zero else None

    def resume(self) -> bool:
        """Restore the last checkpoint, if there is one."""
        saved = self.checkpoints.load() if self.checkpoints is not None else None
        state = self.training.device.processes.broadcast(saved and saved["state"])
        if state:
            self.training.restore(state)
        return bool(state)

    def due_in(self) -> float | None:
        """Return seconds until the next mid-epoch save; None without checkpoints."""
        return None if self.checkpoints is None else self.checkpoints.due_in(self.training.spec.save_seconds)

    def save_within_epoch(self) -> None:
        """Save where one is due."""
        if self.due_in() == 0.0 and int(self.training.flag[0]) < 0:
            last = self.training.memory.history[-1:]  # of the last finished epoch: they rank a checkpoint taken since
            metrics = {name: value for one in last for name, value in one.items() if name != "epoch"}
            self.checkpoints.save(self.training.state(), metrics=metrics or None)

    def save_after_epoch(self, metrics: dict) -> None:
        """Save where it is due, and at the end of the training."""
        if self.checkpoints is not None and (self.training.done or self.checkpoints.due()):
            self.checkpoints.save(self.training.state(), metrics=metrics, force=self.training.done)
