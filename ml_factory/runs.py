"""Runs: one attempt at a computation, opened once: its folder, checkpoints, lock, log, status and machine."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ml_factory.argument_checks import SOURCES, check_seed
from ml_factory.checkpoints.latest_training import checkpoint_history
from ml_factory.checkpoints.manager import CheckpointManager, PhaseCheckpoints
from ml_factory.checkpoints.schedule import checkpoint_minutes_from_environment, is_session_ending
from ml_factory.code_fingerprint import code_commit
from ml_factory.errors import FactoryError, NotPreparedError, SettingsError, check_known
from ml_factory.lazy_module import check_packages_installed
from ml_factory.models.base import (
    describe_differences,
    installed_library_versions,
    merge_inexact_reasons,
    processor_name,
)
from ml_factory.models.registry import BOOSTERS, find_model_spec
from ml_factory.process_identity import cores
from ml_factory.settings import TASKS, RunSettings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.mirror import push_in_background
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import disable_wandb, wandb_mirror_mode
from ml_factory.tracking.wandb_restore import restore_from_wandb
from ml_factory.tracking.wandb_sync import RunSnapshot

LIBRARIES = ("numpy", "pandas", "scipy")
TRIALS = "trials.json"  # finished trials of `auto`, in its folder
FOLD_FILES = "fold-*.state"  # of finished folds, in a run's folder
_ATTEMPT = re.compile(r"(.*-[0-9a-f]{10})(?:-\d+)?")
# What runs themselves write into their folders.
_OWN = (
    "run.json", "done.json", "log", "predictions.parquet", "predictions.json", "report.html", "report.json",
    "backtest*.json", "backtest*.csv", "folds.parquet", "paths.parquet", "*.lock", ".*", FOLD_FILES,
)  # fmt: skip


def run_machine_facts(spec: RunSettings) -> dict:
    """Return the facts of this machine that the bits of this run depend on; boosters do not on the processor's name."""
    networks = [name for name in spec.models if find_model_spec(name).windowed]
    used = {name for name in spec.models if name not in networks} | ({"torch"} if networks else set())
    settings = dict(spec.settings)
    graphics = {"gpu": _graphics()} if any(find_model_spec(name).uses_gpu(settings) for name in spec.models) else {}
    facts = machine_and_library_versions(used, settings.get("threads") or cores()) | graphics
    if used <= set(BOOSTERS):
        del facts["processor"]
    return facts


def machine_and_library_versions(libraries: Iterable[str], threads: int) -> dict:
    """Return processor, threads, Python, and the versions of numpy, pandas, scipy and of these libraries."""
    versions = installed_library_versions(sorted({*LIBRARIES, *libraries}))
    return {"processor": processor_name(), "threads": threads, **versions}


def _graphics() -> str:
    """Return the names of NVIDIA GPUs by the driver; "none"."""
    texts = [
        path.read_text(errors="replace") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    names = [line.split(":", 1)[1].strip() for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return ", ".join(names) or "none"


# ---- options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOptions:
    """Options of one run; keyword arguments of `train`, `cross_validate` and `stack`.

    seed : seed of everything random in the run.
    quick : limit the training (never data checks, features, labels or splits).
    fresh : open a new run; the one that is there stays.
    run : id of the run to resume; refused when its settings, data or code differ.
    source : "wandb" loads finished models from W&B, "registry" asks there only for what the workspace lacks.
    mirror : Weights & Biases: "auto" (online where there is a key), "offline" or "off".
    uncertified : accept data that has no certificate.
    on_status : called with one line before the work, and before that of each base model: what was found, and what is
        done now.
    """

    seed: int = 0
    quick: bool = False
    fresh: bool = False
    run: str = ""
    source: str = "registry"
    mirror: str = "auto"
    uncertified: bool = False
    on_status: Callable[[str], object] = logging.getLogger("ml_factory").info

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_known("Unknown source of models", "source", self.source, SOURCES)

    @classmethod
    def of(cls, given: Mapping[str, Any], unused: Collection[str] = ()) -> "RunOptions":
        """Build the options from a verb's keyword arguments. Raises SettingsError for another name, or one that is
        `unused`.
        """
        known = [field.name for field in fields(cls) if field.name not in unused]
        for name in given:
            check_known("There is no such argument", "options of a run", name, known)
        return cls(**given)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


class FitCheckpoints:
    """Checkpoints of one fit: `due`, `load` and `save` of a phase, with its progress in numbers and its machines.

    machine : this machine, as of `run_machine_facts`.
    tracker : log of the fit, which is put on the disk before each save. An epoch is saved before it is logged: a run
        killed in between logs it first when it resumes.
    trained_on : as of `ModelBase.trained_on`, for readers of the checkpoint alone.
    machine_differences : between the machines of the fit's sessions.
    """

    def __init__(
        self, phase: PhaseCheckpoints, machine: Mapping, tracker: Tracker | None = None,
        trained_on: Mapping | None = None,
    ):  # fmt: skip
        self._phase, self._machine, self._tracker = phase, dict(machine), tracker
        self._trained_on = {"trained_on": dict(trained_on)} if trained_on else {}
        self.due, self.due_in = phase.due, phase.due_in
        self.machine_differences: list[str] = []

    def load(self) -> dict | None:
        """Return the newest verified checkpoint, its state as the fit saved it."""
        found = self._phase.load()
        if found is not None:
            carried = found["state"].pop("carried", None) or {"machine": self._machine, "elsewhere": []}
            now = describe_differences(carried["machine"], self._machine)
            self.machine_differences = merge_inexact_reasons(self.machine_differences, [*carried["elsewhere"], *now])
            if self._tracker is not None:
                self._tracker.log_missing(history_log_steps(checkpoint_history(found["state"])))
        return found

    def save(self, state: Mapping, metrics: Mapping | None = None, force: bool = False) -> dict | None:
        """Save when it is due, or with `force`; None when nothing was saved."""
        if self._tracker is not None:
            self._tracker.flush()
        carried = {"machine": self._machine, "elsewhere": self.machine_differences, **self._trained_on}
        return self._phase.save(
            {**state, "carried": carried}, metrics={**(metrics or {}), **_fit_progress(state)}, force=force
        )


def history_log_steps(history: Sequence[dict]) -> list[tuple[int, dict]]:
    """Convert a fit's history to log entries: (epoch, metrics)."""
    return [(epoch["epoch"], {name: value for name, value in epoch.items() if name != "epoch"}) for epoch in history]


def _fit_progress(state: Mapping) -> dict[str, int]:
    """Return the progress of a fit in numbers: rounds of a booster, or finished epochs and the step."""
    if "rounds" in state:
        return {"rounds": int(state["rounds"])}
    return {"epochs": len(checkpoint_history(state)), "step": int(state["step"])}


def progress_words(metrics: Mapping | None) -> str:
    """Return the progress in a checkpoint's metrics as words; "" for None."""
    if metrics is None:
        return ""
    if "rounds" in metrics:
        return f"round {metrics['rounds']}"
    return f"epoch {metrics['epochs']}, step {metrics['step']}" if "step" in metrics else "a checkpoint"


def open_run_checkpoints(workspace: Workspace, run: "RunFolder", during_training: bool = False) -> CheckpointManager:
    """Open the checkpoints of this run, saved on the environment's schedule, and before this session ends.

    during_training : as of `CheckpointManager`.
    """
    return CheckpointManager(
        workspace.checkpoints_of(run.run_id), checkpoint_minutes_from_environment(), run=run.run_id,
        ending=is_session_ending, during_training=during_training,
    )  # fmt: skip


# ---- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """One attempt at a run: its id and its folder under results/."""

    run_id: str
    folder: Path

    def record(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json` with these facts, the id and the time; only the first time."""
        if not files.is_file(self.folder / "run.json"):
            begun = datetime.now(UTC).isoformat(timespec="microseconds")
            files.write_json(self.folder / "run.json", {"run_id": self.run_id, "begun_at": begun, **facts})

    def end(self) -> None:
        """Mark the run as finished."""
        if not self.ended:
            files.write_json(self.folder / "done.json", {"run_id": self.run_id})

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return files.is_file(self.folder / "done.json")

    @property
    def base(self) -> str:
        """Run id without the number of the attempt."""
        return self.run_id if (found := _ATTEMPT.fullmatch(self.run_id)) is None else found[1]


def newest_run_folder(parent: Path, base: str, fresh: bool = False) -> RunFolder:
    """Return the newest attempt at the run `base` that has a folder in `parent`, or with `fresh` a new one.

    Nothing is written. Raises FileError where a link stands there.
    """
    attempt = 1
    while files.is_folder(parent / _attempt(base, attempt + 1)):
        attempt += 1
    if fresh and files.is_folder(parent / _attempt(base, attempt)):
        attempt += 1
    name = _attempt(base, attempt)
    return RunFolder(name, stored_path(parent, name, inside=parent.parent))


def _attempt(base: str, attempt: int) -> str:
    return base if attempt == 1 else f"{base}-{attempt}"


@dataclass(frozen=True)
class Run(RunFolder):
    """One attempt at a run of the pipeline, while it is open (`open_run`); nothing is written before `begin`."""

    workspace: Workspace
    settings: RunSettings
    manager: CheckpointManager

    def begin(self) -> None:
        """Record settings, machine, sources and their commit, when the settings have proved usable.

        Raises MissingPackageError where the extra train is not installed: metrics and report come after hours.
        """
        check_packages_installed("sklearn", "matplotlib", "jinja2")
        facts = {"environment": self.machine, "sources": self.settings.sources, "commit": code_commit()}
        self.record(self.settings.to_dict() | facts)
        push_in_background(self.folder)  # a machine may vanish before the end of the verb, which pushes all

    @property
    def machine(self) -> dict:
        """Facts of this machine that the bits of this run depend on."""
        return run_machine_facts(self.settings)

    @property
    def phase(self) -> PhaseCheckpoints:
        """The phase that a session owns while it works on this run: that of its fit, or of its folds."""
        return self.manager.phase(_owned_phase(self.settings.task, self.settings.models))

    def fold_phase(self, model: str, number: int) -> PhaseCheckpoints:
        """Return the phase of the fit inside a fold; the first is number 1."""
        return self.manager.phase(f"folds_{model}_{number}")

    def fold_path(self, model: str, number: int, count: int) -> Path:
        """Return the file of a finished fold; the first of `count` is number 1."""
        return self.folder / f"fold-{model}-{number}-of-{count}.state"

    def log(self, mirror: str, *, resumable: bool = True) -> Tracker:
        """Open the run's log; where it is resumable, W&B gets the newest state it can be resumed from."""
        snapshot = self._snapshot() if resumable else None
        return Tracker(self.run_id, self.settings.to_dict(), self.folder / "log", mirror=mirror, snapshot=snapshot)

    def _snapshot(self) -> RunSnapshot:
        return RunSnapshot(self.run_id, str(self.manager.folder.folder), str(self.folder), FOLD_FILES)

    @property
    def kind(self) -> str:
        """Kind of artifact that this run makes; "" for folds."""
        return {"train": "model", "stack": "stack"}.get(self.settings.task, "")

    def artifact(self) -> Artifact | None:
        """Return the intact artifact of this run; None without one."""
        if not self.kind:
            return None
        registry, spec = ArtifactRegistry(self.workspace.models), self.settings
        found = registry.find(spec.symbol, spec.horizon, spec.model, kind=self.kind, run_id=self.run_id)
        return found if found is not None and found.is_intact() else None

    def progress(self) -> str:
        """Return the progress of an unfinished run by its newest checkpoints, the fit inside a fold included; "" where
        there is none.
        """
        if self.settings.task == "train":
            return progress_words((self.phase.latest_info() or {}).get("metrics"))
        models = self.settings.models
        found = {name: at for name in models if (at := self.fold_progress(name))}
        return "; ".join(f"{name}: {at}" if len(models) > 1 else at for name, at in found.items())

    def fold_progress(self, model: str) -> str:
        """Return the progress of a model's folds: finished ones, and the fit inside the next one."""
        done, count = finished_folds(self.folder, model)
        if done and done == count:
            return "all folds"
        inside = progress_words((self.fold_phase(model, done + 1).latest_info() or {}).get("metrics"))
        if not done:
            return f"{inside} in the first fold" if inside else ""
        return f"fold {done} of {count}" + (f", {inside} in the next" if inside else "")

    def status(self, *, finished: bool) -> str:
        """Return what was found of this run and what is done now, in one line."""
        spec = self.settings
        what = f"{spec.model} on {spec.symbol}, horizon {spec.horizon}"
        if finished:
            return f"Found {what}: finished before as {self.run_id}. It is loaded; nothing is trained."
        record = files.read_json_or_none(self.folder / "run.json")
        if reached := self.progress():
            before = record.get("environment") if isinstance(record, dict) else None
            elsewhere = ", ".join(describe_differences(before, self.machine)) if before else ""  # not known without
            mark = f" on another machine ({elsewhere}): continued, not bit-exact" if elsewhere else ""
            return f"Found {what}: unfinished at {reached} ({self.run_id}). Resumes from there{mark}."
        if record is not None and not self.ended:
            return f"Found {what}: begun as {self.run_id}, but no checkpoint of it is there. Starts from the beginning."
        if others := _other_runs(self.folder.parent, spec):
            name, differs = list(others.items())[-1]
            return f"Found {what}: {name} {differs}. Opens a new run, {self.run_id}."
        return f"Found nothing of {what}. Starts from the beginning, as {self.run_id}."

    def restore(self, options: RunOptions) -> None:
        """Restore the artifact, or else checkpoints and finished folds, of this run from W&B.

        With source "wandb" the model is loaded from W&B whatever the registry has; otherwise W&B is queried only for a
        run without local state, and the run continues without an answer, for which the process waits and warns once.
        Raises NotPreparedError.
        """
        registry, online = ArtifactRegistry(self.workspace.models), wandb_mirror_mode(options.mirror) == "online"
        if options.source == "wandb":
            where, step = f"run {self.run_id}", 'SOURCE = "registry" finds it here, or trains it'
            if not online:
                raise NotPreparedError("No W&B key to load a model from W&B", where=where, next_step=step)
            if not restore_from_wandb(self.run_id, registry, [self.kind]):
                raise NotPreparedError("W&B has no such model", where=where, next_step=step)
        elif online and not options.fresh and (self.kind or not self.ended):  # an ended run may have been cleaned up
            known = self.kind and registry.find(self.settings.symbol, kind=self.kind, run_id=self.run_id)
            if not known and not self.progress():
                try:
                    restore_from_wandb(self.run_id, registry, [self.kind] if self.kind else [], self._snapshot())
                except FactoryError as error:
                    disable_wandb("Nothing is restored from W&B, and this process does not query it again; runs are "
                                  f"logged locally: {error}")  # fmt: skip


def finished_folds(folder: Path, model: str) -> tuple[int, int]:
    """Return how many folds of a model are finished in a run's folder, and of how many; (0, 0) for none."""
    names = [name for name in files.names(folder) if re.fullmatch(rf"fold-{model}-\d+-of-\d+\.state", name)]
    return len(names), int(names[0].removesuffix(".state").rpartition("-")[2]) if names else 0


def _owned_phase(task: str, models: Sequence[str]) -> str:
    """Return the name of the phase that a session owns while it works on a run."""
    return f"train_{models[0]}" if task == "train" else f"folds_{models[0]}"


@contextmanager
def open_run(workspace: Workspace, settings: RunSettings, options: RunOptions | None = None) -> Iterator[Run]:
    """Open the newest attempt at the run of these settings, another one that `options` names, or a new one.

    Raises CheckpointError when another process works on it, SettingsError for a named run that cannot be resumed.
    """
    options = options or RunOptions(mirror="off")
    parent = workspace.results / check_symbol(settings.symbol)
    if options.run:
        _check_run_matches(parent, settings, options.run)
        attempt = RunFolder(options.run, stored_path(parent, options.run, inside=parent.parent))
    else:
        attempt = newest_run_folder(parent, settings.run_id, options.fresh)
    with open_run_checkpoints(workspace, attempt) as manager:
        run = Run(attempt.run_id, attempt.folder, workspace, settings, manager)
        run.phase.check_unlocked_by_others()
        run.restore(options)
        yield run


# ---- stored runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRun(RunFolder):
    """One attempt at a run, as its folder records it.

    facts : of `run.json`. names : of the files in its folder.
    """

    facts: dict
    names: tuple[str, ...]

    @property
    def added(self) -> bool:
        """True where its folder has a file that no run writes, such as an export."""
        return any(not any(fnmatch(name, own) for own in _OWN) for name in self.names)

    @contextmanager
    def locked(self, workspace: Workspace) -> Iterator[None]:
        """Own the run inside a `with`, so that no training begins or resumes it, on this or another machine.

        Raises CheckpointError when another process works on it.
        """
        models = self.facts["settings"].get("base_models") or [self.facts["model"]]
        name = _owned_phase(self.facts["task"], models)
        with open_run_checkpoints(workspace, self) as manager, manager.phase(name).acquired():
            yield


def read_stored_runs(parent: Path) -> tuple[list[StoredRun], list[Path]]:
    """Read the records of the runs in a folder results/SYMBOL; also return the folders without a readable one."""
    runs, unknown = [], []
    for name in files.names(parent):
        folder = parent / name
        if name.partition("-")[0] not in TASKS or not files.is_folder(folder):
            continue
        try:
            facts = files.read_json_or_none(folder / "run.json") or {}
            known = {key: kind(facts[key]) for key, kind in _FACTS.items()}
            if known["run_id"] != name or known["task"] not in TASKS:
                raise ValueError(name)
            runs.append(StoredRun(name, folder, facts | known, tuple(files.names(folder))))
        except (KeyError, TypeError, ValueError, OverflowError):  # missing or damaged
            unknown.append(folder)
    return runs, unknown


# What each record has, and how it is read.
_FACTS: dict[str, Callable] = {
    "run_id": str, "begun_at": str, "symbol": str, "horizon": int, "model": str, "task": str, "seed": int,
    "quick": bool, "data": str, "settings": dict, "sources": dict,
}  # fmt: skip


def count_trials(workspace: Workspace, symbol: str) -> int:
    """Return the trials of a symbol whose best may have been chosen, 1 at least, each once however often resumed.

    Finished trainings, stacks and cross-validations, barriers that a search has found, rules chosen by hand in
    backtests of test rows; and every trial of `auto`, whose training of the best counts as any other. Attempts at a
    run, or at a search, are one. Raises FileError where the trials of a search are damaged.
    """
    runs, _ = read_stored_runs(workspace.results / symbol)
    tried: dict[str, int] = {}
    for name in files.names(workspace.results / symbol):
        study = RunFolder(name, workspace.results / symbol / name)
        if name.startswith("auto-") and files.is_file(study.folder / TRIALS):
            tried[study.base] = max(tried.get(study.base, 0), len(files.read_json(study.folder / TRIALS)))
    finished = len({one.base for one in runs if one.ended})
    searched = sum(fnmatch(name, "h*-v*.json") for name in files.names(workspace.processed(symbol) / "searched"))
    rules = sum(fnmatch(name, "backtest-rule-*.json") for one in runs for name in one.names)
    return max(finished + searched + rules + sum(tried.values()), 1)


def _other_runs(parent: Path, spec: RunSettings) -> dict[str, str]:
    """Return the runs of the same model, horizon, seed and form that differ otherwise, the newest last: id -> how."""
    wanted, sources, found = spec.to_dict(), spec.sources, {}
    for one in sorted(read_stored_runs(parent)[0], key=lambda run: run.facts["begun_at"]):
        same = all(one.facts[name] == wanted[name] for name in ("horizon", "model", "task", "seed", "quick"))
        if same and one.base != spec.run_id:
            found[one.run_id] = _difference(one.facts, wanted, sources)
    return found


def _difference(stored: Mapping, wanted: Mapping, sources: Mapping) -> str:
    """Describe what prevents resuming a run: its settings with both values where these are short, its code or data."""
    code = dict(stored["sources"]) != sources
    changed = []
    # Other code also changes the base models of a stack.
    for name in sorted({*stored["settings"], *wanted["settings"]} - ({"bases"} if code else set())):
        one, other = (settings.get(name, "as usual") for settings in (stored["settings"], wanted["settings"]))
        if one != other:
            long = isinstance(one, dict | list) or isinstance(other, dict | list)
            changed.append(f"other {name}" if long else f"{name} {one} then, {other} now")
    if changed:
        return f"is of other settings ({', '.join(changed)})"
    return "was begun with other code" if code else "is of other data"


def _check_run_matches(parent: Path, spec: RunSettings, name: str) -> None:
    """Raise SettingsError for a run id that does not exist, or whose settings, data or code differ."""
    if files.is_folder(parent / name) and (name == spec.run_id or name.startswith(f"{spec.run_id}-")):
        return
    if differs := _other_runs(parent, spec).get(name):
        raise SettingsError(
            "This run cannot be resumed", where="run", got=f"{name} {differs}",
            wanted="the same settings, data and code", next_step="leave out run: a new run begins",
        )  # fmt: skip
    names = ", ".join(run.run_id for run in read_stored_runs(parent)[0]) or "none"
    raise SettingsError(
        "No such run of this model, horizon and seed", where="run", got=repr(name), wanted=f"one of: {names}",
        next_step="leave out run: the newest attempt is resumed, or a new one begins",
    )  # fmt: skip
