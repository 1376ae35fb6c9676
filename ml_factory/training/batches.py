"""Batches on the device, gathered there from one array when it fits, else on the host; outputs and loss of all rows.

B rows of a batch, T time steps, F features, N rows of the arrays. A loss is a sum and a weight, so that batches, epochs
and processes add up to the same mean.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_factory.datasets.windows import Windows
from ml_factory.progress import progress_phase
from ml_factory.training.device import Device

# Share of the device's free memory for the arrays; the rest is for weights, moments and activations.
SHARE_OF_MEMORY = 0.4

Part = Windows | np.ndarray
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]  # (network, batch) -> (sum of w * loss, sum of w)


class BatchLoader:
    """Function from positions to one tensor (B, ...) on the device for each part; parts that fit are kept there.

    parts : Windows, or arrays (N, ...) with a row for each window; all equally long.
    """

    def __init__(self, device: Device, parts: Sequence[Part]):
        self.device, self.parts = device, parts
        size = sum(part.x_NF.nbytes if isinstance(part, Windows) else part.nbytes for part in parts)
        self.resident = size <= SHARE_OF_MEMORY * device.free_bytes()
        self._takes = [_reader(part, device, self.resident) for part in parts]

    def __len__(self) -> int:
        return len(self.parts[0])

    def __call__(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        index_B = torch.from_numpy(np.ascontiguousarray(positions))
        if self.resident:
            index_B = self.device.shard(self.device.to_device(index_B))
        return self.device.shard(tuple(self.device.to_device(take(index_B)) for take in self._takes))


def _reader(part: Part, device: Device, resident: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from index_B to the part's rows, from memory on the device or on the host."""
    if isinstance(part, Windows) and (device.kind == "cpu" or not resident):
        return part.gather
    if not resident:
        return lambda index_B: torch.from_numpy(part[index_B.numpy()])
    if not isinstance(part, Windows):
        rows_N = _padded(torch.from_numpy(part), device)
        return lambda index_B: rows_N.index_select(0, index_B)
    # A compiler would materialise a view of overlapping windows; single rows are picked instead.
    x_NF, last_N = _padded(part.x_NF, device), _padded(torch.from_numpy(part.rows), device)
    back_T = device.to_device(torch.arange(part.lookback).flip(0))

    def gather(index_B: Tensor) -> Tensor:
        rows_BT = last_N.index_select(0, index_B)[:, None] - back_T
        return x_NF.index_select(0, rows_BT.flatten()).unflatten(0, rows_BT.shape)

    return gather


def _padded(rows: Tensor, device: Device) -> Tensor:
    """Move rows to the device, padded with rows of 0 to the length it wants; padding is never selected."""
    padding = device.padded_row_count(len(rows)) - len(rows)
    return device.to_device(torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows)


def weighted_cross_entropy(logits_BC: Tensor, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of w * cross-entropy, sum of w); their ratio is the weighted mean log loss in nats.

    target_B : int64 classes.
    weight_B : >= 0; a row of weight 0 gives neither loss nor gradient.
    """
    loss_B = functional.cross_entropy(logits_BC.float(), target_B, reduction="none")
    return (weight_B * loss_B).sum(), weight_B.sum()


# ---- whole data sets, in batches of one shape; the last one is padded and masked -----------------------------------


@torch.no_grad()
def evaluate_network_outputs(
    network: nn.Module, feed: BatchLoader, device: Device, size: int,
    forward: Callable[[nn.Module, tuple], Tensor] | None = None,
) -> Tensor:  # fmt: skip
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
