"""Verbs of Cloud TPU slices: tpu setup, resume, status, monitor, logs, ssh, stop, cleanup."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ml_factory.cli_output import print_json
from ml_factory.commands.dataclass_options import expand_options
from ml_factory.errors import FactoryError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.workspace import Workspace

settings_reader, lifecycle = LazyModule("ml_factory.tpu.settings"), LazyModule("ml_factory.tpu.lifecycle")
gcloud_process = LazyModule("ml_factory.tpu.gcloud_process")
GOOD = ("WAITING", "ACTIVE", "READY", "RUNNING", "FINISHED", "STOPPED", "DELETED", "NEW")

Json = Annotated[bool, Option("--json", help="Print the state as JSON on standard output.")]
NoWait = Annotated[bool, Option("--no-wait", help="Return while the request waits; `resume` continues.")]
Worker = Annotated[int, Argument(min=0, max=4095, help="Number of the worker.")]


@dataclass(frozen=True)
class SliceOptions:
    """Slice"""

    config: Annotated[
        Path | None, Option("--config", help="Flat YAML of the variables; it wins over the environment.")
    ] = None
    dry_run: Annotated[bool, Option("--dry-run", help="Print every command of gcloud and call nothing.")] = False
    workspace: Annotated[str, Option("--workspace", help="Folder of the workspace, for the files that are copied.")] = (
        ""
    )


@dataclass(frozen=True)
class WaitingOptions(SliceOptions):
    """Slice and waiting"""

    hours: Annotated[float | None, Option("--hours", min=0.0, help="Longest wait; empty: without a limit.")] = None
    poll: Annotated[float, Option("--poll", min=0.01, help="Seconds between two looks at the state.")] = 30.0


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


@app.callback()
def tpu() -> None:
    """Train on a Cloud TPU slice through gcloud; docs/tpu.md has the variables.

    Example: `python -m ml_factory tpu setup --config tpu.yaml --dry-run`
    """


def _open(options: SliceOptions) -> Any:
    """Return the slice of these settings, with its gcloud and patience."""
    waiting = options if isinstance(options, WaitingOptions) else WaitingOptions()
    settings = settings_reader.read_settings(options.config)
    patience = lifecycle.Patience(waiting.poll, math.inf if waiting.hours is None else waiting.hours * 3600)

    def say(line: str) -> None:
        print(line, file=sys.stdout if options.dry_run else sys.stderr, flush=True)

    folder = Workspace(options.workspace).root / "tpu" / f"{settings['PROJECT_ID']}.{settings['TPU_NAME']}"
    gcloud = gcloud_process.Gcloud(dry_run=options.dry_run, pause=min(20.0, waiting.poll), say=say)
    return lifecycle.Slice(settings, gcloud, folder, patience, say)


def _report(slice_: Any, state: Any, as_json: bool = False) -> None:
    """Print the state; exit code 1 where something is left to do by hand."""
    if slice_.gcloud.dry_run:
        return
    name = slice_.settings["TPU_NAME"]
    if as_json:
        print_json({"name": name, "phase": state.phase, "detail": state.detail})
    elif state.phase in GOOD:
        print(state.describe(name))
    if state.phase not in GOOD:
        raise FactoryError(state.describe(name))


def setup(options: WaitingOptions, as_json: Json = False, no_wait: NoWait = False) -> None:
    """Make the bucket, request the slice, install on all workers, copy code and config, launch the training."""
    one = _open(options)
    _report(one, one.setup(wait=not no_wait), as_json)


def resume(options: WaitingOptions, as_json: Json = False, no_wait: NoWait = False) -> None:
    """Continue an interrupted setup or a preempted slice; the training resumes from the bucket."""
    one = _open(options)
    _report(one, one.resume(wait=not no_wait), as_json)


def status(options: SliceOptions, as_json: Json = False) -> None:
    """Print the state of the request, the machines and the training."""
    one = _open(options)
    _report(one, one.refresh(), as_json)


def monitor(options: WaitingOptions, as_json: Json = False) -> None:
    """Print worker 0's log until the training ends; a preempted slice is requested again and resumes."""
    one = _open(options)
    _report(one, one.watch(), as_json)


def logs(
    options: SliceOptions,
    worker: Worker = 0,
    lines: Annotated[int, Option("--lines", min=1, max=1_000_000, help="Last lines of the log.")] = 100,
) -> None:
    """Print the end of the log of worker N."""
    print(_open(options).logs(worker, lines), end="")


def ssh(options: SliceOptions, worker: Worker = 0) -> None:
    """Open a terminal on worker N."""
    sys.exit(_open(options).ssh(worker))


def stop(options: SliceOptions, as_json: Json = False) -> None:
    """Stop the training on all workers; the slice stays and costs until `cleanup`."""
    one = _open(options)
    _report(one, one.stop(), as_json)


def cleanup(
    options: SliceOptions,
    as_json: Json = False,
    yes: Annotated[bool, Option("--yes", help="Delete without a question.")] = False,
) -> None:
    """Delete the slice after a question that names what is deleted; the bucket is kept."""
    one = _open(options)
    named = "; ".join(one.objects_to_delete())
    if not (yes or options.dry_run):
        print(
            f"This deletes: {named}. Kept: gs://{one.settings['BUCKET']}. Delete? [y/N] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise FactoryError("Nothing was deleted", where="tpu cleanup", next_step="answer y, or add --yes")
    _report(one, one.cleanup(), as_json)


for _verb in (setup, resume, status, monitor, logs, ssh, stop, cleanup):
    app.command(_verb.__name__)(expand_options(_verb))
