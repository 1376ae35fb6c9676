"""AdamW in two groups and a rate that is a pure function of the step.

The schedule keeps no state of its own: on resume the step alone gives the rate.
"""

import math

import torch
from torch import nn

from ml_factory.errors import CheckpointError
from ml_factory.training.spec import TrainSpec


def make_adamw(network: nn.Module, spec: TrainSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); matrices decay, biases, norms and other vectors do not."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all tensors: on small networks the launches cost more than the arithmetic.
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=spec.lr, fused=True)


def rate(step: int, total: int, spec: TrainSpec) -> float:
    """The learning rate of step 0 .. total - 1: linear warm-up, then a cosine that would reach 0 at `total`."""
    warm = int(spec.warmup * total)
    if step < warm:
        return spec.lr * (step + 1) / warm
    share = (step - warm) / max(total - warm, 1)
    return spec.lr * 0.5 * (1 + math.cos(math.pi * share))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Moments by parameter name: {"weight": {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor}}."""
    return {name: dict(optimizer.state[p]) for name, p in network.named_parameters() if p in optimizer.state}


def load_optimizer_state(network: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put them back, on each parameter's own device."""
    names = {name: p for name, p in network.named_parameters() if p.requires_grad}
    strange = set(state) - set(names)
    if strange:
        raise CheckpointError("Optimizer state of another network", got=sorted(strange)[:3], wanted=sorted(names)[:3])
    for name, moments in state.items():
        there = names[name].device
        optimizer.state[names[name]] = {key: value.to(there, copy=True) for key, value in moments.items()}
