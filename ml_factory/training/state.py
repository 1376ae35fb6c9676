"""State of one training, as needed to resume bit for bit, for any number of processes and micro-batches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import CheckpointError, FactoryError
from ml_factory.models.base import (
    check_checkpoint_of_same_fit,
    describe_differences,
    merge_inexact_reasons,
    refuse_damaged_training,
)
from ml_factory.training.device import Device
from ml_factory.training.optim import AdamW, LossScaler
from ml_factory.training.sampler import BatchSampler, micro_batch_size
from ml_factory.training.spec import TrainSpec


def recompute_blocks(network: nn.Module, device: Device) -> int:
    """Checkpoint each block of `network` in training; returns the number of blocks.

    Blocks are members, with submodules, of a Sequential or ModuleList, such as an encoder's layers. Names of parameters
    and values of outputs stay the same; a batch norm inside sees each batch twice.
    """
    stacks = [module for module in network.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    blocks = [member for stack in stacks for member in stack if any(True for _ in member.children())]
    for block in blocks:
        block.forward = partial(_forward, block, type(block).forward, device)
    return len(blocks)


def _forward(block: nn.Module, forward, device: Device, *args, **named):
    if not block.training:
        return forward(block, *args, **named)
    return device.recompute(partial(forward, block, **named), *args)


_log = logging.getLogger("ml_factory.training")


@dataclass
class EarlyStoppingState:
    """State of early stopping and the history between epochs, in plain values and host tensors.

    best_epoch : 0 for the untrained network.
    inexact : reasons why the run's bits may differ from those of an uninterrupted one (a field of checkpoints).
    """

    history: list[dict] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    best_loss: float = float("inf")
    best_epoch: int = 0
    best_weights: dict[str, Tensor] | None = None


class TrainingState:
    """One network in training.

    forward : network as a step calls it (averaging gradients over processes where there are several).
    micro : rows of a process in one forward pass.
    totals : [sum of w * loss, sum of w] of the epoch so far, on the device.
    sampler : class of the order of the rows.
    flag : [first step that was not finite (-1: none), step], on the device; nothing waits for it.
    """

    def __init__(
        self, network: nn.Module, rows: int, spec: TrainSpec, device: Device, identity: Mapping,
        sampler: type[BatchSampler] = BatchSampler,
    ):  # fmt: skip
        self.network, self.spec, self.device, self.identity = device.to_device(network), spec, device, dict(identity)
        self.network.train()
        self.order = sampler(rows, spec.batch, spec.seed, device.batch_share_count)
        if not self.order.batch:
            raise FactoryError("Fewer rows than devices", got=rows, wanted=f"at least {device.batch_share_count}")
        share = self.order.batch // device.processes.world
        self.micro = micro_batch_size(share, share // spec.accumulate, device.chips)
        if spec.recompute and not recompute_blocks(network, device):
            _log.warning("recompute changes nothing: %s has no stack of blocks", identity.get("model"))
        self.optimizer = AdamW(network)
        self.scale = LossScaler(device.to_device) if device.precision == "fp16" else None
        self.forward = device.wrap_network(network)
        self.memory = EarlyStoppingState()
        self.step, self.done = 0, False
        self.reset_loss_totals()
        device.mark_step("start")

    @property
    def epoch(self) -> int:
        """Current epoch, from 1."""
        return len(self.memory.history) + 1

    def rows_of(self, step: int) -> np.ndarray:
        """Return this process's rows of a step, int64 (micro-batches, micro)."""
        processes = self.device.processes
        return self.order.positions(step).reshape(processes.world, -1, self.micro)[processes.rank]

    def reset_loss_totals(self) -> None:
        # float64 is exact enough to add any number of batches.
        self.totals = self.device.to_device(torch.zeros(2, dtype=torch.float64))
        # The step is counted on the device: as a constant it would make each step another program.
        self.flag = self.device.to_device(torch.tensor([-1, self.step], dtype=torch.int32))

    def weights(self) -> dict[str, Tensor]:
        """Return the network's weights, copied to the host."""
        return _copied(self.network.state_dict())

    # ---------------------------------------------------------------------- state
    def state(self) -> dict:
        """Return the whole state in plain values and host tensors that no later step changes."""
        return {
            **self.identity,
            "environment": self.device.environment_facts(),
            "step": self.step,
            "done": self.done,
            "batch": self.order.batch,
            "micro": self.micro,
            "network": self.weights(),
            "optimizer": {name: _copied(moments) for name, moments in self.optimizer.state().items()},
            "scale": self.scale and self.scale.state(),
            "totals": self.totals.cpu().clone(),
            "memory": dict(vars(self.memory)),
        }

    def restore(self, state: Mapping) -> None:
        """Restore a checkpoint on this training's device. Raises CheckpointError."""
        check_checkpoint_of_same_fit(state, self.identity)
        with refuse_damaged_training():
            if state["batch"] != self.order.batch:
                raise CheckpointError(
                    "The checkpoint's steps hold another number of rows", where="batch", got=state["batch"],
                    wanted=self.order.batch,
                    next_step="resume with a number of processes and chips that divides the batch",
                )  # fmt: skip
            self.network.load_state_dict(state["network"])
            self.optimizer.load(state["optimizer"])
            if self.scale and state["scale"]:
                self.scale.load(state["scale"], self.device.to_device)
            self.step, self.done = state["step"], bool(state["done"])
            self.reset_loss_totals()
            self.totals = self.device.to_device(state["totals"].clone())
            self.memory = EarlyStoppingState(**state["memory"])
            found = list(describe_differences(state["environment"], self.device.environment_facts()))
            if state["micro"] != self.micro:
                found.append(f"micro-batch: began with {state['micro']}, now {self.micro}")
            # Nondeterminism is permanent: its reasons are stored with the run.
            self.memory.inexact = merge_inexact_reasons(self.memory.inexact, found)
        self.optimizer.zero_grad()
        self.device.mark_step("restore")

    # ---------------------------------------------------------------------- when it fails
    def raise_if_not_finite(self) -> None:
        """Raise FactoryError where the flag is set; this waits for the device."""
        bad = int(self.flag[0])
        if bad < 0:
            return
        rows = self.order.positions(bad)
        raise FactoryError(
            "The loss or its gradient is not finite",
            where=f"step {bad + 1}, epoch {self.epoch}, batch of rows {', '.join(map(str, rows[:8]))}, …",
            next_step="lower lr, or look for extreme features in these rows; the last checkpoint is from before this",
        )


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}
