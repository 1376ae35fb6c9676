"""fit(): the one training loop. It is given a network, batches and a loss, and imports none of them.

Everything a step uses is a function of (seed, step): the rows of its batch, the learning rate and the random numbers
drawn on the device. So the state of a run is the step, the weights, the optimizer's moments, the running sums of the
epoch and what early stopping remembers, and a run that goes on from it is the run that never stopped, to the bit.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import FactoryError
from ml_factory.models.contract import FitResult, check_same_run, differences, merged
from ml_factory.seeding import derive_seed, generator
from ml_factory.training.device import Device, pinned
from ml_factory.training.optim import load_optimizer_state, make_adamw, optimizer_state, rate, set_rate
from ml_factory.training.spec import TrainSpec

Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class Order:
    """Which rows each step takes: a stream of permutations, one an epoch, each drawn from (seed, epoch) alone.

    Batches are always full; the rows left at an epoch's end open the next one.
    """

    def __init__(self, rows: int, batch: int, seed: int):
        self.rows, self.batch, self.seed = rows, min(batch, rows), seed
        self._kept: dict[int, np.ndarray] = {}

    def steps_until(self, epoch: int) -> int:
        """Steps taken when that many epochs are over."""
        return epoch * self.rows // self.batch

    def positions(self, step: int) -> np.ndarray:
        """int64 rows of this step's batch."""
        start, stop = step * self.batch, (step + 1) * self.batch
        first, last = start // self.rows, (stop - 1) // self.rows
        self._kept = {epoch: self._kept[epoch] for epoch in self._kept if epoch >= first}
        stream = np.concatenate([self._permutation(epoch) for epoch in range(first, last + 1)])
        return stream[start - first * self.rows : stop - first * self.rows]

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._kept:
            self._kept[epoch] = generator(self.seed, "order", epoch).permutation(self.rows)
        return self._kept[epoch]


@dataclass
class _Memory:
    """What early stopping and the report remember between epochs."""

    history: list[dict]
    inexact: list[str]
    best_loss: float = float("inf")
    best_epoch: int = 0
    best_weights: dict[str, Tensor] | None = None

    def out_of_patience(self, spec: TrainSpec) -> bool:
        return self.best_epoch > 0 and 0 < spec.patience <= len(self.history) - self.best_epoch


class _Run:
    """The moving parts of one fit, and their state."""

    def __init__(self, network: nn.Module, rows: int, spec: TrainSpec, device: Device, identity: Mapping):
        self.network, self.spec, self.device, self.identity = network, spec, device, dict(identity)
        self.order = Order(rows, spec.batch, spec.seed)
        self.optimizer = make_adamw(network, spec)
        self.memory = _Memory([], [])
        self.step, self.done = 0, False
        self.clear_sums()

    def clear_sums(self) -> None:
        # On the device: read once an epoch. float64 is exact enough to add any number of batches.
        self.sums = self.device.place(torch.zeros(2, dtype=torch.float64))
        self.first_bad = self.device.place(torch.full((), -1, dtype=torch.int64))

    def state(self) -> dict:
        """All of it, in plain values and tensors."""
        memory = {item.name: getattr(self.memory, item.name) for item in fields(self.memory)}
        return {
            **self.identity,
            "environment": self.device.facts(),
            "step": self.step,
            "done": self.done,
            "network": _on_cpu(self.network.state_dict()),
            "optimizer": {k: _on_cpu(v) for k, v in optimizer_state(self.network, self.optimizer).items()},
            "sums": self.sums.cpu(),
            "memory": {**memory, "best_weights": memory["best_weights"] and _on_cpu(memory["best_weights"])},
        }

    def restore(self, state: Mapping) -> None:
        """Stand where `state` was taken, on this run's device."""
        check_same_run(state, self.identity)
        self.network.load_state_dict(state["network"])
        load_optimizer_state(self.network, self.optimizer, state["optimizer"])
        self.step, self.done = int(state["step"]), bool(state["done"])
        self.sums = self.device.place(state["sums"].clone())
        self.memory = _Memory(**state["memory"])
        # Once continued elsewhere, always so: the reasons travel with the run.
        self.memory.inexact = merged(self.memory.inexact, differences(state["environment"], self.device.facts()))

    def check_finite(self) -> None:
        """Refuse to go on, or to save, once a loss or gradient was not finite."""
        bad = int(self.first_bad)
        if bad >= 0:
            raise FactoryError(
                "Training left the finite numbers",
                where=f"step {bad}, epoch {len(self.memory.history) + 1}",
                got="a loss or gradient that is not finite",
                next_step="lower lr, or look for extreme features; the last checkpoint is from before this step",
            )


def fit(
    network: nn.Module,
    rows: int,
    batch: Callable[[np.ndarray], Any],
    loss: Loss,
    spec: TrainSpec,
    device: Device,
    *,
    identity: Mapping,
    validate: Callable[[], float] | None = None,
    callbacks: Sequence[Callable] = (),
    checkpoints: Any = None,
) -> FitResult:
    """Train `network` in place; it ends with the weights of its best epoch, on the device.

    batch : positions int64 -> what `loss` takes, on the device. loss : (network, batch) -> (sum, weight), one step
    descends on their ratio. validate : -> mean loss on the validation rows. identity : what a checkpoint must agree
    with to be gone on from: "model", "settings", "data". Raises FactoryError where loss or gradient is not finite.
    """
    with pinned(device):
        # ------------------------------------------------------------------ start or resume
        run = _Run(device.place(network), rows, spec, device, identity)
        saved = checkpoints.load() if checkpoints is not None else None
        result = FitResult()
        if saved:
            run.restore(saved["state"])
            result.resumed_from, result.resumed_step = len(run.memory.history), run.step
        saver = _Saver(run, checkpoints)
        while not run.done:
            began = time.perf_counter()
            _epoch(run, batch, loss, saver)
            # -------------------------------------------------------------- the epoch's verdict
            metrics = _verdict(run, validate, began)
            epoch = len(run.memory.history)
            run.done = epoch == spec.epochs or run.memory.out_of_patience(spec)
            # -------------------------------------------------------------- save, then tell
            saver.unit(metrics)
            for callback in callbacks:
                callback(epoch, dict(metrics))
        if run.memory.best_weights is not None:
            network.load_state_dict(run.memory.best_weights)
        network.eval()
    result.history, result.best_epoch = list(run.memory.history), run.memory.best_epoch
    result.stopped_early = len(result.history) < spec.epochs
    result.inexact, result.exact = tuple(run.memory.inexact), not run.memory.inexact
    return result


def _epoch(run: _Run, batch: Callable, loss: Loss, saver: "_Saver") -> None:
    """Steps up to the end of the epoch that `run.step` is in."""
    network, optimizer, spec = run.network, run.optimizer, run.spec
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = run.order.steps_until(spec.epochs)
    network.train()
    for step in range(run.step, run.order.steps_until(len(run.memory.history) + 1)):
        run.device.seed_step(derive_seed(spec.seed, "step", step))
        set_rate(optimizer, rate(step, total, spec))
        # ------------------------------------------------------------------ the step: nothing waits for the device
        loss_sum, weight = loss(network, batch(run.order.positions(step)))
        (loss_sum / weight.clamp_min(1e-12)).backward()
        norm = nn.utils.clip_grad_norm_(parameters, spec.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # ------------------------------------------------------------------ the log, kept on the device
        run.sums += torch.stack([loss_sum.detach(), weight]).double()
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss_sum.detach()))
        run.first_bad = torch.where(bad & (run.first_bad < 0), step, run.first_bad)
        run.step = step + 1
        saver.step()


def _verdict(run: _Run, validate: Callable[[], float] | None, began: float) -> dict:
    """Losses of the epoch that just ended, remembered; the best weights are kept."""
    run.check_finite()
    memory, (loss_sum, weight) = run.memory, run.sums.tolist()
    val_loss = validate() if validate is not None else None
    metrics = {
        "train_loss": loss_sum / weight if weight else 0.0,
        "val_loss": val_loss,
        "seconds": time.perf_counter() - began,
    }
    memory.history = [*memory.history, {"epoch": len(memory.history) + 1, **metrics}]
    if val_loss is None:
        memory.best_epoch = len(memory.history)
    elif val_loss < memory.best_loss:
        memory.best_loss, memory.best_epoch = val_loss, len(memory.history)
        memory.best_weights = {name: value.detach().clone() for name, value in run.network.state_dict().items()}
    run.clear_sums()
    return metrics


class _Saver:
    """When to save: at an epoch's end when one is due, at the fit's end always, in mid-epoch when time has passed."""

    def __init__(self, run: _Run, checkpoints: Any):
        self.run, self.checkpoints, self.last = run, checkpoints, time.monotonic()

    def step(self) -> None:
        if self.checkpoints is None or time.monotonic() - self.last < self.run.spec.save_seconds:
            return
        if self.checkpoints.due():
            self._save(None, force=False)

    def unit(self, metrics: dict) -> None:
        if self.checkpoints is not None and (self.run.done or self.checkpoints.due()):
            self._save(metrics, force=self.run.done)

    def _save(self, metrics: dict | None, *, force: bool) -> None:
        self.run.check_finite()
        self.checkpoints.save(self.run.state(), metrics=metrics, force=force)
        self.last = time.monotonic()


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in tensors.items()}
