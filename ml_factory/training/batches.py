"""Batches on the device: gathered there from one array when it fits, else on the host, one batch ahead.

B rows of a batch, T time steps, F features, N rows of the arrays.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ml_factory.datasets.windows import Windows
from ml_factory.training.device import Device

# Share of the device's free memory for the arrays; the rest is for weights, moments and activations.
SHARE_OF_MEMORY = 0.4

Part = Windows | np.ndarray


class BatchBuffer:
    """Host memory for batches, reused once no tensor refers to it any more.

    New pages from the system cost more than the copy into them. Each piece of memory has an array that all its views
    hold on to; a weak reference to that array shows when the memory is free.
    """

    def __init__(self):
        self._kept: list[tuple[Tensor, Callable[[], object]]] = []
        self._lock = Lock()  # the next batch is gathered on another thread

    def empty_tensor(self, *shape: int) -> Tensor:
        """Return an uninitialised float32 tensor of this shape."""
        with self._lock:
            # Memory of other shapes is dropped here; live tensors keep it themselves.
            same = [pair for pair in self._kept if pair[0].shape == shape]
            free = [memory for memory, lent in same if lent() is None]
            memory, *spare = free or [torch.empty(shape)]
            lent = memory.numpy()
            out = [pair for pair in same if pair[1]() is not None]
            # One spare piece, for a caller that holds a batch until the next one is ready.
            self._kept = [*out, (memory, weakref.ref(lent)), *((one, _not_lent) for one in spare[:1])]
            return torch.from_numpy(lent)


def _not_lent() -> None:
    """Reference of free memory: always None."""


class BatchLoader:
    """Function from positions to one tensor (B, ...) on the device for each part.

    parts : Windows, or arrays (N, ...) with a row for each window; all equally long.
    resident : keep the parts on the device (None: where they fit).
    """

    def __init__(self, device: Device, parts: Sequence[Part], resident: bool | None = None):
        self.device, self.parts = device, parts
        size = sum(part.x_NF.nbytes if isinstance(part, Windows) else part.nbytes for part in parts)
        self.resident = size <= SHARE_OF_MEMORY * device.free_bytes() if resident is None else resident
        placed: dict[int, Tensor] = {}
        self._takes = [_device_reader(part, device, placed) if self.resident else _host_reader(part) for part in parts]
        self._worker = None if self.resident else ThreadPoolExecutor(1, "gather")
        self._ahead: tuple[np.ndarray, Future] | None = None

    def __len__(self) -> int:
        return len(self.parts[0])

    def __call__(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        if self.resident:
            index_B = self.device.shard(self.device.to_device(torch.from_numpy(np.ascontiguousarray(positions))))
            return self.device.shard(tuple(take(index_B) for take in self._takes))
        return self.device.shard(tuple(self.device.to_device(part) for part in self._host_batch(positions)))

    @property
    def prefetch(self) -> Callable[[np.ndarray], None] | None:
        """Function that announces the next positions; None where gathering takes no time of the host."""
        return None if self.resident else self._prefetch

    def batches(self, wanted: Iterable[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batch of each of these positions; the next one is fetched meanwhile."""
        prefetch, remaining = self.prefetch or (lambda positions: None), iter(wanted)
        now = next(remaining, None)
        while now is not None:
            batch, now = self(now), next(remaining, None)
            if now is not None:
                prefetch(now)
            yield batch

    def _prefetch(self, positions: np.ndarray) -> None:
        self._ahead = positions, self._worker.submit(self._gather, positions)

    def _host_batch(self, positions: np.ndarray) -> list[Tensor]:
        """Return the parts of a batch in host memory: those fetched ahead, where they are of these positions."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.array_equal(ahead[0], positions):
            return ahead[1].result()
        return self._gather(positions)

    def _gather(self, positions: np.ndarray) -> list[Tensor]:
        index_B = torch.from_numpy(np.ascontiguousarray(positions))
        return [take(index_B) for take in self._takes]


def _host_reader(part: Part) -> Callable[[Tensor], Tensor]:
    """Return a function from index_B to the part's rows in host memory."""
    if not isinstance(part, Windows):
        return lambda index_B: torch.from_numpy(part[index_B.numpy()])
    memory, (_, T, F) = BatchBuffer(), part.shape
    return lambda index_B: part.gather(index_B, out=memory.empty_tensor(len(index_B), T, F))


def _device_reader(part: Part, device: Device, placed: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function from index_B to the part's rows, from memory on the device.

    placed : arrays on the device by their host address, so that an array shared by several parts is copied once.
    """
    if not isinstance(part, Windows):
        rows_N = _padded(torch.from_numpy(part), device)
        return lambda index_B: rows_N.index_select(0, index_B)
    if device.kind == "cpu":
        return _host_reader(part)
    # A compiler would materialise a view of overlapping windows; single rows are picked instead.
    address = part.x_NF.data_ptr()
    x_NF = placed[address] = placed[address] if address in placed else _padded(part.x_NF, device)
    last_N, back_T = _padded(torch.from_numpy(part.rows), device), device.to_device(torch.arange(part.lookback).flip(0))

    def gather(index_B: Tensor) -> Tensor:
        rows_BT = last_N.index_select(0, index_B)[:, None] - back_T
        return x_NF.index_select(0, rows_BT.flatten()).unflatten(0, rows_BT.shape)

    return gather


def _padded(rows: Tensor, device: Device) -> Tensor:
    """Move rows to the device, padded with rows of 0 to the length it wants; padding is never selected."""
    padding = device.padded_row_count(len(rows)) - len(rows)
    return device.to_device(torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows)
