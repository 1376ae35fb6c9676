"""Outputs and loss of a network on whole data sets, in batches of one shape; the last one is padded and masked.

N rows, B rows of a batch.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.progress import progress_phase
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device
from ml_factory.training.losses import Loss

Forward = Callable[[nn.Module, tuple], Tensor]


@torch.no_grad()
def evaluate_network_outputs(
    network: nn.Module, feed: BatchLoader, device: Device, size: int, forward: Forward | None = None
) -> Tensor:
    """Return forward(network, batch) of every row, float32 (N, ...) on the host, in the weights' precision.

    feed : loader of the batches; by default the network reads their first part.
    """
    network, parts = device.to_device(network).eval(), []
    with progress_phase("predicting", len(feed)) as done:
        for batch, inside in _batches(feed, size, device.chips):
            out = network(batch[0]) if forward is None else forward(network, batch)
            device.mark_step("evaluate")
            parts.append((out, inside))
            done(inside)
        # Copied when all are queued: one wait instead of one per batch.
        return torch.cat([out.cpu()[:inside] for out, inside in parts])


@torch.no_grad()
def evaluate_mean_loss(network: nn.Module, feed: BatchLoader, loss: Loss, device: Device, size: int) -> float:
    """Return sum(w * loss) / sum(w) over all rows; each process takes its share of the batches.

    feed : loader of the batches of `loss`, the last part the weights (B,).
    """
    network, processes = device.to_device(network).eval(), device.processes
    totals = device.to_device(torch.zeros(2, dtype=torch.float64))
    for (*batch, weight_B), inside in _batches(feed, size, device.chips, processes.rank, processes.world):
        mask_B = device.shard(device.to_device(torch.from_numpy(np.arange(len(weight_B)) < inside)))
        loss_sum, weight = loss(network, (*batch, weight_B * mask_B))
        totals = totals + torch.stack([loss_sum, weight]).double()
        device.mark_step("evaluate")
    loss_sum, weight = processes.all_reduce_sum(totals).tolist()
    return loss_sum / weight


def _batches(
    feed: BatchLoader, size: int, multiple: int, first: int = 0, every: int = 1
) -> Iterator[tuple[tuple[Tensor, ...], int]]:
    """Yield (batch, number of its valid rows): all of one length, the last row repeated as padding. The next positions
    are announced to a feed that has `prefetch`, as in `run_training_loop`.

    first, every : this process's share of the batches.
    """
    rows, ahead = len(feed), getattr(feed, "prefetch", None)
    size = -(-max(min(size, rows), 1) // multiple) * multiple
    starts = range(0, rows, size)[first::every]
    pieces = [np.minimum(np.arange(start, start + size), rows - 1) for start in starts]
    for start, positions, following in zip(starts, pieces, [*pieces[1:], None], strict=False):
        batch = feed(positions)
        if ahead is not None and following is not None:
            ahead(following)
        yield batch, min(size, rows - start)
