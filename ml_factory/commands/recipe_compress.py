"""Recipe that makes a trained network smaller: compress."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from ml_factory.cli_output import cli_progress_of_work, cli_status_printer, print_json
from ml_factory.commands.options import Fresh, WorkspaceOptions
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.storage.workspace import Workspace

compress_run = LazyModule("ml_factory.recipes.compress_run")


@dataclass(frozen=True)
class SubjectOptions:
    """Network"""

    model: Annotated[str, Option(help="Folder of a finished run of recipe t5, or the name of a market's network.")] = ""
    symbol: Annotated[str, Option(help="Market of the network.")] = ""
    horizon: Annotated[int, Option(min=1, help="Horizon of the network.")] = 5


@dataclass(frozen=True)
class MethodOptions:
    """Methods"""

    methods: Annotated[
        str,
        Option(
            help="magnitude:SHARE, structured:SHARE, distill:SHARE, int8_dynamic, int8_weights, separated by commas."
        ),
    ] = "magnitude:0.5,structured:0.5,int8_dynamic,int8_weights,distill:0.5"
    recovery_epochs: Annotated[int, Option(min=1, help="Of training after pruning.")] = 1
    recovery_rate: Annotated[float, Option(help="Share of the first learning rate in it.")] = 0.3
    distill_epochs: Annotated[int, Option(min=1, help="Of a student's training.")] = 4
    rounds: Annotated[int, Option(min=1, help="Predictions that are timed.")] = 60
    device: Annotated[str, Option(help="auto, cpu, cuda or xla, of the trainings.")] = "auto"
    threads: Annotated[int, Option(min=0, help="CPU threads of the trainings; 0: every core.")] = 0


def compress(network: SubjectOptions, method: MethodOptions, place: WorkspaceOptions, fresh: Fresh = False) -> None:
    """Prune, quantize and distill a trained network; one table of size, latency and quality.
    Example: `python -m ml_factory recipe compress --model workspace/results/t5/RUN --methods structured:0.5`
    """
    check_packages_installed("torch", "torchao", "matplotlib")
    settings = compress_run.CompressionSettings(
        network.model, network.symbol, network.horizon, method.methods, method.recovery_epochs, method.recovery_rate,
        method.distill_epochs, method.rounds, method.device, method.threads,
    )  # fmt: skip
    with cli_progress_of_work("compressing", place.as_json):
        facts = compress_run.run_compress(
            Workspace(place.workspace), settings, fresh=fresh, on_status=cli_status_printer(place.as_json)
        )
    print_json(facts) if place.as_json else print(compress_run.summary(facts))
