"""A small network of each kind, its batches and loss, on any device: eager on the CPU, compiled on XLA."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.forecaster import weighted_mse, weighted_pinball
from ml_factory.models.heads import ForecastTask
from ml_factory.training.device import Device, pick_device
from ml_factory.training.losses import weighted_cross_entropy
from ml_factory.training.spec import TrainSpec
from tests.models.cases import CASES, Case

IDENTITY = {"model": "case", "settings": {}, "data": {}}
BY_ID = {case.id: case for case in CASES}


def device_of(kind: str) -> Device:
    return pick_device(TrainSpec(device=kind, threads=1, precision="fp32"))


@dataclass
class Rows:
    """Made-up rows for a case on a device: positions -> (inputs by name, target, weight)."""

    case: Case
    device: Device
    rows: int

    def __post_init__(self):
        draw = torch.Generator().manual_seed(1)
        self.inputs = {name: self.device.to_device(x) for name, x in self.case.inputs(self.rows).items()}
        task = self.case.task
        shape = (self.rows, task.steps, task.channel_count(6)) if isinstance(task, ForecastTask) else (self.rows,)
        target = torch.randn(shape, generator=draw)
        if not isinstance(task, ForecastTask):
            target = torch.randint(0, 3, shape, generator=draw)
        self.target, self.weight = map(self.device.to_device, (target, torch.rand(self.rows, generator=draw)))

    def __call__(self, positions) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        at = self.device.to_device(torch.from_numpy(positions))
        inputs = {name: x.index_select(0, at) for name, x in self.inputs.items()}
        return inputs, self.target.index_select(0, at), self.weight.index_select(0, at)

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        inputs, target, weight = batch
        out, task = network(**inputs), self.case.task
        if not isinstance(task, ForecastTask):
            return weighted_cross_entropy(out, target, weight)
        if task.quantiles:
            return weighted_pinball(out, target, weight, task.quantiles)
        return weighted_mse(out, target, weight)
