"""Gradient checkpointing (Chen et al. 2016): inner results of a network's blocks are computed twice, not kept."""

from functools import partial

from torch import nn

from ml_factory.training.device import Device


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
