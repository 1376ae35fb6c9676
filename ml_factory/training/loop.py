"""fit(): the one training loop. It is given a network, batches and a loss, and imports none of them.

Everything a step uses is a function of (seed, step): the rows of its batch, the learning rate and the random numbers
drawn on the device. So the state of a run is the step, the weights, the optimizer's moments, the running sums of the
epoch and what early stopping remembers, and a run that goes on from it is the run that never stopped, to the bit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ml_factory.checkpoints.stop_signals import stop
from ml_factory.errors import FactoryError
from ml_factory.models.base import FitResult, hint_when_flat, replay_history
from ml_factory.progress import phase
from ml_factory.training.device import Device, pinned
from ml_factory.training.progress_line import ProgressMeter
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingRun
from ml_factory.training.step import Batch, Loss, take_step


def fit(
    network: nn.Module,
    rows: int,
    batch: Batch,
    loss: Loss,
    spec: TrainSpec,
    device: Device,
    *,
    identity: Mapping,
    validate: Callable[[], float] | None = None,
    from_start: bool = False,
    callbacks: Sequence[Callable] = (),
    checkpoints: Any = None,
) -> FitResult:
    """Train `network` in place; it ends with the weights of its best epoch, on the device.

    batch : positions int64 -> what `loss` takes, on the device; where it has `prefetch(positions)`, it is told of
    each part of a step ahead. loss : (network, batch) -> (sum, weight), one step descends on their ratio over all its
    parts. validate : -> mean loss on the validation rows. from_start : whether the untrained network, as epoch 0, is a
    candidate for the best epoch and starts the count of `patience`. identity : what a checkpoint must agree with to be
    gone on from: "model", "settings", "data". Raises FactoryError where loss or gradient is not finite twice, or an
    epoch's loss on the validation rows is not.
    """
    with pinned(device), device.training():
        # ------------------------------------------------------------------ start or resume
        network.train()
        run, result = TrainingRun(device.to_device(network), rows, spec, device, identity), FitResult()
        saver = _Saver(run, checkpoints)
        if saver.resume():
            result.resumed_from, result.resumed_step = len(run.memory.history), run.step
            replay_history(callbacks, run.memory.history)
        elif from_start and validate is not None:
            _evaluate_untrained(run, validate)
        meter = ProgressMeter(run)
        total, before = (steps * run.order.batch for steps in (run.order.steps_until(spec.epochs), run.step))
        with phase("training", total, start=before) as moved:
            while not run.done:
                began = time.perf_counter()
                _epoch(run, batch, loss, saver, meter, moved)
                # ---------------------------------------------------------- the epoch's verdict
                metrics = _end_epoch(run, validate, began)
                # ---------------------------------------------------------- save, then tell
                saver.save_after_epoch(metrics)
                device.recompiles.end_first_cycle()
                for callback in callbacks:
                    callback(run.epoch - 1, dict(metrics))
        _finish(run)
    return _fill_result(run, result, meter)


def _epoch(run: TrainingRun, batch: Batch, loss: Loss, saver: "_Saver", meter: ProgressMeter, moved: Callable) -> None:
    """Steps up to the end of the epoch that `run.step` is in."""
    end, timed = run.order.steps_until(run.epoch), _Timed(batch)
    while run.step < end or run.check_finite():
        # ------------------------------------------------------------------ the step: nothing waits for the device
        if not _step_or_halve(run, timed, loss, end):
            continue
        # ------------------------------------------------------------------ the log
        moved(run.order.batch)
        meter.record_step(timed.lap())
        # ------------------------------------------------------------------ once-in-a-while jobs
        if run.step % run.spec.log_steps == 0 and not run.check_finite():
            meter.log_if_due(saver.due_in())
        saver.step()


def _step_or_halve(run: TrainingRun, batch: Batch, loss: Loss, end: int) -> bool:
    """Take a step. False when memory ran out and the run went back, with smaller micro-batches."""
    try:
        take_step(run, batch, loss, end)
        return True
    except (RuntimeError, MemoryError) as error:
        if not run.device.out_of_memory(error):
            raise
        failed = error.with_traceback(None)  # the frames would keep the step's tensors alive
    if not run.halve_micro_batch():
        raise failed
    return False


def _evaluate_untrained(run: TrainingRun, validate: Callable[[], float]) -> None:
    """Remember the untrained network as the best one so far."""
    with run.evaluation_mode():
        run.memory.best_loss, run.memory.best_weights = _finite(validate(), 0), run.weights()
    run.snapshot()


def _finite(val_loss: float, epoch: int) -> float:
    """The loss on the validation rows; FactoryError where it is not finite."""
    if not math.isfinite(val_loss):
        raise FactoryError(
            "The loss on the validation rows is not finite", where=f"epoch {epoch}", got=val_loss,
            wanted="a number: the epoch is chosen by it",
            next_step="look for values that are not finite, or extreme, in the validation rows alone",
        )  # fmt: skip
    return val_loss


def _end_epoch(run: TrainingRun, validate: Callable[[], float] | None, began: float) -> dict:
    """Losses of the epoch that just ended, remembered; the best weights are kept."""
    memory, (loss_sum, weight) = run.memory, run.totals.tolist()
    epoch, spec = run.epoch, run.spec
    with run.evaluation_mode():
        val_loss = _finite(validate(), epoch) if validate is not None else None
        best = val_loss is not None and val_loss < memory.best_loss
        if best or (val_loss is None and run.average is not None and epoch == spec.epochs):
            memory.best_weights = run.weights()
    if best:
        memory.best_loss, memory.best_epoch = val_loss, epoch
    elif val_loss is None:
        memory.best_epoch = epoch
    metrics = {
        "train_loss": loss_sum / weight if weight else 0.0,
        "val_loss": val_loss,
        "seconds": time.perf_counter() - began,
    }
    memory.history = [*memory.history, {"epoch": epoch, **metrics}]
    hint_when_flat(memory.history, spec.lr)
    run.clear_totals()
    run.done = epoch == spec.epochs or memory.out_of_patience(spec)
    run.snapshot()
    return metrics


def _finish(run: TrainingRun) -> None:
    """The best epoch's weights, ready to predict."""
    if run.memory.best_weights is not None:
        run.network.load_state_dict(run.memory.best_weights)
        run.device.mark_step("restore")
    run.network.eval()


def _fill_result(run: TrainingRun, result: FitResult, meter: ProgressMeter) -> FitResult:
    memory, device = run.memory, run.device
    result.history, result.best_epoch = list(memory.history), memory.best_epoch
    result.stopped_early = len(result.history) < run.spec.epochs
    result.nondeterminism, result.exact = tuple(memory.inexact), not memory.inexact
    result.compiles = dict(device.recompiles.counts)
    result.machine = {
        "device": device.kind,
        "threads": device.threads,
        "precision": device.precision,
        "parameters": sum(item.numel() for item in run.network.parameters()),
        "peak_bytes": device.peak_bytes(),
        "rows_per_second": meter.average(),
    }
    return result


class _Timed:
    """A batch function whose seconds are counted."""

    def __init__(self, batch: Batch):
        self.batch, self.seconds = batch, 0.0
        self.prefetch = getattr(batch, "prefetch", None)

    def __call__(self, positions):
        began = time.perf_counter()
        batch = self.batch(positions)
        self.seconds += time.perf_counter() - began
        return batch

    def lap(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class _Saver:
    """When to save: at an epoch's end when one is due, at the fit's end always, in mid-epoch when time has passed.

    Of several processes the first one loads, saves and decides.
    """

    def __init__(self, run: TrainingRun, checkpoints: Any):
        self.run, self.last = run, time.monotonic()
        self.checkpoints = checkpoints if run.device.processes.first else None

    def resume(self) -> bool:
        """Stand where the last checkpoint was taken, if there is one."""
        saved = self.checkpoints.load() if self.checkpoints is not None else None
        state = self.run.device.processes.broadcast(saved and saved["state"])
        if state:
            self.run.restore(state)
        return bool(state)

    def due_in(self) -> float | None:
        """Seconds until the next save in mid-epoch: our own pause is over and the timer says so; None without saves."""
        if self.checkpoints is None:
            return None
        pause = self.run.spec.save_seconds - (time.monotonic() - self.last)
        return max(pause, self.checkpoints.due_in(), 0.0)

    def step(self) -> None:
        if self.checkpoints is None:
            return
        if stop.requested is None and time.monotonic() - self.last < self.run.spec.save_seconds:
            return
        if self.checkpoints.due() and self.run.is_finite():
            self._save(self.run.state(), self.run.memory.last_metrics(), force=False)

    def save_after_epoch(self, metrics: dict) -> None:
        if self.checkpoints is not None and (self.run.done or self.checkpoints.due()):
            self._save(self.run.copy, metrics, force=self.run.done)

    def _save(self, state: dict, metrics: Mapping | None, *, force: bool) -> None:
        self.checkpoints.save(state, metrics=metrics, force=force)
        self.last = time.monotonic()
