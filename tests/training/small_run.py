"""A small weighted regression, and checkpoints in memory: of tests of the loop on a processor and on XLA."""

import torch
from torch import nn

from ml_factory.storage.serialization import deserialize_state, serialize_state

ROWS = 48


class Kept:
    """Checkpoints in memory, through the bytes that a file would hold.

    steps, last : step of each save; (done, forced) of the last one.
    """

    def __init__(self, saved: bytes | None = None, due: bool = True):
        self.saved, self.steps, self.last, self.is_due = saved, [], None, due

    def due(self):
        return self.is_due

    def due_in(self, pause=0.0):
        return pause if self.is_due else 600.0

    def save(self, state, metrics=None, force=False):
        self.saved, self.last = serialize_state(state), (state["done"], force)
        self.steps.append(state["step"])

    def load(self):
        return self.saved and {"state": deserialize_state(self.saved)}


def small(dropout: float = 0.0):
    """A network, its batches and a loss with very unequal weights."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(ROWS, 3, generator=generator), torch.rand(ROWS, generator=generator) ** 4
    y = x.sum(1, keepdim=True).sin()

    def batch(positions):
        at = torch.from_numpy(positions)
        return x[at], y[at], w[at]

    return network, batch, weighted


def weighted(net, batch):
    x, y, w = batch
    return (w * (net(x) - y).square().squeeze(1)).sum(), w.sum()


def flat(network) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])
