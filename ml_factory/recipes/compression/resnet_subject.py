"""A ResNet-50 that recipe resnet50 trained, to be compressed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.evaluation.class_scores import wilson_interval
from ml_factory.recipes.compression.pruning import kept_count, narrow_bottlenecks
from ml_factory.recipes.compression.subject import Subject
from ml_factory.recipes.compression.variant_file import Architecture
from ml_factory.recipes.image_training import (
    WEIGHTS,
    ImageOutputs,
    ImageSources,
    ImageTrainingSettings,
    image_batches,
    open_samples,
)
from ml_factory.recipes.resnet50 import NAME, ResNetSpec, ResNetTraining, build_resnet50
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import read_state_file
from ml_factory.training.device import Device
from ml_factory.training.evaluate import evaluate_network_outputs
from ml_factory.training.spec import TrainSpec


class ResNetSubject(Subject):
    """folder : of the finished run. facts : its result."""

    parts = ("channels",)
    quality = "accuracy"

    def __init__(self, folder: Path, facts: Mapping[str, Any], device: Device):
        given = facts["settings"]
        settings = ImageTrainingSettings(ResNetSpec(**given["network"]), TrainSpec(**given["training"]),
                                         ImageSources(**given["sources"]), ImageOutputs())  # fmt: skip
        self.name, self.training, self.device = NAME, settings.training, device
        weights = read_state_file(folder / WEIGHTS)["weights"]
        self._model = ResNetTraining(settings.network, settings.training, device, weights)
        self.network = self._model.network
        self.architecture = {**asdict(settings.network), "removed": 0.0}
        train, test = open_samples(settings, "train"), open_samples(settings, "test")
        self.feed = image_batches(train, settings, device, True)
        self._held = image_batches(test, settings, device, False)
        made_of = [NAME, files.sha256(folder / WEIGHTS), len(train), len(test), given["sources"]]
        self.fingerprint = fingerprint_json(made_of)[:16]

    def build(self, architecture: Architecture) -> nn.Module:
        sizes = dict(architecture)
        removed = float(sizes.pop("removed"))
        network = build_resnet50(ResNetSpec(**sizes), self.training.seed)
        return narrow_bottlenecks(network, removed) if removed else network

    def remove(self, network: nn.Module, parts: Sequence[str], share: float) -> tuple[nn.Module, Architecture]:
        whole = build_resnet50(self._model.spec, self.training.seed)
        whole.load_state_dict(network.state_dict())
        return narrow_bottlenecks(whole, share), {**self.architecture, "removed": share}

    def smaller(self, share: float) -> Architecture:
        return {
            **self.architecture,
            **asdict(replace(self._model.spec, width=kept_count(self._model.spec.width, share))),
        }

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        return self._model.loss(network, batch)

    def logits(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        images_BHWC, _, weight_B = batch
        return network(self._model.normalise(images_BHWC)), weight_B

    def validation_loss(self, network: nn.Module) -> float:
        """Return the mean loss on the test images: as in the recipe, there are no others."""
        return -float(np.log(np.clip(self._probability_of_truth(network), 1e-12, 1)).mean())

    def outcomes(self, network: nn.Module) -> np.ndarray:
        rows_N2 = self._evaluated(network)
        return (rows_N2[:, 1] > 0.5).astype(np.float64)

    def _probability_of_truth(self, network: nn.Module) -> np.ndarray:
        return self._evaluated(network)[:, 0]

    def _evaluated(self, network: nn.Module) -> np.ndarray:
        """Return (probability of the class, 1.0 where it is the largest) of each whole test image."""

        def forward(network: nn.Module, batch: tuple) -> Tensor:
            images_BHWC, target_B, weight_B = batch
            share_BC = torch.softmax(network(self._model.normalise(images_BHWC)).float(), 1)
            right_B = (share_BC.argmax(1) == target_B).float()
            return torch.stack([share_BC.gather(1, target_B[:, None])[:, 0], right_B, weight_B], 1)

        rows_N3 = evaluate_network_outputs(network, self._held, self.device, self.training.eval_batch, forward).numpy()
        return rows_N3[rows_N3[:, 2] > 0, :2]

    def interval(self, outcomes_N: np.ndarray) -> tuple[float, float]:
        return wilson_interval(round(outcomes_N.sum()), len(outcomes_N))

    def one_prediction(self) -> Callable[[nn.Module], object]:
        images = torch.from_numpy(self._held.host_batch(np.array([0]))[0]).to(self.device.torch_device)
        image = self._model.normalise(images).cpu()
        return lambda network: network(image)

    def close(self) -> None:
        self.feed.close()
        self._held.close()
