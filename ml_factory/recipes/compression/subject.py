"""A trained network that is to be compressed: what its methods need to know of it, and the loss of distillation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import SettingsError
from ml_factory.recipes.compression.variant_file import Architecture
from ml_factory.training.device import Device
from ml_factory.training.spec import TrainSpec

TEMPERATURE, HARD = 2.0, 0.5  # of the original's probabilities; share of the labels in the loss (Hinton et al. 2015)


class Subject:
    """Base of the trained networks.

    name : of the network. fingerprint : hash of weights and data.
    network : the trained one. architecture : what it is built from.
    parts : names of what can be removed from it whole.
    training : settings of its training. device : of recovery and evaluation.
    feed : training rows, as the loop reads them. quality : name of the figure.
    """

    name: str
    fingerprint: str
    network: nn.Module
    architecture: Architecture
    parts: tuple[str, ...]
    training: TrainSpec
    device: Device
    feed: Any
    quality: str

    def build(self, architecture: Architecture) -> nn.Module:
        """Return a network of this architecture, its weights a function of the seed."""
        raise NotImplementedError

    def remove(self, network: nn.Module, parts: Sequence[str], share: float) -> tuple[nn.Module, Architecture]:
        """Return a smaller network without this share of these parts, and its architecture."""
        raise NotImplementedError

    def smaller(self, share: float) -> Architecture:
        """Return the architecture of a student that is narrower by this share."""
        raise NotImplementedError

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        """Return (sum of w * loss, sum of w)."""
        raise NotImplementedError

    def logits(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        """Return (logits (M, C), weights (M,)) of a batch's M predictions."""
        raise NotImplementedError

    def validation_loss(self, network: nn.Module) -> float:
        raise NotImplementedError

    def outcomes(self, network: nn.Module) -> np.ndarray:
        """Return the quality of each test row, float64 (N,)."""
        raise NotImplementedError

    def interval(self, outcomes_N: np.ndarray) -> tuple[float, float]:
        """Return the 95 % interval of the mean of the outcomes."""
        raise NotImplementedError

    def one_prediction(self) -> Callable[[nn.Module], object]:
        """Return a function that predicts one test row on the CPU."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is open."""

    def check_parts(self, named: str) -> tuple[str, ...]:
        """Return the parts that a method of structured pruning names. Raises SettingsError."""
        if named == "structured":
            if not self.parts:
                raise SettingsError("This network has nothing to remove whole", where="methods", got=self.name,
                                    wanted="magnitude, int8_dynamic, int8_weights or distill")  # fmt: skip
            return self.parts
        if named not in self.parts:
            raise SettingsError("This network has no such part", where="methods", got=named,
                                wanted=", ".join(self.parts) or "none")  # fmt: skip
        return (named,)

    def distillation_loss(self, original: nn.Module) -> Callable[[nn.Module, tuple], tuple[Tensor, Tensor]]:
        """Return the loss of a student: half the labels', half the divergence from the original's probabilities."""
        original = original.eval().requires_grad_(False)

        def loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
            hard, weight = self.loss(network, batch)
            with torch.no_grad():
                wanted_MC, _ = self.logits(original, batch)
            logits_MC, weight_M = self.logits(network, batch)
            wanted_MC, logits_MC = (F.log_softmax(one.float() / TEMPERATURE, -1) for one in (wanted_MC, logits_MC))
            apart_M = F.kl_div(logits_MC, wanted_MC, reduction="none", log_target=True).sum(-1)
            return HARD * hard + (1 - HARD) * TEMPERATURE**2 * (apart_M * weight_M).sum(), weight

        return loss
