"""recipe resnet50: torchvision's ResNet-50 on images in shards, its log, and its weights in a file or a bucket.

B rows of a batch, C classes, H height, W width.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.argument_checks import check_values
from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.images import ImageBatches, MadeUpSamples, ShardSamples
from ml_factory.recipes.run import is_writing_process, open_recipe_run, weights_fingerprint
from ml_factory.recipes.shards import find_shards
from ml_factory.recipes.worker_log import WorkerLog
from ml_factory.storage.files import files
from ml_factory.storage.mirror import fetch_file
from ml_factory.storage.remote import Remote
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import evaluate_network_outputs
from ml_factory.training.device import Device, drawn_from, pick_device
from ml_factory.training.distributed import SyncBatchNorm2d
from ml_factory.training.loop import Validation
from ml_factory.training.spec import TrainSpec

resnet = LazyModule("torchvision.models.resnet")
NAME, WEIGHTS = "resnet50", "weights.state"
STEMS = ("small", "standard")
HELD_OUT = 0.1  # share of the training samples, those of the last shards, that choose the epoch
# Mean and standard deviation of the channels of natural photographs (ImageNet), 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_log = logging.getLogger("ml_factory.training")


def train_resnet50(
    workspace: Workspace, training: TrainSpec, *, train: str = "", test: str = "", fake: bool = False,
    train_size: int = 0, test_size: int = 0, image_size: int = 32, workers: int = 8, classes: int = 10,
    width: int = 64, stem: str = "small", sync_bn: bool = False, label_smoothing: float = 0.1, save_model: str = "",
    model_bucket: str = "", logdir: str = "", initial: str = "", fresh: bool = False,
    emit: Callable[[str], object] = print,
) -> dict:  # fmt: skip
    """Train, or resume, or return the result of the finished run; "" stands for no such file.

    The weights are those of the epoch with the least loss on the held-out training samples, HELD_OUT; the test samples
    are read once, with these weights.

    training : settings of the loop.
    train, test : shards, as of `shards.find_shards`; fake : made-up images in their place.
    train_size, test_size : samples expected in the shards, 0 for any number; an epoch is what they hold.
    image_size : height and width in pixels.
    workers : decoding threads.
    classes : number of classes.
    width : channels inside the blocks of the first stage, torchvision's width_per_group; 64 in the original.
    stem : small: a 3x3 convolution and no pooling, for images of about 32 pixels; standard: 7x7 in steps of 2, pooled.
    sync_bn : batch normalisation over all processes.
    label_smoothing : share of the target that all classes get.
    save_model : file of the weights; model_bucket : bucket that gets it too, with or without gs://.
    logdir : folder or gs:// of the workers' logs and of TensorBoard events; "" for the run's folder.
    initial : weights to begin with, a file that save_model wrote or its address in a bucket.
    emit : gets the lines of the log.
    Raises SettingsError, FileError, WorkspaceError, CheckpointError.
    """
    settings = {name: value for name, value in locals().items() if name not in ("workspace", "fresh", "emit")}
    settings["training"], some, any_ = asdict(training), "[1, inf)", "[0, inf)"
    check_values(
        settings, classes="[2, inf)", width=some, image_size=some, workers=some, train_size=any_, test_size=any_,
        stem=STEMS, label_smoothing="[0, 1)",
    )  # fmt: skip
    spec, device, writes = training, pick_device(training), is_writing_process()
    described = {name: settings[name] for name in ("classes", "width", "stem", "sync_bn", "label_smoothing")}
    network = build_resnet50(classes, width, stem, sync_bn=sync_bn, seed=spec.seed)
    initial = _load_weights(network, initial) if initial else ""
    say = emit if writes else (lambda line: None)
    made = (image_size, classes, spec.seed)
    whole, test_samples = (
        MadeUpSamples(expected or usual, *made) if fake else _open_shards(source, option, expected, *made)
        for source, option, expected, usual in (
            (train, "--trainsize", train_size, 1024), (test, "--testsize", test_size, 256),
        )
    )  # fmt: skip
    count = max(round(len(whole) * HELD_OUT), 1)
    taught = len(whole) - count  # samples; the others are held out
    if not taught:
        raise SettingsError("Too few training samples to hold some out", where="--wds_traindir", got=len(whole),
                            wanted="at least 2")  # fmt: skip
    data = {"train": whole.fingerprint, "test": test_samples.fingerprint, "image_size": image_size, "held_out": count}
    kept = described | {"initial": initial}
    identity = {"network": kept, "training": spec.identity(), "data": data}
    with ExitStack() as stack:
        run = stack.enter_context(open_recipe_run(
            workspace, NAME, identity, settings, device, fresh=fresh, libraries=("torchvision", "pillow"), mirror="off",
            say=say,
        ))  # fmt: skip
        if run.done is not None:
            return run.done | (_save_weights(save_model, model_bucket, run.folder) if writes else {})
        say(f"{taught:,} training, {count:,} held-out and {len(test_samples):,} test samples, "
            f"{run.run_id} in {run.folder}")  # fmt: skip
        feed, held_feed, test_feed = (
            stack.enter_context(closing(ImageBatches(
                samples, device, training=of == "train", first=first, count=length, workers=workers, seed=spec.seed)))
            for of, samples, first, length in (
                ("train", whole, 0, taught), ("held", whole, taught, count), ("test", test_samples, 0, None)
            )
        )  # fmt: skip
        log = stack.enter_context(closing(WorkerLog(
            logdir or run.folder / "workers", device, samples=taught, batch=min(spec.batch, taught),
            every=spec.log_steps, emit=emit,
        )))  # fmt: skip
        images, last = ImageLoss(label_smoothing, device), dict[str, float]()

        def validate() -> float:
            log.end_training()
            _take_statistics_of_rank_zero(network, device)
            last.update(images.evaluate(network, held_feed, spec.eval_batch))
            return last["loss"]

        validation = Validation(validate, metrics=lambda: {"accuracy": last["accuracy"]})
        fit = run.train(network, feed, images, spec, validation, settings=kept, data=data, callbacks=(log,))
        found = images.evaluate(network, test_feed, spec.eval_batch)
        facts = {
            "run": run.run_id, "recipe": NAME, **found, **log.end(fit.history, found["accuracy"]),
            "train_samples": taught, "held_out_samples": count, "test_samples": len(test_samples),
            "settings": settings, "log": logdir or str(log.folder),
        }  # fmt: skip
        if run.writes:
            own = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
            write_state_file(run.folder / WEIGHTS, {"model": NAME, "network": described, "weights": own})
            facts |= _save_weights(save_model, model_bucket, run.folder)
        return run.finish(facts, fit, ("accuracy", "loss"))


def build_resnet50(
    classes: int = 10, width: int = 64, stem: str = "small", *, sync_bn: bool = False, seed: int = 0
) -> nn.Module:
    """Return torchvision's ResNet-50 with this stem and width; its weights depend on the seed alone."""
    with drawn_from(seed, NAME):
        network = resnet.ResNet(
            resnet.Bottleneck, [3, 4, 6, 3], num_classes=classes, zero_init_residual=True,
            width_per_group=width, norm_layer=SyncBatchNorm2d if sync_bn else nn.BatchNorm2d,
        )  # fmt: skip
        if stem == "small":
            network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
            network.maxpool = nn.Identity()
    return network


class ImageLoss:
    """Loss of a batch (images_BHWC, target_B), and the evaluation of whole parts."""

    def __init__(self, smoothing: float, device: Device):
        self.smoothing, self.device = smoothing, device
        self._mean, self._std = (
            device.to_device(torch.tensor(values)[None, :, None, None] * 255) for values in (MEAN, STD)
        )

    def __call__(self, network: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (sum of cross-entropy with smoothed labels, number of images)."""
        logits_BC = self._logits(network, batch[0])
        loss_B = F.cross_entropy(logits_BC, batch[1], reduction="none", label_smoothing=self.smoothing)
        return loss_B.sum(), torch.ones_like(loss_B).sum()

    def evaluate(self, network: nn.Module, feed: ImageBatches, size: int) -> dict[str, float]:
        """Return mean cross-entropy and accuracy of all samples."""

        def forward(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            logits_BC = self._logits(network, batch[0])
            loss_B = F.cross_entropy(logits_BC, batch[1], reduction="none")
            return torch.stack([loss_B, (logits_BC.argmax(1) == batch[1]).float()], 1)

        loss, accuracy = evaluate_network_outputs(network, feed, self.device, size, forward).double().mean(0).tolist()
        return {"loss": loss, "accuracy": accuracy}

    def _logits(self, network: nn.Module, images_BHWC: Tensor) -> Tensor:
        return network((images_BHWC.permute(0, 3, 1, 2).float() - self._mean) / self._std).float()


def _take_statistics_of_rank_zero(network: nn.Module, device: Device) -> None:
    """Give all ranks the running statistics that the checkpoint keeps: those of their own rows differ."""
    if device.processes.world > 1:
        with torch.no_grad():
            own = {name: value.cpu() for name, value in network.named_buffers()}
            for name, value in (device.processes.broadcast(own) or {}).items():
                network.get_buffer(name).copy_(value)


def _open_shards(source: str, option: str, expected: int, *made: int) -> ShardSamples:
    """Open the samples of these shards, of which so many are expected by an option."""
    samples = ShardSamples(find_shards(source), *made)
    if expected and expected != len(samples):
        _log.warning("%s gives %s samples, the shards hold %s: an epoch is once over those", option, f"{expected:,}",
                     f"{len(samples):,}")  # fmt: skip
    return samples


# ---------------------------------------------------------------------- weights


def _load_weights(network: nn.Module, address: str) -> str:
    """Load the weights of this file or object into the network, and return their hash. Raises SettingsError."""
    path = fetch_file(address) if "://" in address else Path(address).expanduser()
    try:
        weights = read_state_file(path)["weights"]
        network.load_state_dict(weights)
    except (CheckpointError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise SettingsError(
            "These are no weights of this network", where=path, got=" ".join(str(error).split())[:300],
            wanted="a file that --save_model wrote, and its --width, --stem and --classes",
            next_step="files of torch.save are programs when they are read, and are not",
        ) from None  # fmt: skip
    return weights_fingerprint(weights)


def _save_weights(save_model: str, model_bucket: str, folder: Path) -> dict[str, str]:
    """Copy the weights of the finished run to the requested file, and to the bucket."""
    if not save_model:
        return {}
    path = Path(save_model).expanduser()
    files.replace(path, lambda temporary: shutil.copyfile(folder / WEIGHTS, temporary))
    if not model_bucket:
        return {"saved": str(path)}
    address = f"gs://{model_bucket.removeprefix('gs://').rstrip('/')}"
    Remote(address).put(path.name, path)
    return {"saved": str(path), "uploaded": f"{address}/{path.name}"}
