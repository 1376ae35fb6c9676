"""How the verbs of the command line report to a person or a machine: bars, lines, JSON."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ml_factory.heartbeat import Heartbeat
from ml_factory.models.registry import spec_of
from ml_factory.progress import Phase, duration, watch

stderr_console = Console(stderr=True, highlight=False)


@contextmanager
def phases(as_json: bool, console: Console = stderr_console, *, what: str = "working") -> Iterator[None]:
    """A bar for each phase of the work where the output is a terminal, else a line every few seconds; for a machine
    nothing.

    what : the work as a whole, whose seconds run on between the phases.
    """
    if as_json:
        yield
        return
    if not console.is_terminal:
        with Heartbeat(lambda line: console.print(line, soft_wrap=True), what, first=1.5):
            yield
        return
    columns = TextColumn("{task.description:>12}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        tasks = {None: bars.add_task(what, total=None, count="")}

        def draw(one: Phase) -> None:
            if one.name not in tasks:
                tasks[one.name] = bars.add_task(one.name, count="")
            elif not one.done and not one.over:  # another phase of this name, such as the next fold's training
                bars.reset(tasks[one.name])
            count = f"{one.done:,} {one.of}" + (f", {one.rate:,.0f} a second" if one.rate >= 1.0 else "")
            left = f", {duration(one.left)} left" if one.left and not one.over else ""
            note = ", compiling on first use" if one.compiling else ""
            bars.update(tasks[one.name], total=one.rows, completed=one.done, count=count + left + note)
            if one.over:
                bars.stop_task(tasks[one.name])

        with watch(draw):
            yield
        bars.remove_task(tasks[None])


class StderrHandler(logging.Handler):
    """Notes on standard error as it is now: above the bars, where some are drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def working(what: str, as_json: bool):
    """Bars or lines of the phases of this work."""
    return phases(as_json, what=what)


@contextmanager
def training(model: str, as_json: bool) -> Iterator[Callable[[int, dict], None]]:
    """What is called after every epoch: a line for an epoch of a network, none for a booster's block of rounds."""
    with phases(as_json, what=f"training {model}"):
        quiet = as_json or not spec_of(model).windowed
        yield lambda epoch, metrics: None if quiet else stderr_console.print(_epoch_line(model, epoch, metrics))


def status_printer(as_json: bool):
    """Where the line goes that says what was found of a run: nowhere for a machine, whose facts hold it."""
    return (lambda line: None) if as_json else stderr_console.print


def _epoch_line(model: str, epoch: int, metrics: dict) -> str:
    losses = " ".join(f"{key} {value:.4f}" for key, value in metrics.items() if key != "seconds" and value is not None)
    return f"training {model}: {epoch} {losses}"


def print_result(result: Any, as_json: bool) -> None:
    print_json(result.to_dict()) if as_json else print(result.summary())


def print_json(facts: dict) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False))
