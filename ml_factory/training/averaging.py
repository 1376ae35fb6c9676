"""Averaged weights: evaluated and kept instead of the last ones, since they change less from step to step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ml_factory.errors import CheckpointError


class WeightAverage:
    """Exponential moving average of the trained parameters (Polyak and Juditsky 1992).

    The decay is that of Tarvainen and Valpola 2017: min(decay, (1 + t) / (10 + t)) at step t, so that the initial
    weights soon lose their weight.
    """

    def __init__(self, names: list[str], parameters: list[Tensor]):
        self.names, self.parameters = names, parameters
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, moved: Tensor) -> None:
        """Update the average after a step. moved : 1 - decay of this step, on the device."""
        torch._foreach_mul_(self.values, 1 - moved)
        torch._foreach_add_(self.values, torch._foreach_mul([p.detach() for p in self.parameters], moved))

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Inside the block the network holds the average; afterwards its own weights again, bit for bit."""
        with torch.no_grad():
            own = [p.detach().clone() for p in self.parameters]
            torch._foreach_copy_(self.parameters, self.values)
            try:
                yield
            finally:
                torch._foreach_copy_(self.parameters, own)

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        if set(state) != set(self.names):
            raise CheckpointError("Averaged weights of another network", got=sorted(state)[:3], wanted=self.names[:3])
        for name, value in zip(self.names, self.values, strict=True):
            value.copy_(state[name])
