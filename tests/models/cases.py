"""Every network, small, for tests that must hold for all of them: on the CPU and, by `make test-xla`, on XLA.

B batch, T = 16 time steps, F = 6 features, S = 5 steps ahead, C = 3 classes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ml_factory.models.heads import ForecastTask, Task
from ml_factory.models.multi_timeframe_network import multi_timeframe_network_class
from ml_factory.models.registry import available_models, find_model_spec, resolve_registry_entry
from ml_factory.models.sequence import LSTM

T, F, S = 16, 6, 5
CLASSES, POINTS, QUANTILES = 3, ForecastTask(S), ForecastTask(S, channels=2, quantiles=(0.1, 0.5, 0.9))
SMALL = {
    "lstm": {"hidden": 8, "layers": 2},
    "gru": {"hidden": 8, "layers": 2},
    "tcn": {"width": 8},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 16},
    "itransformer": {"width": 8, "inner": 16},
    "tft": {"width": 8},
}
PAPERS = {"norm": "batch", "pad": True}  # a PatchTST's
# What batch norm takes out of a row's own hands, by design: in training a row's output depends on the other rows.
NOT_ALONE_IN_TRAINING = {"patchtst-batch"}
# A constant added right before batch norm is taken out again: these biases never feel the loss.
WITHOUT_GRADIENT = {"patchtst-batch": ("attention.out.bias", "feed.2.bias")}


def felt(case: "Case", name: str, parameter: Tensor) -> Tensor:
    """The numbers of a parameter that feel the loss, flat; those of an attention's biases are the queries' third alone
    where batch norm follows: a bias of the keys is the same for all scores of a query, one of the values passes the
    softmax as a constant."""
    if name.endswith(WITHOUT_GRADIENT.get(case.name, ("none",))):
        return parameter.new_empty(0)
    third = case.name in WITHOUT_GRADIENT and name.endswith("qkv.bias")
    return parameter.flatten()[: len(parameter) // 3] if third else parameter.flatten()


@dataclass(frozen=True)
class Case:
    """A network class with its settings and its task. known, static : numbers of a TFT's other inputs."""

    name: str
    kind: type[nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)
    task: Task = CLASSES

    @property
    def id(self) -> str:
        asked = {CLASSES: "classes", POINTS: "points", QUANTILES: "quantiles"}[self.task]
        return f"{self.name}-{asked}"

    def build(self, seed: int = 0, **settings: Any) -> nn.Module:
        """The network, its weights drawn from the seed; settings go over the case's, e.g. dropout=0.0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.kind(F, T, self.task, self.kind.Spec(**{**self._ahead(), **self.settings, **settings}))

    def _ahead(self) -> dict[str, int]:
        """A classifier is told how far its known inputs reach; a forecast knows."""
        return {"ahead": S} if "known" in self.settings and self.task == CLASSES else {}

    def inputs(self, rows: int, seed: int = 0) -> dict[str, Tensor]:
        """x_BTF, and for a TFT that has them known_BSK and static_BV, by name."""
        shapes = {"x_BTF": (T, F)}
        if "known" in self.settings:
            shapes["known_BSK"] = (S, len(self.settings["known"]))
        if "static" in self.settings:
            shapes["static_BV"] = (len(self.settings["static"]),)
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, *shape, generator=draw) for name, shape in shapes.items()}

    def shape(self, rows: int) -> tuple[int, ...]:
        """That of the output."""
        return {CLASSES: (rows, 3), POINTS: (rows, S, F), QUANTILES: (rows, S, 2, 3)}[self.task]


def networks() -> list[tuple[str, type[nn.Module], dict]]:
    shipped = [
        (name, resolve_registry_entry(find_model_spec(name).network), SMALL[name])
        for name in available_models()
        if find_model_spec(name).windowed
    ]
    kinds = {name: kind for name, kind, _ in shipped}
    return [
        *shipped,
        ("patchtst-batch", kinds["patchtst"], {**SMALL["patchtst"], **PAPERS}),
        (
            "tft-covariates",
            kinds["tft"],
            {**SMALL["tft"], "known": ("k0", "k1"), "static": ("s0", "s1", "s2"), "layers": 2},
        ),
        ("lstm-frames", multi_timeframe_network_class(LSTM, ((1, 4), (3, 2))), SMALL["lstm"]),
    ]


CASES = [Case(*network, task) for network in networks() for task in (CLASSES, POINTS, QUANTILES)]
