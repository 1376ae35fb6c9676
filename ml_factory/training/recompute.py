"""Gradient checkpointing (Chen et al. 2016): the inner results of a network's blocks are computed twice, not kept."""

from functools import partial

from torch import nn

from ml_factory.training.device import Device


def recompute_blocks(network: nn.Module, device: Device) -> int:
    """Have each block of `network` forget its inner results in training; returns how many blocks it has.

    A block is a member, with parts of its own, of a Sequential or ModuleList: an encoder's layer. Names of parameters
    and values of outputs stay as they are.
    """
    stacks = [module for module in network.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    blocks = [member for stack in stacks for member in stack if any(True for _ in member.children())]
    for block in blocks:
        block.forward = partial(_forward, block, type(block).forward, device)
    return len(blocks)


def _forward(block: nn.Module, forward, device: Device, *args):
    if not block.training:
        return forward(block, *args)
    return device.recompute(partial(forward, block), *args)
