"""Blocks of a network that repeat, such as an encoder's layers, and their compilation: once for all equal ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def list_network_blocks(network: nn.Module) -> list[nn.Module]:
    """List the blocks: members, with submodules, of a Sequential or ModuleList."""
    stacks = [module for module in network.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    return [member for stack in stacks for member in stack if any(True for _ in member.children())]


def compile_network(network: nn.Module) -> nn.Module:
    """Return the network, compiled as training calls it; what evaluates it calls it as it is.

    Only the blocks of a stack are compiled: equal ones share one program, so the compiler's time does not grow with
    their number (docs/log.md). A network whose blocks hold less than half of its weights, as a TFT, is compiled whole.
    """
    blocks = list_network_blocks(network)
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    sizes = [(weight.numel(), id(weight) in inside) for weight in network.parameters()]
    if len(blocks) < 2 or 2 * sum(size for size, is_inside in sizes if is_inside) < sum(size for size, _ in sizes):
        return torch.compile(network)
    for block in blocks:
        block.forward = partial(_forward, block, block.forward, torch.compile(block.forward))
    return network


def _forward(block: nn.Module, plain: Callable, compiled: Callable, *args: Any, **named: Any) -> Any:
    return (compiled if block.training else plain)(*args, **named)
