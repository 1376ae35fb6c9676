"""Several processes with torchrun: rank, sums of losses, broadcasts, batch normalisation over all; no-ops alone."""

import atexit
import importlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from ml_factory.lazy_module import LazyModule
from ml_factory.process_identity import launched_by_torchrun
from ml_factory.storage.serialization import deserialize_state, serialize_state

# Imported before there is a group, see `join_process_group`.
differentiable = LazyModule("torch.distributed.nn.functional")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a training.

    rank : this process, 0 .. world - 1; rank 0 saves and logs.
    world : number of processes.
    local : rank on this machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, the same bits everywhere."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def broadcast(self, state: dict | None) -> dict | None:
        """Return the state of rank 0 on all ranks: plain values and tensors, or None."""
        if self.world == 1:
            return state
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        payload = serialize_state({"state": state}) if self.is_rank_zero else b""
        size = torch.tensor([len(payload)], device=device)
        distributed.broadcast(size, 0)
        blob = torch.empty(int(size), dtype=torch.uint8, device=device)
        if self.is_rank_zero:
            blob.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        distributed.broadcast(blob, 0)
        return deserialize_state(blob.cpu().numpy().tobytes())["state"]


def join_process_group(backend: str) -> ProcessGroup:
    """Return the processes of this training: an existing group, or the one torchrun has announced."""
    if not distributed.is_initialized() and launched_by_torchrun():
        # The defaults of its functions hold the group that exists when it is imported, so that the group would outlive
        # destroy_process_group, and with it gloo's threads, which abort the process ("terminate called") at its end.
        importlib.import_module("torch.distributed.nn.functional")
        distributed.init_process_group(backend)
        atexit.register(_destroy_process_group)
    if not distributed.is_initialized():
        return ProcessGroup()
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)))


def _destroy_process_group() -> None:
    """End the group and its threads before the interpreter, unless the caller has."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d whose mean and variance in training are those of the rows of all processes.

    Of one process, or of SPMD devices, it is BatchNorm2d itself; torch's own SyncBatchNorm runs on GPUs alone.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return super().forward(input)
        x_NCHW = input.float()
        axes, count = (0, 2, 3), x_NCHW.numel() // x_NCHW.shape[1] * distributed.get_world_size()
        mean_C = differentiable.all_reduce(x_NCHW.sum(axes)) / count
        centred_NCHW = x_NCHW - mean_C[None, :, None, None]
        variance_C = differentiable.all_reduce(centred_NCHW.square().sum(axes)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
        scale_C = self.weight * torch.rsqrt(variance_C + self.eps)
        out_NCHW = centred_NCHW * scale_C[None, :, None, None] + self.bias[None, :, None, None]
        return out_NCHW.to(input.dtype)
