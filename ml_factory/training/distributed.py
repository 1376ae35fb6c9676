"""Distributed training with torchrun: rank of this process, sums and broadcasts over all ranks; no-ops when alone."""

import atexit
import importlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from ml_factory.process_identity import launched_by_torchrun
from ml_factory.storage.serialization import deserialize_state, serialize_state


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
