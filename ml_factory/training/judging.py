"""A network's outputs and loss on whole data sets, in batches of one shape: the last one is filled up and masked.

N rows, B rows of a batch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.training.device import Device
from ml_factory.training.feed import Feed
from ml_factory.training.step import Loss


@torch.no_grad()
def outputs(network: nn.Module, feed: Feed, device: Device, size: int) -> Tensor:
    """network(x) of every row, float32 (N, ...) on the host. feed : gives (x,). Its weights' precision, no autocast."""
    network = device.place(network).eval()
    parts = []
    for positions, inside in _batches(len(feed), size, device.chips):
        batch = feed(positions)
        out = network(batch[0])
        device.flush("evaluate", batch, (out,))
        parts.append((out, inside))
    # Copied when all are on their way: one wait instead of one a batch.
    return torch.cat([out.cpu()[:inside] for out, inside in parts])


@torch.no_grad()
def mean_loss(network: nn.Module, feed: Feed, loss: Loss, device: Device, size: int) -> float:
    """sum(w * loss) / sum(w) over all rows; each process takes its share of the batches.

    feed : gives what `loss` takes, its last part the weights (B,).
    """
    network = device.place(network).eval()
    totals, processes = device.place(torch.zeros(2, dtype=torch.float64)), device.processes
    for number, (positions, inside) in enumerate(_batches(len(feed), size, device.chips)):
        if number % processes.world != processes.rank:
            continue
        mask_B = device.spread(device.place(torch.from_numpy(np.arange(len(positions)) < inside)))
        *batch, weight_B = feed(positions)
        loss_sum, weight = loss(network, (*batch, weight_B * mask_B))
        totals = totals + torch.stack([loss_sum, weight]).double()
        device.flush("evaluate", (*batch, weight_B), (totals,))
    loss_sum, weight = processes.total(totals).tolist()
    return loss_sum / weight


def _batches(rows: int, size: int, multiple: int) -> Iterator[tuple[np.ndarray, int]]:
    """(int64 positions (B,), how many of them count): all of one length, the last row repeated to fill it."""
    size = -(-max(min(size, rows), 1) // multiple) * multiple
    for start in range(0, rows, size):
        yield np.minimum(np.arange(start, start + size), rows - 1), min(size, rows - start)
