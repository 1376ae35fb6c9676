"""The fenced step: nothing in here waits for the device, so that its queue never runs dry."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.seeding import derive_seed
from ml_factory.training.optim import controls, total_norm
from ml_factory.training.state import TrainingRun

Batch = Callable[[np.ndarray], Any]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def take_step(run: TrainingRun, batch: Batch, loss: Loss, end: int = 0) -> None:
    """One descent on sum(w * loss) / sum(w) over the step's rows, of all micro-batches and all processes.

    end : the step before which the epoch ends; up to it, the part after each one is fetched while that is computed.
    """
    numbers = run.device.to_device(controls(run.step, run.learning_rate(), run.spec))
    totals, parts, ahead = None, run.rows_of(run.step), getattr(batch, "prefetch", None)
    for part, rows in enumerate(parts):
        data = batch(rows)
        last = part == len(parts) - 1
        if ahead is not None and not (last and run.step + 1 >= end):
            ahead(run.rows_of(run.step + 1)[0] if last else parts[part + 1])
        part_totals = _accumulate(run, loss, data, part, last)
        totals = part_totals if totals is None else totals + part_totals
        if not last:
            run.device.mark_step("accumulate", data, (totals, *run.optimizer.gradients()))
    _descend(run, numbers, run.device.processes.all_reduce_sum(totals))
    run.optimizer.clear()
    run.device.mark_step("train", data, (run.totals, *run.optimizer.parameters))
    run.step += 1


def _accumulate(run: TrainingRun, loss: Loss, data: Any, part: int, last: bool) -> Tensor:
    """Add one part's gradient to those before it. Returns [sum of w * loss, sum of w] (2,), without its graph."""
    # The only place that seeds the device.
    run.device.seed_step(derive_seed(run.spec.seed, "step", run.step, part, run.device.processes.rank))
    # Processes add up their gradients once, with the last part.
    with nullcontext() if last or not hasattr(run.forward, "no_sync") else run.forward.no_sync():
        with run.device.autocast():
            loss_sum, weight = loss(run.forward, data)
        # Divided by the batch's rows only to stay near a mean's size; the weights' sum is known at the end.
        scaled = loss_sum / run.order.batch
        (scaled if run.scale is None else scaled * run.scale.scale).backward()
    return torch.stack([loss_sum.detach().float(), weight.detach().float()])


@torch.no_grad()
def _descend(run: TrainingRun, numbers: Tensor, totals: Tensor) -> None:
    """Update weights, averages and the epoch's sums, unless loss or gradient is not finite: then only the flag."""
    # Processes give the mean of their gradients, so that `world` makes it a sum.
    to_mean = run.order.batch * run.device.processes.world / totals[1].clamp_min(1e-12)
    if run.scale is not None:
        to_mean = to_mean / run.scale.scale
    norm = total_norm(run.optimizer.gradients()) * to_mean
    finite, loss_finite = torch.isfinite(norm), torch.isfinite(totals[0])
    ok = finite & loss_finite
    clip = (run.spec.clip / (norm + 1e-6)).clamp(max=1.0)
    run.optimizer.update(numbers, torch.where(ok, to_mean * clip, torch.zeros_like(norm)), ok)
    if run.average is not None:
        run.average.update(torch.where(ok, numbers[4], torch.zeros_like(norm)))
    run.totals = run.totals + torch.where(ok, totals, torch.zeros_like(totals)).double()
    bad = ~ok
    if run.scale is not None:
        # A scale that was too large is found in this way: not the network's fault, unless none is left to try.
        bad = ~loss_finite | (~finite & run.scale.exhausted())
        run.scale.adapt(finite)
    first_bad, counter = run.flag.unbind()
    run.flag = torch.stack([torch.where(bad & (first_bad < 0), counter, first_bad), counter + 1])
