"""ResNet-50 of torchvision on images in shards: network, loss and evaluation, trained by the library's own loop.

B rows of a batch, C classes, H height, W width.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import ModelFitResult
from ml_factory.recipes.image_batches import ImageBatches
from ml_factory.seeding import derive_seed
from ml_factory.training.device import Device, deterministic_device
from ml_factory.training.evaluate import evaluate_network_outputs
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec
from ml_factory.training.sync_batch_norm import SyncBatchNorm2d

resnet = LazyModule("torchvision.models.resnet")
NAME = "resnet50"
STEMS = ("small", "standard")
# Mean and standard deviation of the channels of natural photographs (ImageNet), 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ResNetSpec:
    """Settings of the network.

    classes : number of classes.
    width : channels of the first stage, 64 in the original.
    stem : small: a 3x3 convolution and no pooling, for images of about 32 pixels; standard: 7x7 in steps of 2, pooled.
    sync_bn : batch normalisation over all processes.
    label_smoothing : share of the target that all classes get.
    """

    classes: int = 10
    width: int = 64
    stem: str = "small"
    sync_bn: bool = False
    label_smoothing: float = 0.1

    def __post_init__(self):
        for name, least in (("classes", 2), ("width", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise SettingsError("Cannot build this network", where=name, got=getattr(self, name), wanted=least)
        if self.stem not in STEMS:
            raise SettingsError("Unknown stem", where="stem", got=repr(self.stem), wanted=" or ".join(STEMS))
        if not 0 <= self.label_smoothing < 1:
            raise SettingsError(
                "A share of the target", where="label_smoothing", got=self.label_smoothing, wanted="[0, 1)"
            )


def build_resnet50(spec: ResNetSpec, seed: int) -> nn.Module:
    """Return torchvision's ResNet-50 with this stem and width; its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, NAME, "init"))
        network = resnet.ResNet(
            resnet.Bottleneck, [3, 4, 6, 3], num_classes=spec.classes, zero_init_residual=True,
            norm_layer=SyncBatchNorm2d if spec.sync_bn else nn.BatchNorm2d,
        )  # fmt: skip
        if spec.width != 64:
            network = _narrowed(network, spec)
        if spec.stem == "small":
            network.conv1 = nn.Conv2d(3, spec.width, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
            network.maxpool = nn.Identity()
    return network


def _narrowed(network: nn.Module, spec: ResNetSpec) -> nn.Module:
    """Return the network with every number of channels scaled by width / 64."""
    kinds = {nn.Conv2d: ("in_channels", "out_channels"), nn.Linear: ("in_features",)}
    for name, layer in list(network.named_modules()):
        parent, _, own = name.rpartition(".")
        holder = network.get_submodule(parent)
        if isinstance(layer, nn.Conv2d):
            inner, outer = (_scaled(getattr(layer, one), spec.width) for one in kinds[nn.Conv2d])
            made = nn.Conv2d(inner, outer, layer.kernel_size, layer.stride, layer.padding, bias=False)
            nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
            setattr(holder, own, made)
        elif isinstance(layer, nn.BatchNorm2d):
            made = type(layer)(_scaled(layer.num_features, spec.width))
            nn.init.constant_(made.weight, float(layer.weight.detach()[0]))  # 0 at the end of a block
            setattr(holder, own, made)
        elif isinstance(layer, nn.Linear):
            setattr(holder, own, nn.Linear(_scaled(layer.in_features, spec.width), layer.out_features))
    return network


def _scaled(channels: int, width: int) -> int:
    return channels if channels == 3 else max(channels * width // 64, 1)


class ResNetTraining:
    """One training: network, loss, evaluation.

    accuracies : share of the test samples in the right class, of the last evaluation.
    """

    def __init__(
        self, spec: ResNetSpec, training: TrainSpec, device: Device, weights: Mapping[str, Tensor] | None = None
    ):
        self.spec, self.training, self.device = spec, training, device
        self.network = build_resnet50(spec, training.seed)
        self.initial = ""
        if weights is not None:
            self.network.load_state_dict(check_weights(self.network, weights))
            self.initial = _fingerprint(weights)
        mean, std = (torch.tensor(values)[None, :, None, None] * 255 for values in (MEAN, STD))
        self._mean, self._std = device.to_device(mean), device.to_device(std)
        self._last: dict[str, float] = {}

    def loss(self, network: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (sum of w * cross-entropy with smoothed labels, sum of w)."""
        images_BHWC, target_B, weight_B = batch
        logits_BC = network(self.normalise(images_BHWC)).float()
        loss_B = F.cross_entropy(logits_BC, target_B, reduction="none", label_smoothing=self.spec.label_smoothing)
        return (weight_B * loss_B).sum(), weight_B.sum()

    def evaluate(self, feed: ImageBatches, size: int) -> dict[str, float]:
        """Return mean cross-entropy and accuracy of all whole samples."""

        def forward(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            images_BHWC, target_B, weight_B = batch
            logits_BC = network(self.normalise(images_BHWC)).float()
            loss_B = F.cross_entropy(logits_BC, target_B, reduction="none")
            right_B = (logits_BC.argmax(1) == target_B).float()
            return torch.stack([loss_B * weight_B, right_B * weight_B, weight_B], 1)

        self._take_statistics_of_rank_zero()
        rows_N3 = evaluate_network_outputs(self.network, feed, self.device, size, forward)
        loss, right, weight = rows_N3.double().sum(0).tolist()
        return {"loss": loss / weight, "accuracy": right / weight}

    def fit(
        self, feed: ImageBatches, held: ImageBatches, *, data: Mapping, callbacks: Sequence[Callable] = (),
        checkpoints: Any = None,
    ) -> ModelFitResult:  # fmt: skip
        """Train on `feed` and evaluate on `held` after every epoch.

        data : identity of both, which a checkpoint must match to be resumed.
        callbacks : as of the loop; `end_training(epoch)`, where one has it, is called before an evaluation.
        """
        past = _Epochs()

        def validate() -> float:
            for callback in callbacks:
                getattr(callback, "end_training", int)(past.finished + 1)
            self._last = self.evaluate(held, self.training.eval_batch)
            return self._last["loss"]

        with deterministic_device(self.device):
            return run_training_loop(
                self.network, len(feed), feed, self.loss, self.training, self.device,
                identity={"model": NAME, "settings": {**self.training.identity(), **asdict(self.spec),
                                                      "initial": self.initial}, "data": dict(data)},
                validation=Validation(validate, metrics=lambda: {"accuracy": self._last["accuracy"]}),
                callbacks=(past, *callbacks), checkpoints=checkpoints,
            )  # fmt: skip

    def normalise(self, images_BHWC: Tensor) -> Tensor:
        """Return images (B, 3, H, W) with channels of mean 0 and deviation 1."""
        return (images_BHWC.permute(0, 3, 1, 2).float() - self._mean) / self._std

    def _take_statistics_of_rank_zero(self) -> None:
        """Give all ranks the running statistics that the checkpoint keeps: those of their own rows differ."""
        processes = self.device.processes
        if processes.world > 1:
            with torch.no_grad():
                own = {name: value.cpu() for name, value in self.network.named_buffers()}
                for name, value in (processes.broadcast(own) or {}).items():
                    self.network.get_buffer(name).copy_(value)


class _Epochs:
    """Callback that counts finished epochs, those of earlier sessions included."""

    finished = 0

    def remember(self, past: Sequence[Mapping]) -> None:
        self.finished = len(past)

    def __call__(self, epoch: int, metrics: Mapping) -> None:
        self.finished = epoch


def check_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights if they are this network's. Raises SettingsError naming the first that differs."""
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
    if other := sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name)):
        raise SettingsError(
            "These weights are another network's", where=other[0], got=found.get(other[0], "none"),
            wanted=wanted.get(other[0], "none"), next_step="take the --width, --stem and --classes it was trained with",
        )  # fmt: skip
    return weights


def _fingerprint(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
