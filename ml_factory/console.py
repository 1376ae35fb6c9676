"""What all verbs of the command line share: their options, and how they talk to a person or a machine."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ml_factory.data.synthetic import DEMO
from ml_factory.models.registry import available_models, spec_of
from ml_factory.progress import Phase, watch
from ml_factory.units.results import Result

said = Console(stderr=True, highlight=False)


class Stamp(StrEnum):
    start = "start"
    end = "end"


Folder = Annotated[str, typer.Option("--workspace", help="Folder of the workspace; empty: the default.")]
Symbol = Annotated[str, typer.Option("--symbol", help=f"Market, as in data/raw/SYMBOL_1m.parquet; {DEMO} is made up.")]
Horizon = Annotated[int, typer.Option("--horizon", help="Bars of the 5-minute frame until the vertical barrier.")]
Model = Annotated[str, typer.Option("--model", help="One of " + ", ".join(available_models()) + ".")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same data, same result.")]
Quick = Annotated[bool, typer.Option("--quick", help="Limit training (never data or labels).")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Open a new run beside the old one.")]
Named = Annotated[str, typer.Option("--run", help="Go on with the very run of this id, or be told why not.")]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Data = Annotated[Path | None, typer.Option("--data", help="Parquet or CSV with 1-minute bars.")]
Stamped = Annotated[Stamp, typer.Option("--stamp", help="Whether the bars of --data are stamped at start or end.")]
Uncertified = Annotated[bool, typer.Option("--uncertified", help="Also without a proof that nothing looks ahead.")]
Zone = Annotated[str | None, typer.Option("--zone", help="Zone of naive timestamps, such as America/Chicago.")]
Decimal = Annotated[str | None, typer.Option("--decimal", help="Decimal mark of text prices, . or ,")]


@contextmanager
def phases(as_json: bool, console: Console = said) -> Iterator[None]:
    """A bar for each phase of the work with its rows a second, where the output is a terminal and not for a machine."""
    if as_json or not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description:>12}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        tasks = {}

        def draw(one: Phase) -> None:
            if one not in tasks:
                tasks[one] = bars.add_task(one.name, told="")
            told = f"{one.done:,} {one.of}" + (f", {one.rate:,.0f} a second" if one.rate >= 1.0 else "")
            note = ", compiling on first use" if one.compiling else ""
            bars.update(tasks[one], total=one.rows, completed=one.done, told=told + note)
            if one.over:
                bars.stop_task(tasks[one])

        with watch(draw):
            yield


class Said(logging.Handler):
    """Notes on standard error as it is now: above the bars, where some are drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def working(what: str, as_json: bool):
    """A spinner while something takes long, where the output is a terminal and not for a machine."""
    return Console(stderr=True, quiet=as_json, highlight=False).status(what)


@contextmanager
def training(model: str, as_json: bool) -> Iterator[Callable[[int, dict], None]]:
    """What hears every epoch: a line above a network's bar, the words beside a booster's spinner."""
    if spec_of(model).windowed:
        with phases(as_json):
            yield lambda epoch, metrics: None if as_json else said.print(_epoch_line(model, epoch, metrics))
    else:
        with working(f"training {model}", as_json) as status:
            yield lambda epoch, metrics: status.update(_epoch_line(model, epoch, metrics))


def found_line(as_json: bool):
    """Where the line goes that says what was found of a run: nowhere for a machine, whose facts hold it."""
    return (lambda line: None) if as_json else said.print


def _epoch_line(model: str, epoch: int, metrics: dict) -> str:
    losses = " ".join(f"{key} {value:.4f}" for key, value in metrics.items() if key != "seconds" and value is not None)
    return f"training {model}: {epoch} {losses}"


def tell(result: Result, as_json: bool) -> None:
    print_json(result.to_dict()) if as_json else print(result.summary())


def print_json(facts: dict) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False))
