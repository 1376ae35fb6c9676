"""Recipe resnet50 from its settings to its result: shards, network, loop, log, weights in a file or a bucket."""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.recipes.image_batches import ImageBatches, MadeUpSamples, ShardSamples
from ml_factory.recipes.recipe_run import (
    agree_on_run,
    is_writing_process,
    open_run_of_process,
)
from ml_factory.recipes.resnet50 import NAME, ResNetSpec, ResNetTraining
from ml_factory.recipes.shard_sources import local_shards
from ml_factory.recipes.worker_log import WorkerLog
from ml_factory.runs import RunFolder
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.mirror import Mirror, fetch_file
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.training.device import Device, pick_device
from ml_factory.training.spec import TrainSpec

WEIGHTS = "weights.state"  # of a finished run
_log = logging.getLogger("ml_factory.training")


@dataclass(frozen=True)
class ImageSources:
    """Sources of the images.

    train, test : shards, as of `shard_sources.local_shards`.
    fake : made-up images in their place, train_size and test_size of them.
    train_size, test_size : samples expected in the shards, 0 for any number; an epoch is what they hold.
    image_size : height and width in pixels.
    workers : decoding threads.
    """

    train: str = ""
    test: str = ""
    fake: bool = False
    train_size: int = 0
    test_size: int = 0
    image_size: int = 32
    workers: int = 8
    allow_pipe: bool = False
    skip_broken: bool = False


@dataclass(frozen=True)
class ImageOutputs:
    """Files and addresses of the results; "" for none.

    save_model : file of the weights; model_bucket : bucket that gets it too.
    logdir : folder or gs:// of the workers' logs and of TensorBoard events; "" for the run's folder.
    load_object : object in the bucket with the weights to begin with.
    load_file : local file with them; where both are given, the file that the object is downloaded to.
    """

    save_model: str = ""
    model_bucket: str = ""
    logdir: str = ""
    load_file: str = ""
    load_object: str = ""


@dataclass(frozen=True)
class ImageTrainingSettings:
    """All settings of a run."""

    network: ResNetSpec = field(default_factory=ResNetSpec)
    training: TrainSpec = field(default_factory=TrainSpec)
    sources: ImageSources = field(default_factory=ImageSources)
    outputs: ImageOutputs = field(default_factory=ImageOutputs)


def train_resnet50(
    workspace: Workspace, settings: ImageTrainingSettings, *, fresh: bool = False, emit: Callable[[str], object] = print
) -> dict:
    """Train, or resume, or return the result of the finished run; the weights are those of the best epoch.

    emit : gets the lines of the log.
    Raises SettingsError, FileError, WorkspaceError, CheckpointError.
    """
    outputs, sources = settings.outputs, settings.sources
    weights = _initial_weights(outputs)
    device = pick_device(settings.training)
    train, test = open_samples(settings, "train"), open_samples(settings, "test")
    with (
        closing(image_batches(train, settings, device, True)) as feed,
        closing(image_batches(test, settings, device, False)) as held,
    ):
        network = ResNetTraining(settings.network, settings.training, device, weights)
        data = {"train": _data_identity(train), "test": _data_identity(test), "image_size": sources.image_size}
        identity = {"network": asdict(settings.network), "training": settings.training.identity(), "data": data,
                    "initial": network.initial}  # fmt: skip
        run, done = agree_on_run(workspace, NAME, identity, device.processes, fresh)
        if done is not None:
            emit(f"{run.run_id} is trained already: {run.folder} (--fresh trains again)")
            return done | (_save_weights(outputs, run) if is_writing_process() else {})
        if is_writing_process():
            emit(f"{len(train):,} training and {len(test):,} test samples, {run.run_id} in {run.folder}")
        logs = _LogFolder(run.folder / "workers", outputs.logdir)
        log = WorkerLog(
            logs.folder, device, samples=len(train), batch=min(settings.training.batch, len(train)),
            every=settings.training.log_steps, emit=emit,
        )  # fmt: skip
        try:
            given = {"libraries": ("torchvision", "pillow"), "threads": device.threads, "mirror": "off"}
            opening = open_run_of_process(workspace, NAME, run, _plain(settings), device.processes, **given)
            with opening as (opened, checkpoints):
                callbacks = (log, logs.after_epoch, *(opened.callbacks if opened else ()))
                result = network.fit(feed, held, data=data, callbacks=callbacks, checkpoints=checkpoints)
                facts = _facts(run.run_id, log, network, held, settings, result, train, test)
                facts["log"] = outputs.logdir or str(logs.folder)
                if opened:
                    write_state_file(run.folder / WEIGHTS, _state(network))
                    facts |= _save_weights(outputs, run)
                    opened.finish(facts, {name: facts[name] for name in ("accuracy", "max_accuracy", "loss")})
        finally:
            logs.upload()
            if is_writing_process():
                workspace.push()
    return facts


def open_samples(settings: ImageTrainingSettings, part: str) -> Any:
    """Open the training or test samples."""
    sources, seed, classes = settings.sources, settings.training.seed, settings.network.classes
    expected = getattr(sources, f"{part}_size")
    if sources.fake:
        return MadeUpSamples(expected or (1024 if part == "train" else 256), sources.image_size, classes, seed)
    paths = local_shards(getattr(sources, part), allow_pipe=sources.allow_pipe)
    samples = ShardSamples(paths, sources.image_size, classes, seed, sources.skip_broken)
    if expected and expected != len(samples):
        _log.warning(
            "--%ssize gives %s samples, the %d shards hold %s: an epoch is once over those", part, f"{expected:,}",
            len(paths), f"{len(samples):,}",
        )  # fmt: skip
    return samples


def image_batches(samples: Any, settings: ImageTrainingSettings, device: Device, training: bool) -> ImageBatches:
    return ImageBatches(
        samples, device, training=training, workers=settings.sources.workers, seed=settings.training.seed
    )


def _data_identity(samples: Any) -> str:
    """Return the fingerprint of the samples' keys, members and shards, without the shards' folder."""
    if isinstance(samples, MadeUpSamples):
        return f"fake-{len(samples)}"
    digest = hashlib.sha256()
    for shard in samples.shards:
        members = [[key, dict(parts)] for key, parts in zip(shard.keys, shard.members, strict=True)]
        digest.update(fingerprint_json([shard.name, members]).encode())
    return digest.hexdigest()[:24]


def _initial_weights(outputs: ImageOutputs) -> Mapping | None:
    """Return the weights to begin with; None without any."""
    if outputs.load_object:
        path = _download(outputs)
    elif outputs.load_file:
        path = Path(outputs.load_file).expanduser()
    else:
        return None
    try:
        state = read_state_file(path)
    except CheckpointError as error:
        raise FactoryError(
            "These are no weights of this recipe", where=path, got=error, wanted="a file that --save_model wrote",
            next_step="files of torch.save are programs when they are read, and are not",
        ) from None  # fmt: skip
    if state.get("model") != NAME or not isinstance(state.get("weights"), dict):
        raise FactoryError("These are no weights of this recipe", where=path, got=f"the state of {state.get('model')}",
                           wanted="a file that --save_model wrote")  # fmt: skip
    return state["weights"]


def _download(outputs: ImageOutputs) -> Path:
    """Return the local file of the object with the weights to begin with."""
    address = outputs.load_object
    if not outputs.model_bucket and "://" not in address:
        raise SettingsError("Which bucket holds this object?", where="--load_chkpt_file", got=address,
                            next_step="add --model_bucket (BUCKET), or give gs://BUCKET/OBJECT")  # fmt: skip
    bucket = outputs.model_bucket.removeprefix("gs://").rstrip("/")
    found = fetch_file(address if "://" in address else f"gs://{bucket}/{address}")
    if not outputs.load_file:
        return found
    target = Path(outputs.load_file).expanduser()
    target = target / found.name if files.is_folder(target) else target
    files.replace(target, lambda temporary: shutil.copyfile(found, temporary))
    return target


def _state(network: ResNetTraining) -> dict:
    weights = {name: value.detach().cpu().clone() for name, value in network.network.state_dict().items()}
    return {"model": NAME, "network": asdict(network.spec), "weights": weights}


def _save_weights(outputs: ImageOutputs, run: RunFolder) -> dict:
    """Write the weights of the finished run to the requested file, and to the bucket."""
    if not outputs.save_model:
        return {}
    path = Path(outputs.save_model).expanduser()
    files.replace(path, lambda temporary: shutil.copyfile(run.folder / WEIGHTS, temporary))
    return {"saved": str(path)} | ({"uploaded": _upload(path, outputs.model_bucket)} if outputs.model_bucket else {})


def _upload(path: Path, bucket: str) -> str:
    """Upload a local file, verified, and return its address."""
    url = bucket if "://" in bucket else f"gs://{bucket}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / path.name)
        Mirror(url, folder).push()
    return f"{url.rstrip('/')}/{path.name}"


def _facts(run_id: str, log: WorkerLog, network: ResNetTraining, held: ImageBatches, settings: ImageTrainingSettings,
           result: Any, train: Any, test: Any) -> dict:  # fmt: skip
    """Evaluate the kept weights, log the totals and return the result."""
    kept = network.evaluate(held, settings.training.eval_batch)
    skipped = [*train.skipped, *test.skipped]
    if skipped:
        _log.warning("%d broken shards or samples were left out: %s", len(skipped), ", ".join(skipped[:5]))
    return {
        "run": run_id, "recipe": NAME, **log.end(), "accuracy": kept["accuracy"], "loss": kept["loss"],
        "best_epoch": result.best_epoch, "history": result.history, "train_samples": len(train),
        "test_samples": len(test), "skipped": skipped, "exact": result.exact, "machine": result.machine,
        "settings": _plain(settings),
    }  # fmt: skip


def _plain(settings: ImageTrainingSettings) -> dict:
    return asdict(replace(settings))


class _LogFolder:
    """Folder of the logs, and its copy in a bucket after every epoch."""

    def __init__(self, own: Path, logdir: str):
        self._bucket = Mirror(logdir.rstrip("/")) if logdir.startswith("gs://") else None
        self.folder = self._bucket.folder if self._bucket else Path(logdir).expanduser() if logdir else own
        if self._bucket:
            self._bucket.pull()  # a log that another machine began is continued

    def after_epoch(self, epoch: int, metrics: Mapping) -> None:
        if self._bucket:
            self._bucket.push_in_background()

    def upload(self) -> None:
        if self._bucket:
            self._bucket.push()
