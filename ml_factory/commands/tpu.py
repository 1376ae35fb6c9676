"""Verbs of Cloud TPU slices: tpu setup, resume, status, monitor, logs, ssh, stop, cleanup."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ml_factory.cli_output import print_json
from ml_factory.errors import FactoryError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.workspace import Workspace

settings_reader, lifecycle = LazyModule("ml_factory.tpu.settings"), LazyModule("ml_factory.tpu.lifecycle")
gcloud_process, slice_state = LazyModule("ml_factory.tpu.gcloud_process"), LazyModule("ml_factory.tpu.slice_state")
GOOD = ("WAITING", "ACTIVE", "READY", "RUNNING", "FINISHED", "STOPPED", "DELETED", "NEW")

Config = Annotated[Path | None, Option("--config", help="Flat YAML of the variables; it wins over the environment.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print every command of gcloud and call nothing.")]
Json = Annotated[bool, Option("--json", help="Print the state as JSON on standard output.")]
Place = Annotated[str, Option("--workspace", help="Folder of the workspace, where the state is kept.")]
NoWait = Annotated[bool, Option("--no-wait", help="Return while the request waits; `resume` continues.")]
Hours = Annotated[float | None, Option("--hours", min=0.0, help="Longest wait; empty: without a limit.")]
Poll = Annotated[float, Option("--poll", min=0.01, help="Seconds between two looks at the state.")]
Worker = Annotated[int, Argument(min=0, max=4095, help="Number of the worker.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


@app.callback()
def tpu() -> None:
    """Train on a Cloud TPU slice through gcloud; docs/tpu.md has the variables.

    Example: `python -m ml_factory tpu setup --config tpu.yaml --dry-run`
    """


def _open(
    config: Path | None, dry_run: bool, workspace: str = "", hours: float | None = None, poll: float = 30.0
) -> Any:
    settings = settings_reader.read_settings(config)
    patience = lifecycle.Patience(poll, math.inf if hours is None else hours * 3600)

    def say(line: str) -> None:
        print(line, file=sys.stdout if dry_run else sys.stderr, flush=True)

    path = Workspace(workspace).root / "tpu"
    file = slice_state.StateFile(path / f"{settings['PROJECT_ID']}.{settings['TPU_NAME']}.json", keep=not dry_run)
    gcloud = gcloud_process.Gcloud(dry_run=dry_run, pause=min(20.0, poll), say=say)
    return lifecycle.Slice(settings, gcloud, file, patience, say)


def _report(slice_: Any, state: Any, as_json: bool = False) -> None:
    """Print the state; exit code 1 where something is left to do by hand."""
    if slice_.gcloud.dry_run:
        return
    name = slice_.settings["TPU_NAME"]
    if as_json:
        print_json({"name": name, "phase": state.phase, "detail": state.detail, "requests": state.requests})
    elif state.phase in GOOD:
        print(state.describe(name))
    if state.phase not in GOOD:
        raise FactoryError(state.describe(name))


@app.command()
def setup(
    config: Config = None,
    dry_run: DryRun = False,
    workspace: Place = "",
    as_json: Json = False,
    no_wait: NoWait = False,
    hours: Hours = None,
    poll: Poll = 30.0,
) -> None:
    """Make the bucket, request the slice, install on all workers, copy code and config, launch the training."""
    one = _open(config, dry_run, workspace, hours, poll)
    _report(one, one.setup(wait=not no_wait), as_json)


@app.command()
def resume(
    config: Config = None,
    dry_run: DryRun = False,
    workspace: Place = "",
    as_json: Json = False,
    no_wait: NoWait = False,
    hours: Hours = None,
    poll: Poll = 30.0,
) -> None:
    """Continue an interrupted setup or a preempted slice; the training resumes from the bucket."""
    one = _open(config, dry_run, workspace, hours, poll)
    _report(one, one.resume(wait=not no_wait), as_json)


@app.command()
def status(config: Config = None, dry_run: DryRun = False, workspace: Place = "", as_json: Json = False) -> None:
    """Print the state of the request, the machines and the training."""
    one = _open(config, dry_run, workspace)
    _report(one, one.refresh(), as_json)


@app.command()
def monitor(
    config: Config = None,
    dry_run: DryRun = False,
    workspace: Place = "",
    as_json: Json = False,
    hours: Hours = None,
    poll: Poll = 30.0,
) -> None:
    """Print worker 0's log until the training ends; a preempted slice is requested again and resumes."""
    one = _open(config, dry_run, workspace, hours, poll)
    _report(one, one.watch(), as_json)


@app.command()
def logs(
    worker: Worker = 0,
    config: Config = None,
    dry_run: DryRun = False,
    workspace: Place = "",
    lines: Annotated[int, Option("--lines", min=1, max=1_000_000, help="Last lines of the log.")] = 100,
) -> None:
    """Print the end of the log of worker N."""
    print(_open(config, dry_run, workspace).logs(worker, lines), end="")


@app.command()
def ssh(worker: Worker = 0, config: Config = None, dry_run: DryRun = False, workspace: Place = "") -> None:
    """Open a terminal on worker N."""
    sys.exit(_open(config, dry_run, workspace).ssh(worker))


@app.command()
def stop(config: Config = None, dry_run: DryRun = False, workspace: Place = "", as_json: Json = False) -> None:
    """Stop the training on all workers; the slice stays and costs until `cleanup`."""
    one = _open(config, dry_run, workspace)
    _report(one, one.stop(), as_json)


@app.command()
def cleanup(
    config: Config = None,
    dry_run: DryRun = False,
    workspace: Place = "",
    as_json: Json = False,
    yes: Annotated[bool, Option("--yes", help="Delete without a question.")] = False,
) -> None:
    """Delete the slice after a question that names what goes; the bucket is kept."""
    one = _open(config, dry_run, workspace)
    named = "; ".join(one.objects_to_delete())
    if not (yes or dry_run):
        print(
            f"This deletes: {named}. Kept: gs://{one.settings['BUCKET']}. Delete? [y/N] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise FactoryError("Nothing was deleted", where="tpu cleanup", next_step="answer y, or add --yes")
    _report(one, one.cleanup(), as_json)
