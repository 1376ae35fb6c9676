"""Output of the command line: progress bars, status lines, summaries, JSON."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ml_factory.models.registry import find_model_spec
from ml_factory.process_identity import process_rank
from ml_factory.progress import Heartbeat, ProgressPhase, report_progress_to

stderr_console = Console(stderr=True, highlight=False)


@contextmanager
def cli_progress_bars(what: str, console: Console = stderr_console) -> Iterator[None]:
    """Show a progress bar per phase on a terminal, else a line every few seconds; of several processes rank 0 does.

    what : the work as a whole, whose seconds continue between the phases.
    """
    if process_rank() > 0:
        yield
        return
    if not console.is_terminal:
        with Heartbeat(lambda line: console.out(line, highlight=False), what, first=1.5):
            yield
        return
    with Progress(
        BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console
    ) as bars:
        tasks = {None: bars.add_task(what, total=None)}

        def draw(one: ProgressPhase) -> None:
            if one.name not in tasks:
                tasks[one.name] = bars.add_task(one.name)
            elif not one.done and not one.over:  # another phase of this name, such as the next fold's training
                bars.reset(tasks[one.name])
            bars.update(tasks[one.name], total=one.rows, completed=one.done, description=one.line())
            if one.over:
                bars.stop_task(tasks[one.name])

        with report_progress_to(draw):
            yield
        bars.remove_task(tasks[None])


class StderrHandler(logging.Handler):
    """Log handler that prints to the current standard error: above the progress bars, where there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def cli_training_progress(model: str) -> Iterator[Callable[[int, dict], None]]:
    """Yield the epoch callback of a training: a line per epoch of a network, none per block of a booster."""
    with cli_progress_bars(f"training {model}"):

        def show(epoch: int, metrics: dict) -> None:
            named = {name: value for name, value in metrics.items() if name != "seconds" and value is not None}
            print_status(f"training {model}: {epoch} " + " ".join(f"{name} {one:.4f}" for name, one in named.items()))

        yield show if find_model_spec(model).windowed else lambda *_: None


def print_status(line: str) -> None:
    """Print a line on standard error; of several processes rank 0 does."""
    if process_rank() == 0:
        stderr_console.out(line, highlight=False)


def run_verb(as_json: bool, what: str, work: Callable[[], Any]) -> Any:
    """Do the work under progress bars, and print the result, which is returned."""
    with cli_progress_bars(what):
        result = work()
    print_cli_result(result, as_json)
    return result


def print_cli_result(result: Any, as_json: bool) -> None:
    print_json(result.to_dict()) if as_json else print(result.summary())


def print_json(facts: dict) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False))
