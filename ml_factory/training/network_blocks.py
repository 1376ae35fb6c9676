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
    their number (docs/log.md). A network without a stack is compiled whole.
    """
    blocks = list_network_blocks(network)
    if len(blocks) < 2:
        return torch.compile(network)
    for block in blocks:
        block.forward = partial(_forward, block, block.forward, torch.compile(block.forward))
    return network


def _forward(block: nn.Module, plain: Callable, compiled: Callable, *args: Any) -> Any:
    return (compiled if block.training else plain)(*args)
