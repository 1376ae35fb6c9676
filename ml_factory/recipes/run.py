"""One run of a recipe: its folder, log and checkpoints under an output folder, made and found again by its settings."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ml_factory.checkpoints.manager import PhaseCheckpoints
from ml_factory.code_fingerprint import source_hash
from ml_factory.errors import SettingsError
from ml_factory.models.base import ModelFitResult, merge_inexact_reasons
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
from ml_factory.training.device import Device, deterministic_device
from ml_factory.training.distributed import ProcessGroup
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec
from ml_factory.workflows.train_ranks import worker_rank

RESULT = "result.json"
Status = Callable[[str], object]
_T5 = ("t5", "labelled_text", "language_models")
# The modules of this folder that a run of a recipe depends on, in addition to `training` and seeding.py.
MODULES = {
    "resnet50": ("resnet50", "images", "shards"),
    "sdce": ("sdce_run", "sdce", "surrogate", "language_models"),
    "t5": _T5,
    "compress": ("compress", *_T5),
}


@dataclass(frozen=True)
class RecipeRun(RunFolder):
    """A run in one process of it.

    done : the stored result of a finished run; None where it is open.
    tracker, phase : log and phase of the process that writes; None in another one.
    checkpoints : for the training loop; None with torchrun, where the first process sends them.
    """

    name: str
    device: Device
    done: dict[str, Any] | None = None
    tracker: Tracker | None = None
    phase: PhaseCheckpoints | None = None
    checkpoints: Any = None

    @property
    def writes(self) -> bool:
        """True in the process that stores the result."""
        return self.tracker is not None

    def train(
        self, network: nn.Module, feed: Any, loss: Callable, spec: TrainSpec, validation: Validation, *,
        settings: Mapping, data: Any, callbacks: Sequence[Callable] = (),
    ) -> ModelFitResult:  # fmt: skip
        """Train or resume the network.

        settings, data : what a checkpoint must match, in addition to the loop's settings
        """
        identity = {"model": self.name, "settings": {**settings, "loop": spec.identity()}, "data": data}
        callbacks = (*callbacks, *((self.tracker.log,) if self.tracker else ()))
        return run_training_loop(
            network, len(feed), feed, loss, spec, self.device, identity=identity, validation=validation,
            callbacks=callbacks, checkpoints=self.checkpoints,
        )  # fmt: skip

    def finish(self, result: dict[str, Any], fit: ModelFitResult | None, summary: Sequence[str]) -> dict[str, Any]:
        """Store the result with the facts of the fit, close the log with some of them, delete the checkpoints.

        In a process that does not write nothing is stored. Returns the result.
        """
        if self.tracker is None:
            return result
        if fit is not None:
            inexact = merge_inexact_reasons(fit.nondeterminism, self.checkpoints.machine_differences)
            result |= {"history": fit.history, "best_epoch": fit.best_epoch, "exact": not inexact,
                       "inexact": inexact, "resumed_step": fit.resumed_step, "machine": fit.machine}  # fmt: skip
        self.phase.wait_uploaded()
        files.write_json(self.folder / RESULT, result)
        self.tracker.finish({name: result[name] for name in summary})
        self.end()  # before the checkpoints go: a kill in between trains nothing again
        self.phase.remove_files()
        return result


def _read_only(phase: PhaseCheckpoints) -> SimpleNamespace:
    """Return the checkpoints of a host that is not the first: it resumes from those of the first, and saves none."""

    def load() -> dict[str, Any] | None:
        found = phase.latest()
        if found is not None:
            found["state"].pop("carried", None)
        return found

    return SimpleNamespace(load=load, due=lambda: False, due_in=lambda _: float("inf"), save=lambda *_, **__: None)


def agree_on_run(
    workspace: Workspace, name: str, identity: Mapping[str, Any], processes: ProcessGroup, fresh: bool
) -> tuple[RunFolder, dict[str, Any] | None]:
    """Return the newest run of these settings and this code, or with `fresh` a new one, and its result where it is
    finished: the same in every process.
    """
    code = source_hash(("training", "seeding.py", *(f"recipes/{one}.py" for one in MODULES[name])))
    digest = fingerprint_json({**identity, "code": code})[:12]
    run = newest_run_folder(workspace.results / name, f"{name}-{digest}", fresh)
    done = files.read_json(run.folder / RESULT) if run.ended else None
    agreed = processes.broadcast({"run_id": run.run_id, "done": done})
    return RunFolder(agreed["run_id"], run.folder.parent / agreed["run_id"]), agreed["done"]


@contextmanager
def open_recipe_run(
    workspace: Workspace, name: str, identity: Mapping[str, Any], settings: Mapping[str, Any], device: Device, *,
    fresh: bool = False, libraries: Sequence[str] = (), mirror: str = "auto", project: str = "",
    say: Status = print,
) -> Iterator[RecipeRun]:  # fmt: skip
    """Find the run of this identity, or begin one; lock it and record its settings and machine; push it in the end.

    With torchrun or on a TPU slice every process calls this; the first one writes.

    libraries : packages whose versions the bits depend on, in addition to torch.
    mirror, project : as of `Tracker`; an empty project is the usual one.
    """
    found, done = agree_on_run(workspace, name, identity, device.processes, fresh)
    given = (found.run_id, found.folder, name, device)
    with ExitStack() as stack:
        if is_writing_process():
            stack.callback(workspace.push)
        stack.enter_context(deterministic_device(device))
        if done is not None:
            say(f"finished before: {found.folder} (--fresh trains again)")
            yield RecipeRun(*given, done)
        elif is_writing_process():
            phase = stack.enter_context(open_run_checkpoints(workspace, found)).phase(f"train_{name}")
            stack.enter_context(phase.acquired())
            machine = machine_and_library_versions(("torch", *libraries), device.threads)
            found.record({"environment": machine, "settings": dict(settings)})
            log = found.folder / "log"
            tracker = Tracker(found.run_id, dict(settings), log, mirror=mirror, project=project or PROJECT)
            stack.enter_context(tracker)
            yield RecipeRun(*given, None, tracker, phase, FitCheckpoints(phase, machine, tracker))
        elif device.processes.world > 1:
            stack.enter_context(worker_rank())
            yield RecipeRun(*given)
        else:
            manager = stack.enter_context(open_run_checkpoints(workspace, found))
            yield RecipeRun(*given, checkpoints=_read_only(manager.phase(f"train_{name}")))


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a hash of weights by name."""
    known = hashlib.sha256()
    for name, value in sorted(weights.items()):
        known.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        known.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return known.hexdigest()[:16]


def is_writing_process() -> bool:
    """Return True for the process that writes: rank 0 of torchrun, on the first host of a TPU slice."""
    return process_rank() == 0 and tpu_host() == 0


def tpu_host() -> int:
    """Return this host's number in a TPU slice, by TPU_PROCESS_ID; 0 where there is one. Raises SettingsError."""
    number, count = (os.environ.get(name, "").strip() for name in ("TPU_PROCESS_ID", "TPU_PROCESS_COUNT"))
    if not number:
        return 0
    if not number.isdigit() or (count and not (count.isdigit() and int(number) < int(count))):
        raise SettingsError("A host of a TPU slice cannot have this number", where="TPU_PROCESS_ID", got=number,
                            wanted=f"0 to TPU_PROCESS_COUNT - 1, which is {count or 'not set'}")  # fmt: skip
    return int(number)


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
