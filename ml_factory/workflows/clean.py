"""Clean a workspace: list what nothing needs any more, with sizes, and delete it.

Kept, whatever its age: an unfinished run with its checkpoints and data, the newest models of each name and horizon,
the models that a kept stack is made of, the data that these were trained on, and every folder with an export in it.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pandas as pd

from ml_factory.checkpoints.checkpoint_folder import USER_SUFFIX
from ml_factory.errors import CheckpointError, FileError, SettingsError
from ml_factory.numba_cache import list_unused_kernel_folders
from ml_factory.progress import progress_phase
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.private_folder import is_folder_held, private_folder
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.results.base import Result
from ml_factory.workflows.runs.stored_runs import StoredRun, StoredRuns, list_interrupted_removals, read_stored_runs
from ml_factory.workflows.superseded_data import (
    StoredDataSets,
    is_preparing,
    read_stored_data_sets,
    remove_data_set,
    remove_interrupted_data_set,
)

Thing = TypeVar("Thing")
_ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class RemovableItem:
    """One thing that nothing needs.

    kind : "model", "results", "prepared data", "checkpoints", "compiled kernels", "compiled programs" or "leftover".
    path : folder or file.
    size : bytes that its deletion frees.
    why : reason why nothing needs it.
    remove : deletes it; returns False where it is needed again.
    """

    kind: str
    path: Path
    size: int
    why: str
    remove: Callable[[], bool] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class CleanResult(Result):
    """Result of `clean`.

    items : what was found, or deleted.
    deleted : True where it was deleted.
    skipped : what was listed and is still there, in sentences.
    kept : facts that limited the search, in sentences.
    """

    symbol: str
    keep: int
    items: tuple[RemovableItem, ...] = field(repr=False)
    deleted: bool
    skipped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(item.size for item in self.items)

    @property
    def table(self) -> pd.DataFrame:
        """A row per item, the largest first: kind, path, mb, why."""
        rows = [(item.kind, str(item.path), item.size / 1e6, item.why) for item in self._by_size()]
        return pd.DataFrame(rows, columns=["kind", "path", "mb", "why"]).round(3)

    def to_dict(self) -> dict:
        rows = [
            {"kind": item.kind, "path": str(item.path), "bytes": item.size, "why": item.why} for item in self._by_size()
        ]
        given = {"symbol": self.symbol, "keep": self.keep, "deleted": self.deleted, "bytes": self.size, "items": rows}
        return given | {"skipped": list(self.skipped), "kept": list(self.kept), "seconds": self.seconds}

    def summary(self) -> str:
        lines = [f"{item.size / 1e6:10,.1f} MB  {item.kind}: {item.path} ({item.why})" for item in self._by_size()]
        return "\n".join([*lines, self.total()])

    def total(self) -> str:
        """Return the end of the summary: what was left out, and the sum."""
        what = "deleted" if self.deleted else "not needed any more"
        total = f"{self.symbol}: {len(self.items)} {what}, {self.size / 1e6:,.1f} MB; the newest {self.keep} kept"
        return "\n".join([*(f"  {one}" for one in (*self.skipped, *self.kept)), total])

    def _by_size(self) -> list[RemovableItem]:
        return sorted(self.items, key=lambda item: (-item.size, str(item.path)))


def clean(
    workspace: Workspace | str | Path, symbol: str, keep: int = 3, *, dry_run: bool = False,
    listed: CleanResult | None = None,
) -> CleanResult:  # fmt: skip
    """Delete what nothing needs any more: older models and their results, superseded prepared data, checkpoints of
    finished runs that arrived late, kernels compiled from other sources, programs compiled for accelerators that no
    process used for a day, and what killed processes left, such as half-prepared data.

    keep : newest models of each name and horizon that stay, and newest cross-validations.
    dry_run : list only.
    listed : result of a dry run: only what it lists is deleted, as far as nothing needs it by now.

    Whatever another process works on is skipped. Raises SettingsError.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    if type(keep) is not int or keep < 1:
        raise SettingsError("At least one is kept", where="keep", got=repr(keep), wanted="1 or more")
    found, kept = find_removable_items(workspace, symbol, keep)
    skipped: list[str] = []
    if not dry_run:
        shown = None if listed is None else {item.path for item in listed.items}
        wanted = [item for item in found if shown is None or item.path in shown]
        needed = sorted(set() if shown is None else shown - {item.path for item in wanted})
        skipped += [f"kept: {path} is needed, or gone" for path in needed]
        found = []
        with progress_phase("cleaning", len(wanted), of="things") as done:
            for item in wanted:
                try:
                    removed = item.remove()
                    found += [item] if removed else []
                    skipped += [] if removed else [f"kept: {item.path} is needed again"]
                except (FileError, CheckpointError) as error:
                    skipped.append(f"kept: {item.path}: {error}")
                done(1)
    return CleanResult(
        symbol=symbol, keep=keep, items=tuple(found), deleted=not dry_run, skipped=tuple(skipped), kept=kept,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def find_removable_items(workspace: Workspace, symbol: str, keep: int) -> tuple[list[RemovableItem], tuple[str, ...]]:
    """Return (what nothing needs, facts that limited the search)."""
    stored, processed = read_stored_runs(workspace, symbol), workspace.processed(symbol)
    data, registry = read_stored_data_sets(processed), ArtifactRegistry(workspace.models)
    artifacts = registry.list(symbol)
    used = _artifacts_in_use(artifacts, stored.runs, data.current, keep)
    old_models = [one for one in artifacts if one.path not in used]
    old_runs = _superseded_runs(stored.runs, artifacts, used, keep)
    items = [*_leftover_items(workspace, symbol), *_kernel_items(), *_program_items()]
    items += _interrupted_data_items(data)
    items += [_checkpoints_item(workspace, run) for run in stored.runs if run.ended and run not in old_runs]
    kept = tuple(f"kept: models, results and data, since {path} has no readable record" for path in stored.unknown)
    if not kept:
        runs = {run.run_id: run for run in stored.runs}
        items += [_model_item(workspace, registry, one, runs.get(one.facts.get("run_id"))) for one in old_models]
        model_of = {one.facts.get("run_id"): one.path for one in old_models}
        items += [_results_item(workspace, run, model_of.get(run.run_id)) for run in old_runs]
        items += _data_items(data, _data_in_use(stored, artifacts, used, old_runs))
    return [item for item in items if item is not None], kept


def _artifacts_in_use(
    artifacts: Sequence[Artifact], runs: Sequence[StoredRun], current: str | None, keep: int
) -> set[Path]:
    """Return the folders of artifacts that something needs.

    artifacts : oldest first.
    current : fingerprint of the current prepared data: its newest artifact of each model is evaluated.
    """
    by_run, used = {run.run_id: run for run in runs}, []
    newest_first = _grouped(reversed(artifacts), lambda one: (one.kind, one.name, one.facts.get("horizon")))
    for group in newest_first:
        used += group[:keep] + [one for one in group if one.facts.get("data") == current][:1]
    for one in artifacts:
        run = by_run.get(one.facts.get("run_id"))
        unfinished_or_exported = run is not None and (not run.ended or run.added)
        if one.kind not in ("model", "stack") or "run_id" not in one.facts or unfinished_or_exported:
            used.append(one)
    by_hash = {one.hash: one for one in artifacts}
    sources = [digest for run in runs if not run.ended for digest in run.bases]
    found: set[Path] = set()
    while used or sources:
        used += [by_hash[digest] for digest in sources if digest in by_hash]
        used = [one for one in used if one.path not in found]
        found |= {one.path for one in used}
        sources = [digest for one in used for digest in dict(one.made_from.get("models", {})).values()]
        used = []
    return found


def _superseded_runs(
    runs: Sequence[StoredRun], artifacts: Sequence[Artifact], used: set[Path], keep: int
) -> list[StoredRun]:
    """List the finished runs whose results nothing needs.

    The attempts at a run go together: the number of the newest is found by counting.
    """
    models = {one.facts.get("run_id"): one.path in used for one in artifacts}  # run id -> its model is in use
    newest_first = sorted(runs, key=lambda run: run.begun_at, reverse=True)
    removable = []
    for group in _grouped(newest_first, lambda run: (run.task, run.model, run.horizon)):
        for age, run in enumerate(group):
            needed = models.get(run.run_id, age < keep)
            if run.ended and not run.added and not needed:
                removable.append(run)
    staying = {run.base for run in runs if run not in removable}
    return [run for run in removable if run.base not in staying]


def _grouped(things: Iterable[Thing], key: Callable[[Thing], Hashable]) -> list[list[Thing]]:
    """Group things by a key, in their order."""
    groups: dict[Hashable, list[Thing]] = {}
    for one in things:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _data_in_use(
    stored: StoredRuns, artifacts: Sequence[Artifact], used: set[Path], old_runs: Sequence[StoredRun]
) -> set[str]:
    """Return the fingerprints of the prepared data that kept runs and models were made from."""
    of_models = {str(one.facts.get("data")) for one in artifacts if one.path in used}
    return of_models | {run.data for run in stored.runs if run not in old_runs}


# ---------------------------------------------------------------------- items


def _model_item(
    workspace: Workspace, registry: ArtifactRegistry, artifact: Artifact, run: StoredRun | None
) -> RemovableItem:
    def remove() -> bool:
        with nullcontext() if run is None else run.locked(workspace):
            begun = [one for one in read_stored_runs(workspace, artifact.symbol).runs if not one.ended]
            if any(artifact.hash in one.bases for one in begun):  # by a stack that began since it was listed
                return False
            return registry.remove(artifact)

    why = f"{artifact.name}, horizon {artifact.facts.get('horizon')}, of {artifact.registered_at[:16]}"
    return RemovableItem("model", artifact.path, files.folder_bytes(artifact.path), why, remove)


def _results_item(workspace: Workspace, run: StoredRun, model: Path | None) -> RemovableItem:
    def remove() -> bool:
        path = stored_path(run.folder.parent, run.run_id, inside=workspace.results)
        with run.locked(workspace):
            if model is not None and files.is_folder(model):  # it was kept
                return False
            for name in (run.run_id, f"{run.run_id}{USER_SUFFIX}"):
                if files.is_folder(checkpoints := stored_path(workspace.checkpoints, name)):
                    files.remove_folder(checkpoints)
            files.remove_folder(path)
        return True

    why = f"{run.task} of {run.model}, horizon {run.horizon}, of {run.begun_at[:16]}"
    return RemovableItem("results", run.folder, files.folder_bytes(run.folder), why, remove)


def _checkpoints_item(workspace: Workspace, run: StoredRun) -> RemovableItem | None:
    """Return the checkpoints of a finished run: an upload that hung while the run ended leaves one on the drive."""
    folder = stored_path(workspace.checkpoints, run.run_id)
    if not files.names(folder):
        return None

    def remove() -> bool:
        with run.locked(workspace):
            files.remove_folder(folder)
        return True

    return RemovableItem("checkpoints", folder, files.folder_bytes(folder), "of a finished run, saved late", remove)


def _data_items(data: StoredDataSets, needed: set[str]) -> Iterator[RemovableItem]:
    for name in data.superseded(needed):
        folder = data.processed / name
        remove = partial(remove_data_set, data.processed, name)
        yield RemovableItem("prepared data", folder, files.folder_bytes(folder), "superseded", remove)


def _kernel_items() -> Iterator[RemovableItem]:
    for folder in list_unused_kernel_folders():
        why = "compiled from other sources, unused for a day"
        remove = partial(_remove_folder, folder, folder.parent)
        yield RemovableItem("compiled kernels", folder, files.folder_bytes(folder), why, remove)


def _program_items() -> Iterator[RemovableItem]:
    """Yield the caches of programs compiled by XLA, inductor and Triton: they are compiled again when needed."""
    top = private_folder("programs")
    for folder in sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink()):
        if _is_abandoned(folder):
            remove = partial(_remove_abandoned_folder, folder, top)
            size, why = files.folder_bytes(folder), "used by no process for a day; compiled again when needed"
            yield RemovableItem("compiled programs", folder, size, why, remove)


def _is_abandoned(folder: Path) -> bool:
    """Return whether no process holds a local folder, and nothing in it was written for a day."""
    newest = max((path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
    return time.time() - newest > _ABANDONED_SECONDS and not is_folder_held(folder)


def _remove_abandoned_folder(folder: Path, inside: Path) -> bool:
    return _is_abandoned(folder) and _remove_folder(folder, inside)


def _interrupted_data_items(data: StoredDataSets) -> Iterator[RemovableItem]:
    if is_preparing(data.processed):
        return
    for name in sorted(data.begun()):
        folder = data.processed / name
        remove = partial(remove_interrupted_data_set, data.processed, name)
        yield RemovableItem("prepared data", folder, files.folder_bytes(folder), "of an interrupted prepare", remove)


def _leftover_items(workspace: Workspace, symbol: str) -> Iterator[RemovableItem]:
    for top in (workspace.results, workspace.models, workspace.processed(symbol).parent):
        for folder in list_interrupted_removals(top / symbol):
            remove = partial(_remove_folder, folder, top)
            yield RemovableItem("leftover", folder, files.folder_bytes(folder), "of an interrupted clean", remove)


def _remove_folder(folder: Path, inside: Path) -> bool:
    files.remove_folder(stored_path(folder.parent, folder.name, inside=inside))
    return True
