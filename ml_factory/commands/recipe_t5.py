"""Recipe that trains a T5 to write the label of a text: t5."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from ml_factory.argument_checks import check_seed
from ml_factory.cli_output import cli_progress_of_work, cli_status_printer, print_json
from ml_factory.commands.options import Fresh, Seed, WorkspaceOptions
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.process_identity import process_rank, wants_bfloat16
from ml_factory.storage.workspace import Workspace

t5_run, spec_file = LazyModule("ml_factory.recipes.t5_run"), LazyModule("ml_factory.training.spec")


@dataclass(frozen=True)
class TextOptions:
    """Texts"""

    data: Annotated[
        str, Option(help="Tab-separated file with the columns Id, Text, Label; split by contiguous blocks.")
    ] = ""
    train: Annotated[str, Option(help="Training rows, in place of --data.")] = ""
    validation: Annotated[str, Option(help="Rows by which the epoch is chosen.")] = ""
    test: Annotated[str, Option(help="Test rows.")] = ""
    validation_share: Annotated[float, Option(help="Share of --data.")] = 0.1
    test_share: Annotated[float, Option(help="Share of --data.")] = 0.1
    fake_data: Annotated[bool, Option("--fake-data", help="2,000 made-up texts of two labels.")] = False


@dataclass(frozen=True)
class T5NetworkOptions:
    """Network"""

    model: Annotated[
        str, Option(help="builtin:tiny or small, t5-small, t5-base, t5-large, a folder, a name at the hub.")
    ] = "builtin:tiny"
    from_scratch: Annotated[
        bool, Option("--from-scratch", help="Random first weights, and a tokenizer of its own.")
    ] = False
    vocabulary: Annotated[int, Option(min=8, help="Pieces of a tokenizer of its own.")] = 2000
    max_length: Annotated[int, Option(min=2, help="Tokens of a text at most.")] = 128


@dataclass(frozen=True)
class T5StepOptions:
    """Training"""

    num_epochs: Annotated[int, Option(min=1, help="At most; --patience ends sooner.")] = 6
    batch_size: Annotated[int, Option(min=1, help="Rows of a step, of all devices together.")] = 64
    accumulate: Annotated[int, Option(min=1, help="Parts of a step: less memory.")] = 1
    learning_rate: Annotated[float, Option(help="Highest learning rate.")] = 2e-3
    weight_decay: Annotated[float, Option(help="Of matrices.")] = 0.01
    warmup: Annotated[float, Option(help="Share of all steps over which the rate climbs.")] = 0.1
    patience: Annotated[int, Option(min=0, help="Epochs without a better loss before it stops; 0: never.")] = 2
    gradient_checkpointing: Annotated[bool, Option("--gradient-checkpointing", help="Less memory for more time.")] = (
        False
    )
    device: Annotated[str, Option(help="auto, cpu, cuda or xla.")] = "auto"
    precision: Annotated[str, Option(help="auto, fp32, bf16 or fp16; XLA_USE_BF16=1: bf16.")] = "auto"
    threads: Annotated[int, Option(min=0, help="CPU threads; 0: every core.")] = 0
    save_seconds: Annotated[float, Option(min=0, help="Least seconds between two saves in an epoch.")] = 60.0


def t5(
    texts: TextOptions,
    network: T5NetworkOptions,
    step: T5StepOptions,
    place: WorkspaceOptions,
    seed: Seed = 0,
    fresh: Fresh = False,
) -> None:
    """Train a T5 to write the label of a text; the same command resumes.
    Example: `python -m ml_factory recipe t5 --data tweets.tsv`
    """
    check_packages_installed("torch", "transformers", "tokenizers", "sklearn", "matplotlib")
    precision = "bf16" if step.precision == "auto" and wants_bfloat16() else step.precision
    settings = t5_run.T5Settings(
        files=t5_run.TextFiles(
            texts.data, texts.train, texts.validation, texts.test, texts.validation_share, texts.test_share,
            2000 if texts.fake_data else 0,
        ),
        model=t5_run.T5ModelSettings(
            network.model, network.from_scratch, network.vocabulary, network.max_length
        ),
        training=spec_file.TrainSpec(
            epochs=step.num_epochs, batch=step.batch_size, accumulate=step.accumulate, lr=step.learning_rate,
            weight_decay=step.weight_decay, warmup=step.warmup, patience=step.patience, eval_batch=256,
            seed=check_seed(seed), device=step.device, precision=precision, recompute=step.gradient_checkpointing,
            threads=step.threads, save_seconds=step.save_seconds,
        ),
    )  # fmt: skip
    quiet = place.as_json or process_rank() > 0
    with cli_progress_of_work("training t5", quiet):
        facts = t5_run.run_t5(Workspace(place.workspace), settings, fresh=fresh, on_status=cli_status_printer(quiet))
    if process_rank() or not facts:
        return
    print_json(facts) if place.as_json else print(t5_run.summary(facts))
