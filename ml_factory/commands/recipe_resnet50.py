"""Recipe that trains torchvision's ResNet-50 on images in shards: resnet50."""

import os
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from typer import Option

from ml_factory.argument_checks import check_seed
from ml_factory.cli_output import print_json, stderr_console
from ml_factory.commands.options import Fresh, Seed, WorkspaceOptions
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.process_identity import wants_bfloat16
from ml_factory.storage.workspace import Workspace

image_training, network_file = (
    LazyModule("ml_factory.recipes.image_training"),
    LazyModule("ml_factory.recipes.resnet50"),
)
spec_file = LazyModule("ml_factory.training.spec")


@dataclass(frozen=True)
class ShardOptions:
    """Images"""

    wds_traindir: Annotated[
        str, Option("--wds-traindir", envvar="WDS_TRAIN_DIR", help="Training shards: folder, gs://…, braces, pipe:…")
    ] = ""
    wds_testdir: Annotated[str, Option("--wds-testdir", envvar="WDS_VAL_DIR", help="Test shards.")] = ""
    trainsize: Annotated[int, Option("--trainsize", envvar="TRAIN_SIZE", help="Samples expected; 0: any.")] = 0
    testsize: Annotated[int, Option("--testsize", envvar="TEST_SIZE", help="Samples expected; 0: any.")] = 0
    fake_data: Annotated[bool, Option("--fake-data", help="Made-up images, --trainsize of them.")] = False
    image_size: Annotated[int, Option("--image-size", min=8, help="Height and width in pixels.")] = 32
    num_workers: Annotated[int, Option("--num-workers", envvar="NUM_WORKERS", min=1, help="Decoding threads.")] = 8
    allow_pipe: Annotated[bool, Option("--allow-pipe", help="Run the commands of pipe: sources, no shell.")] = False
    skip_broken: Annotated[bool, Option("--skip-broken", help="Leave out broken shards and samples; counted.")] = False


@dataclass(frozen=True)
class StepOptions:
    """Training"""

    num_epochs: Annotated[int, Option("--num-epochs", envvar="NUM_EPOCHS", min=1, help="Times over the samples.")] = 18
    batch_size: Annotated[
        int, Option("--batch-size", envvar="BATCH_SIZE", min=1, help="Samples of a step, of all replicas together.")
    ] = 128
    test_set_batch_size: Annotated[
        int, Option("--test-set-batch-size", envvar="TEST_BATCH_SIZE", min=1, help="Samples a batch of evaluation.")
    ] = 64
    lr: Annotated[float, Option("--lr", help="Highest learning rate: climbs, then falls on a cosine.")] = 2e-3
    weight_decay: Annotated[float, Option("--weight-decay", help="Of matrices.")] = 0.05
    warmup: Annotated[float, Option("--warmup", help="Share of all steps over which the rate climbs.")] = 0.1
    log_steps: Annotated[int, Option("--log-steps", min=1, help="Steps between two lines.")] = 10
    device: Annotated[str, Option("--device", help="auto, cpu, cuda or xla.")] = "auto"
    precision: Annotated[str, Option("--precision", help="auto, fp32, bf16 or fp16; XLA_USE_BF16=1: bf16.")] = "auto"
    threads: Annotated[int, Option("--threads", min=0, help="CPU threads; 0: every core.")] = 0


@dataclass(frozen=True)
class NetworkOptions:
    """Network"""

    classes: Annotated[int, Option("--classes", help="Number of classes.")] = 10
    width: Annotated[int, Option("--width", help="Channels of the first stage; 64 is ResNet-50, 16 suits a CPU.")] = 64
    stem: Annotated[str, Option("--stem", help="small (for about 32 pixels) or standard.")] = "small"
    sync_bn: Annotated[bool, Option("--sync-bn", help="Batch normalisation over all processes.")] = False
    label_smoothing: Annotated[float, Option("--label-smoothing", help="Share of the target all classes get.")] = 0.1


@dataclass(frozen=True)
class ResultOptions:
    """Results"""

    save_model: Annotated[str, Option("--save-model", envvar="SAVE_MODEL", help="File of the weights.")] = ""
    model_bucket: Annotated[
        str, Option("--model-bucket", envvar="BUCKET", help="Bucket that gets --save-model and has --load-chkpt-file.")
    ] = ""
    load_chkpt_file: Annotated[
        str, Option("--load-chkpt-file", envvar="LOAD_CHKPT_FILE", help="Weights to begin with: object in the bucket.")
    ] = ""
    load_chkpt_dir: Annotated[
        str,
        Option(
            "--load-chkpt-dir",
            envvar="LOAD_CHKPT_DIR",
            help="Weights to begin with: local file; that of --load-chkpt-file.",
        ),
    ] = ""
    logdir: Annotated[
        str, Option("--logdir", envvar="LOGDIR", help="Logs and TensorBoard events: folder or gs://; empty: the run's.")
    ] = ""


def resnet50(
    shards: ShardOptions,
    step: StepOptions,
    network: NetworkOptions,
    results: ResultOptions,
    place: WorkspaceOptions,
    seed: Seed = 0,
    fresh: Fresh = False,
) -> None:
    """Train ResNet-50 on images in shards; the same command resumes.
    Example: `python -m ml_factory recipe resnet50 --wds-traindir train/ --wds-testdir test/ --num-epochs 18`
    """
    check_packages_installed("torch", "torchvision", "webdataset", "PIL")
    settings = image_training.ImageTrainingSettings(
        network=network_file.ResNetSpec(
            network.classes, network.width, network.stem, network.sync_bn, network.label_smoothing
        ),
        training=spec_file.TrainSpec(
            epochs=step.num_epochs, batch=step.batch_size, eval_batch=step.test_set_batch_size, lr=step.lr,
            weight_decay=step.weight_decay, warmup=step.warmup, patience=0, seed=check_seed(seed), device=step.device,
            precision=_precision(step.precision), threads=step.threads, log_steps=step.log_steps,
        ),
        sources=image_training.ImageSources(
            train=_shards(shards.wds_traindir, "TRAIN_SHARDS", shards.fake_data),
            test=_shards(shards.wds_testdir, "VAL_SHARDS", shards.fake_data),
            fake=shards.fake_data, train_size=shards.trainsize, test_size=shards.testsize,
            image_size=shards.image_size, workers=shards.num_workers, allow_pipe=shards.allow_pipe,
            skip_broken=shards.skip_broken,
        ),
        outputs=image_training.ImageOutputs(
            save_model=results.save_model, model_bucket=results.model_bucket if _uses_bucket(results) else "",
            logdir=results.logdir or _dated_logs(), load_file=results.load_chkpt_dir,
            load_object=results.load_chkpt_file,
        ),
    )  # fmt: skip
    emit = stderr_console.out if place.as_json else print
    facts = image_training.train_resnet50(Workspace(place.workspace), settings, fresh=fresh, emit=emit)
    if place.as_json:
        print_json(facts)
    else:
        print(f"accuracy {facts['accuracy']:.2%} on {facts['test_samples']:,} test samples, epoch "
              f"{facts['best_epoch']} kept (the least loss on these samples); last epoch "
              f"{facts['history'][-1]['accuracy']:.2%}")  # fmt: skip


def _uses_bucket(results: ResultOptions) -> bool:
    return bool(results.save_model or results.load_chkpt_file)


def _shards(given: str, variable: str, fake: bool) -> str:
    """Return the source of shards: as given, else from BUCKET and the guide's variable."""
    if given or fake:
        return given
    bucket, shards = os.environ.get("BUCKET", "").removeprefix("gs://").strip("/"), os.environ.get(variable, "")
    if bucket and shards:
        return f"gs://{bucket}/{shards}"
    option, whole = {"TRAIN_SHARDS": ("--wds_traindir", "WDS_TRAIN_DIR")}.get(
        variable, ("--wds_testdir", "WDS_VAL_DIR")
    )
    raise SettingsError(
        "No shards are named", where=option, wanted=f"a folder, gs://… or files in braces, here or in {whole}",
        next_step=f"give {option}, or set BUCKET and {variable}; or try it with --fake_data",
    )  # fmt: skip


def _dated_logs() -> str:
    """Return the guide's default of LOGDIR: a dated folder of BUCKET; "" without a bucket."""
    bucket = os.environ.get("BUCKET", "").removeprefix("gs://").strip("/")
    return f"gs://{bucket}/log-{datetime.now():%Y%m%d%H%M%S}" if bucket else ""


def _precision(given: str) -> str:
    """Return bf16 where XLA_USE_BF16 is set and --precision is not."""
    return "bf16" if given == "auto" and wants_bfloat16() else given
