"""Every network, small, for tests that must hold for all of them: on the CPU and, by `make test-xla`, on XLA.

B batch, T = 16 time steps, F = 6 features, C = 3 classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ml_factory.models.registry import available_models, find_model_spec, resolve_registry_entry

T, F, CLASSES = 16, 6, 3
SMALL = {
    "lstm": {"hidden": 8, "layers": 2},
    "gru": {"hidden": 8, "layers": 2},
    "tcn": {"width": 8},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 16},
    "itransformer": {"width": 8, "inner": 16},
    "tft": {"width": 8},
}


@dataclass(frozen=True)
class Case:
    """A network class with its settings."""

    name: str
    kind: type[nn.Module]
    settings: dict[str, Any]

    def build(self, seed: int = 0, **settings: Any) -> nn.Module:
        """The network, its weights drawn from the seed; settings go over the case's, e.g. dropout=0.0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.kind(F, T, CLASSES, self.kind.Spec(**{**self.settings, **settings}))

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        """x_BTF."""
        return torch.randn(rows, T, F, generator=torch.Generator().manual_seed(seed))


CASES = [
    Case(name, resolve_registry_entry(find_model_spec(name).network), SMALL[name])
    for name in available_models()
    if find_model_spec(name).windowed
]
