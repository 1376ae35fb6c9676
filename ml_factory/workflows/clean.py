"""Clean a workspace: list what nothing needs any more, with sizes, and delete it.

Kept, whatever its age: an unfinished run with its checkpoints and data, the newest models of each name and horizon,
the models that a kept stack is made of, the data that these were trained on, and every folder with an export in it.
"""

import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pandas as pd

from ml_factory.checkpoints.checkpoint_folder import USER_SUFFIX
from ml_factory.datasets.store import DatasetStore, read_dataset_manifest
from ml_factory.errors import CheckpointError, FileError, NotPreparedError, SettingsError
from ml_factory.progress import progress_phase
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.locks import check_lock_file_free, file_lock
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.results.base import Result
from ml_factory.workflows.runs.stored_runs import StoredRun, list_interrupted_removals, read_stored_runs

Thing = TypeVar("Thing")
_DATA_SET = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class RemovableItem:
    """One thing that nothing needs.

    kind : "model", "results", "prepared data", "checkpoints" or "leftover".
    path : folder.
    size : bytes that its deletion frees.
    why : reason why nothing needs it.
    """

    kind: str
    path: Path
    size: int
    why: str


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
    finished runs that arrived late, and what killed processes left, such as half-prepared data.

    keep : newest models of each name and horizon that stay, and newest cross-validations.
    dry_run : list only.
    listed : result of a dry run: only what it lists is deleted, as far as nothing needs it by now.

    Whatever another process works on is skipped. Raises SettingsError.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    if type(keep) is not int or keep < 1:
        raise SettingsError("At least one is kept", where="keep", got=repr(keep), wanted="1 or more")
    found = _Needless(workspace, symbol, keep)
    items = [RemovableItem(one.kind, path, files.folder_bytes(path), one.why) for path, one in found.things.items()]
    skipped: list[str] = []
    if not dry_run:
        shown = found.things.keys() if listed is None else {item.path for item in listed.items}
        wanted, items = [item for item in items if item.path in shown], []
        skipped += [f"kept: {path} is needed, or gone" for path in sorted(shown - found.things.keys())]
        with progress_phase("cleaning", len(wanted), of="things") as done:
            for item in wanted:
                try:
                    if _remove(found.things[item.path], item.path, workspace, symbol, keep):
                        items.append(item)
                    else:
                        skipped.append(f"kept: {item.path} is needed again")
                except (FileError, CheckpointError) as error:
                    skipped.append(f"kept: {item.path}: {error}")
                done(1)
    return CleanResult(
        symbol=symbol, keep=keep, items=tuple(items), deleted=not dry_run, skipped=tuple(skipped), kept=found.kept,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


@dataclass(frozen=True)
class _Thing:
    """A folder that nothing needs.

    inside : folder of the workspace or of this machine in which it must be.
    run : whose lock is held while it is deleted.
    artifact : a model, or that of results.
    """

    kind: str
    why: str
    inside: Path
    run: StoredRun | None = None
    artifact: Artifact | None = None


def _remove(thing: _Thing, path: Path, workspace: Workspace, symbol: str, keep: int) -> bool:
    """Delete it under the lock of the process that could need it; return False where it is needed by now."""
    processed = workspace.processed(symbol)
    with ExitStack() as locks:
        if thing.run is not None:
            locks.enter_context(thing.run.locked(workspace))
        if thing.kind == "prepared data":
            if _is_preparing(processed) and thing.why != "superseded":
                return False
            locks.enter_context(file_lock(processed / "prepare.lock"))
        if thing.kind == "results":
            if thing.artifact is not None and files.is_folder(thing.artifact.path):  # it was kept
                return False
            for name in (thing.run.run_id, f"{thing.run.run_id}{USER_SUFFIX}"):
                if files.is_folder(checkpoints := stored_path(workspace.checkpoints, name)):
                    files.remove_folder(checkpoints)
        elif path not in _Needless(workspace, symbol, keep, ours=thing.kind == "prepared data").things:
            return False
        elif thing.artifact is not None:
            return ArtifactRegistry(workspace.models).remove(thing.artifact)
        files.remove_folder(stored_path(path.parent, path.name, inside=thing.inside))
    return True


class _Needless:
    """Everything that nothing needs now.

    things : path -> what it is, models before the results of their runs.
    kept : facts that limited the search.
    """

    def __init__(self, workspace: Workspace, symbol: str, keep: int, ours: bool = False):
        """Search; `ours` where this process has the lock of `prepare`."""
        stored, processed = read_stored_runs(workspace, symbol), workspace.processed(symbol)
        complete = _data_sets(processed)
        runs, artifacts, current = (
            stored.runs,
            ArtifactRegistry(workspace.models).list(symbol),
            _current_data(processed),
        )
        self.things = dict(_leftovers(workspace, symbol))
        if ours or not _is_preparing(processed):
            begun = sorted(
                name for name in files.names(processed) if _DATA_SET.fullmatch(name) and name not in complete
            )
            thing = _Thing("prepared data", "of an interrupted prepare", processed.parent)
            self.things |= {processed / name: thing for name in begun if name not in complete}
        used, by_id = _artifacts_in_use(artifacts, runs, current, keep), {run.run_id: run for run in runs}
        old_runs = _superseded_runs(runs, artifacts, used, keep)
        for run in runs:
            # An upload that hung while the run ended leaves a checkpoint on the drive.
            if run.ended and run not in old_runs and files.names(stored_path(workspace.checkpoints, run.run_id)):
                thing = _Thing("checkpoints", "of a finished run, saved late", workspace.checkpoints, run)
                self.things[stored_path(workspace.checkpoints, run.run_id)] = thing
        self.kept = tuple(
            f"kept: models, results and data, since {path} has no readable record" for path in stored.unknown
        )
        if self.kept:
            return
        for one in artifacts:
            if one.path not in used:
                why = f"{one.name}, horizon {one.facts.get('horizon')}, of {one.registered_at[:16]}"
                run = by_id.get(one.facts.get("run_id"))
                self.things[one.path] = _Thing("model", why, workspace.models, run, one)
        model_of = {one.facts.get("run_id"): one for one in artifacts if one.path in self.things}
        for run in old_runs:
            why = f"{run.task} of {run.model}, horizon {run.horizon}, of {run.begun_at[:16]}"
            self.things[run.folder] = _Thing("results", why, workspace.results, run, model_of.get(run.run_id))
        of_models = {str(one.facts.get("data")) for one in artifacts if one.path in used}
        needed = of_models | {run.data for run in runs if run not in old_runs} | {current}
        for name, fingerprint in complete.items() if current else ():
            if fingerprint not in needed:
                self.things[processed / name] = _Thing("prepared data", "superseded", processed.parent)


def _data_sets(processed: Path) -> dict[str, str]:
    """Return folder name -> fingerprint of every complete data set."""
    found = {}
    for name in files.names(processed):
        if _DATA_SET.fullmatch(name) and files.is_folder(processed / name):
            manifest = read_dataset_manifest(processed / name)
            if manifest is not None and manifest["fingerprint"][:12] == name:
                found[name] = manifest["fingerprint"]
    return found


def _current_data(processed: Path) -> str | None:
    """Return the fingerprint of the data set that is read; None where its pointer is missing or damaged."""
    try:
        return DatasetStore.current(processed).fingerprint
    except NotPreparedError:
        return None


def _is_preparing(processed: Path) -> bool:
    """Return whether a process of this machine prepares this symbol now."""
    try:
        check_lock_file_free(processed / "prepare.lock", "the prepared data")
    except CheckpointError:
        return True
    return False


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


def _leftovers(workspace: Workspace, symbol: str) -> Iterator[tuple[Path, _Thing]]:
    """Yield what killed processes left."""
    for top in (workspace.results, workspace.models, workspace.processed(symbol).parent):
        for folder in list_interrupted_removals(top / symbol):
            yield folder, _Thing("leftover", "of an interrupted clean", top)
