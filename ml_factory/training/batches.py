"""Batches on the device: gathered there from one array when it fits, else on the host.

B rows of a batch, T time steps, F features, N rows of the arrays.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ml_factory.datasets.windows import Windows
from ml_factory.training.device import Device

# Share of the device's free memory for the arrays; the rest is for weights, moments and activations.
SHARE_OF_MEMORY = 0.4

Part = Windows | np.ndarray


class BatchLoader:
    """Function from positions to one tensor (B, ...) on the device for each part; parts that fit are kept there.

    parts : Windows, or arrays (N, ...) with a row for each window; all equally long.
    """

    def __init__(self, device: Device, parts: Sequence[Part]):
        self.device, self.parts = device, parts
        size = sum(part.x_NF.nbytes if isinstance(part, Windows) else part.nbytes for part in parts)
        self.resident = size <= SHARE_OF_MEMORY * device.free_bytes()
        self._takes = [_device_reader(part, device) if self.resident else _host_reader(part) for part in parts]

    def __len__(self) -> int:
        return len(self.parts[0])

    def __call__(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        index_B = torch.from_numpy(np.ascontiguousarray(positions))
        if self.resident:
            index_B = self.device.shard(self.device.to_device(index_B))
        return self.device.shard(tuple(self.device.to_device(take(index_B)) for take in self._takes))


def _host_reader(part: Part) -> Callable[[Tensor], Tensor]:
    """Return a function from index_B to the part's rows in host memory."""
    return part.gather if isinstance(part, Windows) else lambda index_B: torch.from_numpy(part[index_B.numpy()])


def _device_reader(part: Part, device: Device) -> Callable[[Tensor], Tensor]:
    """Return a function from index_B to the part's rows, from memory on the device."""
    if not isinstance(part, Windows):
        rows_N = _padded(torch.from_numpy(part), device)
        return lambda index_B: rows_N.index_select(0, index_B)
    if device.kind == "cpu":
        return part.gather
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
