"""A small network of each kind, its batches and loss, on any device: eager on the CPU, compiled on XLA."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ml_factory.training.batches import weighted_cross_entropy
from ml_factory.training.device import Device, pick_device
from ml_factory.training.spec import TrainSpec
from tests.models.cases import CASES, CLASSES, Case

IDENTITY = {"model": "case", "settings": {}, "data": {}}
BY_NAME = {case.name: case for case in CASES}


def device_of(kind: str) -> Device:
    return pick_device(TrainSpec(device=kind, threads=1, precision="fp32"))


@dataclass
class Rows:
    """Made-up rows for a case on a device: positions -> (x_BTF, target, weight)."""

    case: Case
    device: Device
    rows: int

    def __post_init__(self):
        draw = torch.Generator().manual_seed(1)
        target = torch.randint(0, CLASSES, (self.rows,), generator=draw)
        parts = self.case.inputs(self.rows), target, torch.rand(self.rows, generator=draw)
        self.parts = [self.device.to_device(part) for part in parts]

    def __call__(self, positions) -> tuple[Tensor, ...]:
        at = self.device.to_device(torch.from_numpy(positions))
        return tuple(part.index_select(0, at) for part in self.parts)

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        x_BTF, target_B, weight_B = batch
        return weighted_cross_entropy(network(x_BTF), target_B, weight_B)
