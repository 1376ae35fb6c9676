"""Recipe that trains a causal language model with the likely tokens of a second one: sdce."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from ml_factory.cli_output import cli_progress_of_work, cli_status_printer, print_json
from ml_factory.lazy_module import LazyModule
from ml_factory.process_identity import process_rank

sdce_settings, sdce_run = LazyModule("ml_factory.recipes.sdce_settings"), LazyModule("ml_factory.recipes.sdce_run")


@dataclass(frozen=True)
class SdceModelFlags:
    """Models"""

    base_model: Annotated[
        str | None, Option(help="Model that is trained: builtin:tiny, small or medium, a folder, a name at the hub.")
    ] = None
    surrogate_model: Annotated[str | None, Option(help="Frozen second model, named in the same way.")] = None
    init_from_scratch: Annotated[bool | None, Option("--init-from-scratch", help="Random first weights.")] = None
    gradient_checkpointing: Annotated[
        bool | None, Option("--gradient-checkpointing", help="Less memory for more time.")
    ] = None


@dataclass(frozen=True)
class SdceDataFlags:
    """Text"""

    dataset: Annotated[
        str | None, Option(help="A .txt, .jsonl or .parquet file, a folder, gs://bucket/file, or a name at the hub.")
    ] = None
    dataset_config: Annotated[str | None, Option(help="Configuration of the hub's data set.")] = None
    max_seq_length: Annotated[int | None, Option(help="Tokens of a sequence.")] = None
    max_tokens: Annotated[int | None, Option(help="Tokens of the text at most; 0 for all.")] = None


@dataclass(frozen=True)
class SdceTrainingFlags:
    """Training"""

    batch_size: Annotated[int | None, Option(help="Sequences a device and micro-batch.")] = None
    gradient_accumulation_steps: Annotated[int | None, Option(help="Micro-batches of a step.")] = None
    learning_rate: Annotated[float | None, Option(help="Highest learning rate.")] = None
    num_epochs: Annotated[int | None, Option(help="Times over the text.")] = None
    device: Annotated[str | None, Option(help="auto, cpu, cuda or tpu.")] = None
    tpu_cores: Annotated[int | None, Option(help="Cores of a TPU host; the chips found are used and named.")] = None
    tpu_num_hosts: Annotated[int | None, Option(help="Hosts of a TPU slice.")] = None
    mixed_precision: Annotated[str | None, Option(help="auto, no, bf16 or fp16 (not on a TPU).")] = None
    seed: Annotated[int | None, Option(help="Same seed, same data, same result.")] = None
    output_dir: Annotated[str | None, Option(help="Folder or gs://bucket/prefix of checkpoints, log, model.")] = None
    wandb_project: Annotated[str | None, Option(help="W&B project of the log's mirror.")] = None


@dataclass(frozen=True)
class SdceLossFlags:
    """Loss"""

    loss_type: Annotated[str | None, Option(help="surrogate, kl or standard.")] = None
    standard_training: Annotated[
        bool | None, Option("--standard-training", help="Cross-entropy only, as --loss-type standard.")
    ] = None
    surrogate_k: Annotated[int | None, Option(help="Tokens of the surrogate at a position (30).")] = None
    probability_threshold: Annotated[float | None, Option(help="Tokens below are left out (0.02).")] = None
    surrogate_loss_weight_initial: Annotated[float | None, Option(help="Weight at the first step (1.0).")] = None
    surrogate_loss_weight_final: Annotated[float | None, Option(help="Weight at the last step (0.0).")] = None
    surrogate_cache: Annotated[
        str | None, Option(help="float32 or float16: compute the surrogate's tokens once, on disk; none: in each step.")
    ] = None
    cache_dir: Annotated[str | None, Option(help="Folder of the caches; empty: the user's cache folder.")] = None


def sdce(
    models: SdceModelFlags,
    data: SdceDataFlags,
    training: SdceTrainingFlags,
    loss: SdceLossFlags,
    config: Annotated[
        Path | None, Option("--config", help="YAML with sections model, surrogate, data, training; flags win.")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Open a new run; the old one stays.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the facts as JSON on standard output.")] = False,
) -> None:
    """Train a language model on cross-entropy and the likely tokens of a second one.
    Example: `python -m ml_factory recipe sdce --base_model builtin:small --surrogate_model FOLDER --dataset a.txt`
    """
    flags = {name: value for group in (models, data, training, loss) for name, value in asdict(group).items()}
    settings = sdce_settings.sdce_settings(config, flags)
    quiet = as_json or process_rank() > 0
    with cli_progress_of_work("training sdce", quiet):
        result = sdce_run.run_sdce(settings, fresh=fresh, on_status=cli_status_printer(quiet))
    if process_rank() or not result:
        return
    print_json(result) if as_json else print(sdce_run.summary(result))
