"""Memory of a training before it begins: counted on tensors without content, so that the largest network can be asked.

N numbers of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ml_factory.training.device import Device
from ml_factory.training.precision import DTYPES

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a training.

    weights, gradients, moments : of the parameters, float32; two moments each.
    copies : on the host, of the checkpoint's state and of the best epoch.
    row : inner results that a row of a batch keeps for the backward pass.
    available : on the device; host_available : of the host, where the copies lie.
    """

    parameters: int
    row: int
    micro_batch: int
    available: int
    host_available: int
    on_host: bool

    @property
    def state(self) -> int:
        return 16 * self.parameters

    @property
    def copies(self) -> int:
        return 16 * self.parameters

    @property
    def device_bytes(self) -> int:
        """Bytes on the device; where that is the host, with the copies."""
        return self.state + self.row * self.micro_batch + (self.copies if self.on_host else 0)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.available and (self.on_host or self.copies <= self.host_available)

    @property
    def rows_that_fit(self) -> int:
        """Rows of a micro-batch that fit; 0 where not even the weights and moments do."""
        return max((self.available - self.device_bytes + self.row * self.micro_batch) // max(self.row, 1), 0)

    def describe(self) -> str:
        """Format the plan in one line."""
        return (
            f"memory: {self.parameters / 1e6:,.1f} million parameters; weights, gradients and moments "
            f"{self.state / GIB:.2f} GiB, copies on the host {self.copies / GIB:.2f}, {self.micro_batch} rows at once "
            f"{self.row * self.micro_batch / GIB:.2f}; {self.device_bytes / GIB:.2f} of {self.available / GIB:.1f} GiB"
        )


def plan_memory(
    build: Callable[[], nn.Module], forward: Callable[[nn.Module, int], Tensor], micro_batch: int, device: Device
) -> MemoryPlan:
    """Count the memory of a training.

    build : returns the network; called without memory for its weights.
    forward : returns the loss's input of so many rows, from inputs made on the device "meta".
    """
    with torch.device("meta"):
        network = build().train()
        kept = [_bytes_kept(network, forward, rows, device.precision) for rows in (1, 2)]
    parameters = sum(one.numel() for one in network.parameters())
    host = _host_bytes()
    on_host = device.kind == "cpu"
    return MemoryPlan(
        parameters, kept[1] - kept[0], micro_batch, host if on_host else device.free_bytes(), host, on_host
    )


def _bytes_kept(network: nn.Module, forward: Callable, rows: int, precision: str) -> int:
    """Return the bytes that a forward pass of so many rows keeps, apart from the parameters."""
    own = {id(one) for one in network.parameters()}
    kept: dict[int, int] = {}
    held = []  # a freed storage's address would be used again

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        if id(tensor) not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward(network, rows)
    share = torch.empty((), dtype=DTYPES[precision]).element_size() / 4
    del result
    return int(sum(kept.values()) * share)


def _host_bytes() -> int:
    """Return the memory of the host that is free or can be freed; unlimited where it is not reported."""
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return 1 << 62
    return next((1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:"), 1 << 62)
