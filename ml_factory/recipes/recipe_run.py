"""One run of a recipe: its folder, log and checkpoints under an output folder, made and found again by its settings."""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_factory.checkpoints.phase import PhaseCheckpoints
from ml_factory.errors import SettingsError
from ml_factory.process_identity import process_rank
from ml_factory.runs import (
    FitCheckpoints,
    RunFolder,
    machine_and_library_versions,
    newest_run_folder,
    open_run_checkpoints,
)
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_sync import PROJECT
from ml_factory.training.distributed import ProcessGroup
from ml_factory.workflows.train_ranks import worker_rank

RESULT = "result.json"


@dataclass(frozen=True)
class RecipeRun:
    """An open run. checkpoints, callbacks : for the training loop. phase : as of `CheckpointManager.phase`."""

    folder: RunFolder
    tracker: Tracker
    checkpoints: FitCheckpoints
    phase: PhaseCheckpoints

    @property
    def callbacks(self) -> tuple:
        return (self.tracker.log,)

    def finish(self, result: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Store the result, close the log with the summary, and delete the checkpoints."""
        self.phase.wait_uploaded()
        files.write_json(self.folder.folder / RESULT, result)
        self.tracker.finish(dict(summary))
        self.phase.remove_files()
        self.folder.end()


class ReadOnlyCheckpoints:
    """Checkpoints of a host that is not the first: it resumes from those of the first, and saves none."""

    def __init__(self, phase: PhaseCheckpoints):
        self._phase = phase

    def load(self) -> dict | None:
        found = self._phase.latest()
        if found is not None:
            found["state"].pop("carried", None)
        return found

    def due(self) -> bool:
        return False

    def due_in(self) -> float:
        return float("inf")

    def save(self, state: Mapping, metrics: Mapping | None = None, force: bool = False) -> None:
        """Save nothing."""


def find_recipe_run(workspace: Workspace, name: str, identity: Mapping[str, Any], fresh: bool = False) -> RunFolder:
    """Return the newest attempt at the run of these settings, or with `fresh` a new one."""
    return newest_run_folder(workspace.results / name, f"{name}-{fingerprint_json(identity)[:12]}", fresh)


def agree_on_run(
    workspace: Workspace, name: str, identity: Mapping[str, Any], processes: ProcessGroup, fresh: bool = False
) -> tuple[RunFolder, dict[str, Any] | None]:
    """Return the run of `find_recipe_run` and, where it is finished, its result: the same in every process."""
    run = find_recipe_run(workspace, name, identity, fresh)
    done = stored_result(run)
    agreed = processes.broadcast({"run_id": run.run_id, "done": done}) or {}
    if agreed.get("run_id", run.run_id) != run.run_id:
        run = RunFolder(agreed["run_id"], run.folder.parent / agreed["run_id"])
    return run, agreed.get("done", done)


def stored_result(run: RunFolder) -> dict[str, Any] | None:
    """Return the result of a finished run; None where it is not finished."""
    return files.read_json(run.folder / RESULT) if run.ended else None


@contextmanager
def open_recipe_run(
    workspace: Workspace, name: str, run: RunFolder, settings: Mapping[str, Any], *, libraries: Sequence[str] = (),
    threads: int = 0, mirror: str = "auto", project: str = "",
) -> Iterator[RecipeRun]:  # fmt: skip
    """Lock the run, record its settings and machine, and open its log; inside, the loop trains and saves.

    libraries : packages whose versions the bits depend on, in addition to torch.
    mirror, project : as of `Tracker`; an empty project is the usual one.
    """
    installed = [one for one in ("torch", *libraries) if _is_installed(one)]
    machine = machine_and_library_versions(installed, threads)
    with (
        open_run_checkpoints(workspace.checkpoints, run) as manager,
        manager.phase(f"train_{name}").acquired() as phase,
    ):
        run.record({"environment": machine, "settings": dict(settings)})
        with Tracker(
            run.run_id, dict(settings), run.folder / "log", mirror=mirror, project=project or PROJECT
        ) as tracker:
            checkpoints = FitCheckpoints(phase, machine, tracker)
            yield RecipeRun(run, tracker, checkpoints, phase)


@contextmanager
def read_recipe_checkpoints(workspace: Workspace, name: str, run: RunFolder) -> Iterator[ReadOnlyCheckpoints]:
    """Open the run's checkpoints for a host that is not the first."""
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        yield ReadOnlyCheckpoints(manager.phase(f"train_{name}"))


@contextmanager
def open_run_of_process(
    workspace: Workspace, name: str, run: RunFolder, settings: Mapping[str, Any], processes: ProcessGroup, **given: Any
) -> Iterator[tuple[RecipeRun | None, Any]]:
    """Yield (the open run, its checkpoints) in the process that writes. In another one the run is None: it reads the
    first one's checkpoints, or with torchrun receives them from it.

    given : as of `open_recipe_run`.
    """
    if is_writing_process():
        with open_recipe_run(workspace, name, run, settings, **given) as opened:
            yield opened, opened.checkpoints
    elif processes.world > 1:
        with worker_rank():
            yield None, None
    else:
        with read_recipe_checkpoints(workspace, name, run) as checkpoints:
            yield None, checkpoints


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder and put each of its files into this one, each in one step."""
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        for name in sorted(os.listdir(temporary)):
            files.replace(folder / name, lambda target, name=name: _copy(Path(temporary) / name, target))


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as original, open(target, "wb") as copy:
        while piece := original.read(1 << 24):
            copy.write(piece)


def is_writing_process() -> bool:
    """Return True for the process that writes: rank 0 of torchrun, on the first host of a TPU slice."""
    return process_rank() == 0 and tpu_host() == 0


def tpu_host() -> int:
    """Return this host's number in a TPU slice, by TPU_PROCESS_ID; 0 where there is one. Raises SettingsError."""
    texts = [os.environ.get(name, "").strip() for name in ("TPU_PROCESS_ID", "TPU_PROCESS_COUNT")]
    if not texts[0]:
        return 0
    count = texts[1] or str(int(texts[0]) + 1 if texts[0].isdigit() else 1)
    if not texts[0].isdigit() or not count.isdigit() or int(texts[0]) >= int(count):
        raise SettingsError("A host of a TPU slice cannot have this number", where="TPU_PROCESS_ID", got=texts[0],
                            wanted=f"0 to TPU_PROCESS_COUNT - 1, which is {texts[1] or 'not set'}")  # fmt: skip
    return int(texts[0])


def check_number_of_hosts(hosts: int) -> None:
    """Raise SettingsError where TPU_PROCESS_COUNT is another number than these hosts; 1 is any number."""
    count = os.environ.get("TPU_PROCESS_COUNT", "").strip()
    if count and hosts > 1 and count != str(hosts):
        raise SettingsError("Two numbers of hosts", where="tpu_num_hosts", got=hosts,
                            wanted=f"{count}, as TPU_PROCESS_COUNT has it")  # fmt: skip


def root_of_output(output_dir: str) -> str:
    """Return the folder or address of a run's output: a relative folder lies in ML_FACTORY_ROOT where that is a
    bucket, as on the workers of a TPU slice, whose disks are lost with them.
    """
    root = os.environ.get("ML_FACTORY_ROOT", "").strip()
    if "://" not in root or "://" in output_dir or os.path.isabs(os.path.expanduser(output_dir)):
        return output_dir
    inside = os.path.normpath(output_dir)
    if inside.startswith(".."):
        raise SettingsError("This folder leads out of the bucket", where="output_dir", got=output_dir, wanted=root)
    return root.rstrip("/") if inside == "." else f"{root.rstrip('/')}/{inside}"


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
