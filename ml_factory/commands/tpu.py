"""Verbs of Cloud TPU slices: tpu setup, resume, status, monitor, logs, ssh, stop, cleanup."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from ml_factory.cli_output import print_json
from ml_factory.commands.machine import confirm
from ml_factory.commands.options import Json
from ml_factory.errors import FactoryError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.workspace import Workspace

settings_reader, gcloud_file = LazyModule("ml_factory.tpu.settings"), LazyModule("ml_factory.tpu.gcloud")
slice_file = LazyModule("ml_factory.tpu.slice")
GOOD = ("WAITING", "ACTIVE", "READY", "RUNNING", "FINISHED", "STOPPED", "DELETED", "NEW")

NoWait = Annotated[bool, Parameter(help="Return while the request waits; `resume` continues.")]
Worker = Annotated[int, Parameter(help="Number of the worker.", validator=Number(gte=0, lte=4095))]


@Parameter(name="*")
@dataclass(frozen=True)
class SliceFlags:
    """Slice.

    Args:
        config: Flat YAML of the variables; it wins over the environment.
        dry_run: Print every command of gcloud and call nothing.
        workspace: Folder of the workspace, for the files that are copied.
    """

    config: Path | None = None
    dry_run: bool = False
    workspace: str = ""


@Parameter(name="*")
@dataclass(frozen=True)
class Waiting(SliceFlags):
    """Slice and waiting.

    Args:
        poll: Seconds between two looks at the state.
    """

    poll: Annotated[float, Parameter(validator=Number(gte=0.01))] = 30.0


def _open(flags: SliceFlags) -> Any:
    """Return the slice of these settings, with its gcloud and patience."""
    waiting = flags if isinstance(flags, Waiting) else Waiting()
    settings = settings_reader.read_settings(flags.config)

    def say(line: str) -> None:
        print(line, file=sys.stdout if flags.dry_run else sys.stderr, flush=True)

    folder = Workspace(flags.workspace).root / "tpu" / f"{settings['PROJECT_ID']}.{settings['TPU_NAME']}"
    gcloud = gcloud_file.Gcloud(
        f"--project={settings['PROJECT_ID']}", "--quiet", dry_run=flags.dry_run, pause=min(20.0, waiting.poll), say=say
    )
    return slice_file.Slice(settings, gcloud, folder, waiting.poll, say)


def _run(flags: SliceFlags, verb: str, as_json: bool, **given: Any) -> None:
    """Call a method of the slice and print the state that it returns; exit code 1 where something is left to do."""
    slice_ = _open(flags)
    state, name = getattr(slice_, verb)(**given), slice_.settings["TPU_NAME"]
    if flags.dry_run:
        return
    if as_json:
        print_json({"name": name, "phase": state.phase, "detail": state.detail})
    elif state.phase in GOOD:
        print(state.describe(name))
    if state.phase not in GOOD:
        raise FactoryError(state.describe(name))


def setup(*, flags: Waiting = Waiting(), as_json: Json = False, no_wait: NoWait = False) -> None:
    """Make the bucket, request the slice, install on all workers, copy code and config, launch the training."""
    _run(flags, "setup", as_json, wait=not no_wait)


def resume(*, flags: Waiting = Waiting(), as_json: Json = False, no_wait: NoWait = False) -> None:
    """Continue an interrupted setup or a preempted slice; the training resumes from the bucket."""
    _run(flags, "resume", as_json, wait=not no_wait)


def status(*, flags: SliceFlags = SliceFlags(), as_json: Json = False) -> None:
    """Print the state of the request, the machines and the training."""
    _run(flags, "look", as_json)


def monitor(*, flags: Waiting = Waiting(), as_json: Json = False) -> None:
    """Print worker 0's log until the training ends; a preempted slice is requested again and resumes."""
    _run(flags, "watch", as_json)


def logs(
    worker: Worker = 0, *, flags: SliceFlags = SliceFlags(),
    lines: Annotated[int, Parameter(help="Last lines of the log.", validator=Number(gte=1, lte=1_000_000))] = 100,
) -> None:  # fmt: skip
    """Print the end of the log of worker N."""
    print(_open(flags).logs(worker, lines), end="")


def ssh(worker: Worker = 0, *, flags: SliceFlags = SliceFlags()) -> None:
    """Open a terminal on worker N."""
    sys.exit(_open(flags).ssh(worker))


def stop(*, flags: SliceFlags = SliceFlags(), as_json: Json = False) -> None:
    """Stop the training on all workers; the slice stays and costs until `cleanup`."""
    _run(flags, "stop", as_json)


def cleanup(*, flags: SliceFlags = SliceFlags(), as_json: Json = False, yes: bool = False) -> None:
    """Delete the slice after a question that names what is deleted; the bucket is kept.

    Args:
        yes: Delete without a question.
    """
    one = _open(flags)
    named = "; ".join(one.objects_to_delete())
    if not (yes or flags.dry_run):
        confirm(f"This deletes: {named}. Kept: gs://{one.settings['BUCKET']}. Delete?", "tpu cleanup")
    _run(flags, "cleanup", as_json)


VERBS = (setup, resume, status, monitor, logs, ssh, stop, cleanup)
