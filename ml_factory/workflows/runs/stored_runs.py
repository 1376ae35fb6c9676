"""Runs of a symbol as their folders under results/SYMBOL record them: what each is, if it ended, what it needs."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.settings import TASKS
from ml_factory.storage.files import REMOVED, files
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.found_barriers import found_barriers_names
from ml_factory.workflows.unit_checkpoints import FINISHED_PARTS, fit_phase_name, folds_phase_name

_ATTEMPT = re.compile(r"(.*-[0-9a-f]{10})(?:-\d+)?")
# What runs themselves write into their folders.
_OWN = (
    "run.json", "done.json", "log", "predictions.parquet", "predictions.json", "report.html", "report.json",
    "backtest*.json", "backtest*.csv", "folds.parquet", "paths.parquet", "*.lock", ".*",
    *FINISHED_PARTS,
)  # fmt: skip


@dataclass(frozen=True)
class StoredRun:
    """One attempt at a run.

    base : its run id without the number of the attempt.
    data : fingerprint of the prepared data.
    models : names of the models that it trains.
    bases : hashes of the artifacts that a stack combines.
    begun_at : UTC, ISO 8601.
    ended : True where it is marked as finished.
    rules : trading rules that were chosen by hand in backtests of its test rows.
    added : a file in its folder that no run writes, such as an export; "" for none.
    """

    folder: Path
    run_id: str
    base: str
    task: str
    model: str
    horizon: int
    data: str
    models: tuple[str, ...]
    bases: tuple[str, ...]
    begun_at: str
    ended: bool
    rules: int
    added: str

    @contextmanager
    def locked(self, workspace: Workspace) -> Iterator[None]:
        """Own the run inside a `with`, so that no training begins or resumes it, on this or another machine.

        Raises CheckpointError when another process works on it.
        """
        name = fit_phase_name(self.model) if self.task == "train" else folds_phase_name(self.models[0])
        run = RunFolder(self.run_id, self.folder)
        with open_run_checkpoints(workspace.checkpoints, run) as manager, manager.phase(name).acquired():
            yield


@dataclass(frozen=True)
class StoredRuns:
    """The runs of one symbol.

    unknown : folders of runs whose record cannot be read: what they need is not known.
    """

    runs: tuple[StoredRun, ...]
    unknown: tuple[Path, ...]


def count_trials(workspace: Workspace, symbol: str) -> int:
    """Return the trials of a symbol whose best may have been chosen, 1 at least, each once however often resumed.

    Finished trainings, stacks and cross-validations, barriers that a search has found, and rules chosen by hand in
    backtests of test rows.
    """
    runs = read_stored_runs(workspace, symbol).runs
    finished = len({one.base for one in runs if one.ended})
    searched = len(found_barriers_names(workspace.processed(symbol)))
    return max(finished + searched + sum(one.rules for one in runs), 1)


def read_stored_runs(workspace: Workspace, symbol: str) -> StoredRuns:
    """Read the record of every run of a symbol."""
    parent, runs, unknown = workspace.results / symbol, [], []
    for name in files.names(parent):
        if name.partition("-")[0] not in TASKS or not files.is_folder(parent / name):
            continue
        try:
            runs.append(_read_run(parent / name))
        except (KeyError, TypeError, ValueError, OverflowError):  # missing or damaged
            unknown.append(parent / name)
    return StoredRuns(tuple(runs), tuple(unknown))


def list_interrupted_removals(parent: Path) -> list[Path]:
    """List the folders that a killed process was deleting."""
    return [parent / name for name in files.names(parent) if name.startswith(REMOVED)]


def _read_run(folder: Path) -> StoredRun:
    """Read one record. Raises KeyError, TypeError or ValueError where it is not one."""
    record = files.read_json_or_none(folder / "run.json")
    settings, found = record["settings"], _ATTEMPT.fullmatch(folder.name)
    if not isinstance(settings, Mapping) or record["run_id"] != folder.name or not found or record["task"] not in TASKS:
        raise ValueError(folder)
    names = files.names(folder)
    return StoredRun(
        folder=folder, run_id=folder.name, base=found[1], task=record["task"], model=str(record["model"]),
        horizon=int(record["horizon"]), data=str(record["data"]),
        models=tuple(settings.get("base_models") or (str(record["model"]),)),
        bases=tuple(settings.get("bases") or ()), begun_at=str(record["begun_at"]), ended="done.json" in names,
        rules=sum(fnmatchcase(name, "backtest-rule-*.json") for name in names),
        added=next((name for name in names if not any(fnmatchcase(name, one) for one in _OWN)), ""),
    )  # fmt: skip
