"""Gradient checkpointing (Chen et al. 2016): inner results of a network's blocks are computed twice, not kept."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ml_factory.training.device import Device
from ml_factory.training.network_blocks import list_network_blocks


def recompute_blocks(network: nn.Module, device: Device) -> int:
    """Checkpoint each block of `network` in training; returns the number of blocks.

    Names of parameters and values of outputs stay the same.
    """
    blocks = list_network_blocks(network)
    for block in blocks:
        block.forward = partial(_forward, block, type(block).forward, device)
    return len(blocks)


def _forward(block: nn.Module, forward, device: Device, *args, **named):
    if not block.training:
        return forward(block, *args, **named)
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    computed = []

    def inner(*args):
        with _remembered(norms) if computed else nullcontext():
            computed.append(True)
            return forward(block, *args, **named)

    # Side effects break compilation: only where batch norms need it.
    return device.recompute(inner if norms else partial(forward, block, **named), *args)


@contextmanager
def _remembered(norms: list[_BatchNorm]) -> Iterator[None]:
    """Inside the block, batch norms do not update their statistics: the first pass already did."""
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None:
                with torch.no_grad():
                    norm.num_batches_tracked.sub_(1)
