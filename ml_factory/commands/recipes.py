"""Trainings of other fields: recipe shards, resnet50, sdce, t5, compress. Their packages are imported when called."""

import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ml_factory.argument_checks import check_file_exists
from ml_factory.cli_output import cli_progress_bars, print_json, print_status, stderr_console
from ml_factory.commands.options import Fresh, Json, Place, Seed
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.process_identity import process_rank, wants_bfloat16
from ml_factory.storage.files import files
from ml_factory.storage.mirror import fetch_file
from ml_factory.storage.workspace import Workspace

shards_file, spec_file = LazyModule("ml_factory.recipes.shards"), LazyModule("ml_factory.training.spec")
resnet50_file = LazyModule("ml_factory.recipes.resnet50")
sdce_run = LazyModule("ml_factory.recipes.sdce_run")
t5_file, compress_file = LazyModule("ml_factory.recipes.t5"), LazyModule("ml_factory.recipes.compress")

AT_LEAST_0, AT_LEAST_1 = Parameter(validator=Number(gte=0)), Parameter(validator=Number(gte=1))
Count = Annotated[int, AT_LEAST_1]
CountOrZero = Annotated[int, AT_LEAST_0]


def shards(
    output: Path, *, images: Path | None = None, arrays: Path | None = None, part: str = "", per_shard: Count = 1000,
    prefix: str = "shard", seed: Seed = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Write images as tar shards, as WebDataset reads them.

    Example: `python -m ml_factory recipe shards OUTPUT --arrays cifar10.npz --part train --per-shard 1000`

    Args:
        output: Folder of the shards; it is made.
        images: Folder with a folder of images for each class.
        arrays: NPZ with x uint8 (N, H, W, 3) and y (N,), or x_train and y_train, ….
        part: Suffix of the arrays: train, test.
        per_shard: Samples a shard.
        prefix: Shards are PREFIX-000000.tar and so on.
    """
    if (images is None) is (arrays is None):
        raise SettingsError("Images come from one place", where="recipe shards", wanted="--images or --arrays")
    if arrays is not None:
        samples = shards_file.array_samples(check_file_exists(arrays.expanduser(), "one NPZ file"), part)
    else:
        samples = shards_file.folder_samples(images.expanduser())
    written = shards_file.write_shards(samples, output.expanduser(), per_shard, prefix, seed)
    if as_json:
        print_json(written)
    else:
        print(f"{written['samples']:,} samples of {written['classes']} classes in {written['shards']} shards: "
              f"{written['pattern']}")  # fmt: skip


def resnet50(
    *, place: Place = Place(), seed: Seed = 0, fresh: Fresh = False,
    wds_traindir: Annotated[str, Parameter(env_var="WDS_TRAIN_DIR")] = "",
    wds_testdir: Annotated[str, Parameter(env_var="WDS_VAL_DIR")] = "",
    trainsize: Annotated[int, Parameter(env_var="TRAIN_SIZE")] = 0,
    testsize: Annotated[int, Parameter(env_var="TEST_SIZE")] = 0,
    fake_data: bool = False, image_size: Count = 32,
    num_workers: Annotated[Count, Parameter(env_var="NUM_WORKERS")] = 8,
    num_epochs: Annotated[Count, Parameter(env_var="NUM_EPOCHS")] = 18,
    batch_size: Annotated[Count, Parameter(env_var="BATCH_SIZE")] = 128,
    test_set_batch_size: Annotated[Count, Parameter(env_var="TEST_BATCH_SIZE")] = 64,
    lr: float = 2e-3, weight_decay: float = 0.05, warmup: float = 0.1, log_steps: Count = 10, device: str = "auto",
    precision: str = "auto", threads: CountOrZero = 0, classes: int = 10, width: int = 64, stem: str = "small",
    sync_bn: bool = False, label_smoothing: float = 0.1,
    save_model: Annotated[str, Parameter(env_var="SAVE_MODEL")] = "",
    model_bucket: Annotated[str, Parameter(env_var="BUCKET")] = "",
    load_chkpt_file: Annotated[str, Parameter(env_var="LOAD_CHKPT_FILE")] = "",
    load_chkpt_dir: Annotated[str, Parameter(env_var="LOAD_CHKPT_DIR")] = "",
    logdir: Annotated[str, Parameter(env_var="LOGDIR")] = "",
) -> None:  # fmt: skip
    """Train ResNet-50 on images in shards; the same command resumes.

    Example: `python -m ml_factory recipe resnet50 --wds-traindir train/ --wds-testdir test/ --num-epochs 18`

    Args:
        wds_traindir: Training shards: folder, gs://…, braces, pipe:gsutil cat gs://…
        wds_testdir: Test shards.
        trainsize: Samples expected; 0: any.
        testsize: Samples expected; 0: any.
        fake_data: Made-up images, --trainsize of them.
        image_size: Height and width in pixels.
        num_workers: Decoding threads.
        num_epochs: Times over the samples.
        batch_size: Samples of a step, of all replicas together.
        test_set_batch_size: Samples a batch of evaluation.
        lr: Highest learning rate: climbs, then falls on a cosine.
        weight_decay: Of matrices.
        warmup: Share of all steps over which the rate climbs.
        log_steps: Steps between two lines.
        device: auto, cpu, cuda or xla.
        precision: auto, fp32, bf16 or fp16; XLA_USE_BF16=1: bf16.
        threads: CPU threads; 0: every core.
        classes: Number of classes.
        width: Channels inside the blocks of the first stage; 64 is ResNet-50, 16 suits a CPU.
        stem: small (for about 32 pixels) or standard.
        sync_bn: Batch normalisation over all processes.
        label_smoothing: Share of the target all classes get.
        save_model: File of the weights.
        model_bucket: Bucket that gets --save-model and has --load-chkpt-file.
        load_chkpt_file: Weights to begin with: object in the bucket.
        load_chkpt_dir: Weights to begin with: local file; --load-chkpt-file is copied there.
        logdir: Logs and TensorBoard events: folder or gs://; empty: the run's.
    """
    check_packages_installed("torch", "torchvision", "webdataset", "PIL", "tensorboardX")
    training = spec_file.TrainSpec(
        epochs=num_epochs, batch=batch_size, eval_batch=test_set_batch_size, lr=lr, weight_decay=weight_decay,
        warmup=warmup, patience=0, seed=seed, device=device, precision=_precision(precision),
        threads=threads, log_steps=log_steps,
    )  # fmt: skip
    with cli_progress_bars("training resnet50"):
        facts = resnet50_file.train_resnet50(
            Workspace(place.workspace), training, train=_shards(wds_traindir, "TRAIN_SHARDS", fake_data),
            test=_shards(wds_testdir, "VAL_SHARDS", fake_data), fake=fake_data, train_size=trainsize,
            test_size=testsize, image_size=image_size, workers=num_workers, classes=classes, width=width, stem=stem,
            sync_bn=sync_bn, label_smoothing=label_smoothing, save_model=save_model,
            model_bucket=model_bucket if save_model else "", logdir=logdir or _dated_logs(),
            initial=_initial(load_chkpt_file, load_chkpt_dir, model_bucket), fresh=fresh,
            emit=stderr_console.out if place.as_json else print,
        )  # fmt: skip
    if process_rank():
        return
    if place.as_json:
        print_json(facts)
    else:
        print(f"accuracy {facts['accuracy']:.2%} on {facts['test_samples']:,} test samples, epoch "
              f"{facts['best_epoch']} kept (the least loss on {facts['held_out_samples']:,} training samples held out)",
              )  # fmt: skip


def _bucket() -> str:
    return os.environ.get("BUCKET", "").removeprefix("gs://").strip("/")


def _shards(given: str, variable: str, fake: bool) -> str:
    """Return the source of shards: as given, else from BUCKET and the guide's variable."""
    if given or fake:
        return given
    if _bucket() and os.environ.get(variable):
        return f"gs://{_bucket()}/{os.environ[variable]}"
    train = variable == "TRAIN_SHARDS"
    option, whole = ("--wds_traindir", "WDS_TRAIN_DIR") if train else ("--wds_testdir", "WDS_VAL_DIR")
    raise SettingsError(
        "No shards are named", where=option, wanted=f"a folder, gs://… or files in braces, here or in {whole}",
        next_step=f"give {option}, or set BUCKET and {variable}; or try it with --fake_data",
    )  # fmt: skip


def _initial(name: str, path: str, bucket: str) -> str:
    """Return the address of an object of the bucket, or the local path, where such an object is copied to."""
    if name and "://" not in name and not bucket:
        raise SettingsError("Which bucket holds this object?", where="--load_chkpt_file", got=name,
                            next_step="add --model_bucket (BUCKET), or give gs://BUCKET/OBJECT")  # fmt: skip
    address = name if "://" in name else f"gs://{bucket.removeprefix('gs://').rstrip('/')}/{name}"
    if not (name and path):
        return address if name else path
    found, target = fetch_file(address), Path(path).expanduser()
    target = target / found.name if files.is_folder(target) else target
    files.replace(target, lambda temporary: shutil.copyfile(found, temporary))
    return str(target)


def _dated_logs() -> str:
    """Return the guide's default of LOGDIR: a dated folder of BUCKET; "" without a bucket."""
    return f"gs://{_bucket()}/log-{datetime.now():%Y%m%d%H%M%S}" if _bucket() else ""


def _precision(given: str) -> str:
    """Return bf16 where XLA_USE_BF16 is set and --precision is not."""
    return "bf16" if given == "auto" and wants_bfloat16() else given


def sdce(
    *, base_model: str | None = None, surrogate_model: str | None = None, init_from_scratch: bool | None = None,
    gradient_checkpointing: bool | None = None, dataset: str | None = None, dataset_config: str | None = None,
    max_seq_length: int | None = None, max_tokens: int | None = None, batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None, learning_rate: float | None = None,
    num_epochs: int | None = None, device: str | None = None, tpu_cores: int | None = None,
    tpu_num_hosts: int | None = None, mixed_precision: str | None = None, seed: int | None = None,
    output_dir: str | None = None, wandb_project: str | None = None, loss_type: str | None = None,
    standard_training: bool | None = None, surrogate_k: int | None = None, probability_threshold: float | None = None,
    surrogate_loss_weight_initial: float | None = None, surrogate_loss_weight_final: float | None = None,
    surrogate_cache: str | None = None, cache_dir: str | None = None, config: Path | None = None,
    fresh: Fresh = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train a language model on cross-entropy and the likely tokens of a second one.

    Example: `python -m ml_factory recipe sdce --base_model builtin:small --surrogate_model FOLDER --dataset a.txt`

    Args:
        base_model: Model that is trained: builtin:tiny, small or medium, a folder, a name at the hub.
        surrogate_model: Frozen second model, named in the same way.
        init_from_scratch: Random first weights.
        gradient_checkpointing: Less memory for more time.
        dataset: A .txt, .jsonl or .parquet file, a folder, gs://bucket/file, or a name at the hub.
        dataset_config: Configuration of the hub's data set.
        max_seq_length: Tokens of a sequence.
        max_tokens: Tokens of the text at most; 0 for all.
        batch_size: Sequences a device and micro-batch.
        gradient_accumulation_steps: Micro-batches of a step.
        learning_rate: Highest learning rate.
        num_epochs: Times over the text.
        device: auto, cpu, cuda or tpu.
        tpu_cores: Cores of a TPU host; the chips found are used and named.
        tpu_num_hosts: Hosts of a TPU slice.
        mixed_precision: auto, no, bf16 or fp16 (not on a TPU).
        seed: Same seed, same data, same result.
        output_dir: Folder or gs://bucket/prefix of checkpoints, log, model.
        wandb_project: W&B project of the log's mirror.
        loss_type: surrogate, kl or standard.
        standard_training: Cross-entropy only, as --loss-type standard.
        surrogate_k: Tokens of the surrogate at a position (30).
        probability_threshold: Tokens below are left out (0.02).
        surrogate_loss_weight_initial: Weight at the first step (1.0).
        surrogate_loss_weight_final: Weight at the last step (0.0).
        surrogate_cache: float32: compute the surrogate's tokens once, on disk; none: in each step.
        cache_dir: Folder of the caches; empty: the user's cache folder.
        config: YAML with sections model, surrogate, data, training; flags win.
    """
    given = {name: value for name, value in locals().items() if name != "as_json"}
    with cli_progress_bars("training sdce"):
        result = sdce_run.run_sdce(**given, on_status=print_status)
    if result and not process_rank():
        print_json(result) if as_json else print(sdce_run.summary(result))


def t5(
    *, place: Place = Place(), seed: Seed = 0, fresh: Fresh = False, data: str = "", train: str = "",
    validation: str = "", test: str = "", validation_share: float = 0.1, test_share: float = 0.1,
    fake_data: bool = False, model: str = "builtin:tiny", from_scratch: bool = False, vocabulary: Count = 2000,
    max_length: Count = 128, num_epochs: Count = 6, batch_size: Count = 64, accumulate: Count = 1,
    learning_rate: float = 2e-3, weight_decay: float = 0.01, warmup: float = 0.1, patience: CountOrZero = 2,
    gradient_checkpointing: bool = False, device: str = "auto", precision: str = "auto", threads: CountOrZero = 0,
    save_seconds: Annotated[float, AT_LEAST_0] = 60.0,
) -> None:  # fmt: skip
    """Train a T5 to write the label of a text; the same command resumes.

    Example: `python -m ml_factory recipe t5 --data tweets.tsv`

    Args:
        data: Tab-separated file with the columns Id, Text, Label; split by contiguous blocks.
        train: Training rows, in place of --data.
        validation: Rows by which the epoch is chosen.
        test: Test rows.
        validation_share: Share of --data.
        test_share: Share of --data.
        fake_data: 2,000 made-up texts of two labels.
        model: builtin:tiny or small, t5-small, t5-base, t5-large, a folder, a name at the hub.
        from_scratch: Random first weights, and a tokenizer of its own.
        vocabulary: Pieces of a tokenizer of its own.
        max_length: Tokens of a text at most.
        num_epochs: At most; --patience ends sooner.
        batch_size: Rows of a step, of all devices together.
        accumulate: Parts of a step: less memory.
        learning_rate: Highest learning rate.
        weight_decay: Of matrices.
        warmup: Share of all steps over which the rate climbs.
        patience: Epochs without a better loss before it stops; 0: never.
        gradient_checkpointing: Less memory for more time.
        device: auto, cpu, cuda or xla.
        precision: auto, fp32, bf16 or fp16; XLA_USE_BF16=1: bf16.
        threads: CPU threads; 0: every core.
        save_seconds: Least seconds between two saves in an epoch.
    """
    check_packages_installed("torch", "transformers", "tokenizers", "sklearn", "matplotlib")
    training = spec_file.TrainSpec(
        epochs=num_epochs, batch=batch_size, accumulate=accumulate, lr=learning_rate, weight_decay=weight_decay,
        warmup=warmup, patience=patience, seed=seed, device=device, precision=_precision(precision),
        recompute=gradient_checkpointing, threads=threads, save_seconds=save_seconds,
    )  # fmt: skip
    with cli_progress_bars("training t5"):
        facts = t5_file.run_t5(
            Workspace(place.workspace), training, data=data, train=train, validation=validation, test=test,
            validation_share=validation_share, test_share=test_share, made_up=2000 if fake_data else 0, model=model,
            from_scratch=from_scratch, vocabulary=vocabulary, max_length=max_length, fresh=fresh,
            on_status=print_status,
        )  # fmt: skip
    if facts and not process_rank():
        print_json(facts) if place.as_json else print(t5_file.summary(facts))


def compress(
    *, place: Place = Place(), fresh: Fresh = False, model: str = "",
    methods: str = "magnitude:0.5,structured:0.5,int8_dynamic,int8_weights", recovery_epochs: Count = 1,
    recovery_rate: float = 0.3, rounds: Count = 60, device: str = "auto", threads: CountOrZero = 0,
) -> None:  # fmt: skip
    """Prune and quantize a trained T5; one table of size, latency and quality.

    Example: `python -m ml_factory recipe compress --model workspace/results/t5/RUN --methods structured:0.5`

    Args:
        model: Folder of a finished run of recipe t5.
        methods: magnitude:SHARE, structured:SHARE, int8_dynamic, int8_weights, separated by commas.
        recovery_epochs: Of training after pruning.
        recovery_rate: Share of the first learning rate in it.
        rounds: Predictions that are timed.
        device: auto, cpu, cuda or xla, of the trainings.
        threads: CPU threads of the trainings; 0: every core.
    """
    check_packages_installed("torch", "torchao", "matplotlib")
    with cli_progress_bars("compressing"):
        facts = compress_file.run_compress(
            Workspace(place.workspace), model, methods=methods, recovery_epochs=recovery_epochs,
            recovery_rate=recovery_rate, rounds=rounds, device=device, threads=threads, fresh=fresh,
            on_status=print_status,
        )  # fmt: skip
    print_json(facts) if place.as_json else print(compress_file.summary(facts))
