"""`clean`: list what nothing needs any more, with sizes, and delete it.

Kept, whatever its age: an unfinished run with its checkpoints and data, the newest models of each name and horizon,
the models that a kept stack is made of, the data that these were trained on, and every folder with an export in it.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ml_factory.checkpoints.checkpoint_folder import USER_SUFFIX
from ml_factory.datasets.store import DatasetStore, read_dataset_manifest
from ml_factory.errors import CheckpointError, FileError, NotPreparedError, SettingsError
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.runs import StoredRun, read_stored_runs
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import REMOVED, files, stored_path
from ml_factory.storage.locks import acquire_lock_file, is_lock_file_held, release_lock_file
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit

_DATA_SET = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class RemovableItem:
    """One folder that nothing needs.

    kind : "model", "results", "prepared data", "checkpoints" or "leftover".
    why : reason why nothing needs it.
    inside : folder of the workspace or of this machine in which it must be.
    run : whose lock is held while it is deleted.
    artifact : a model, or that of results.
    size : bytes that its deletion frees.
    """

    kind: str
    path: Path
    why: str
    inside: Path
    run: StoredRun | None = None
    artifact: Artifact | None = None
    size: int = 0

    def to_dict(self) -> dict:
        return {"kind": self.kind, "path": str(self.path), "bytes": self.size, "why": self.why}


@push_workspace_on_exit
def clean(
    workspace: Workspace | str | Path, symbol: str, keep: int = 3, *, dry_run: bool = False,
    listed: Result | None = None,
) -> Result:  # fmt: skip
    """Delete what nothing needs any more: older models and their results, superseded prepared data, checkpoints of
    finished runs that arrived late, and what killed processes left, such as half-prepared data.

    keep : newest models of each name and horizon that stay, and newest cross-validations.
    dry_run : list only.
    listed : result of a dry run: only what it lists is deleted, as far as nothing needs it by now.

    Whatever another process works on is skipped. Raises SettingsError.

    The result has `items`, what was found, or deleted where `deleted` is True, the largest first; their `bytes`;
    `skipped`, what was listed and is still there, and `kept`, facts that limited the search, in sentences.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    if type(keep) is not int or keep < 1:
        raise SettingsError("At least one is kept", where="keep", got=repr(keep), wanted="1 or more")
    with _without_prepare(workspace.processed(symbol), dry_run) as idle:
        find = partial(_find_needless, workspace, symbol, keep, data=idle)
        needless, kept = find()
        items = [replace(one, size=files.folder_bytes(one.path)) for one in needless.values()]
        shown = needless.keys() if listed is None else {item.path for item in listed.items}
        skipped = [f"kept: {path} is needed, or gone" for path in sorted(shown - needless.keys())]
        if not dry_run:
            wanted, items = [item for item in items if item.path in shown], []
            with progress_phase("cleaning", len(wanted), of="things") as done:
                for item in wanted:
                    try:
                        removed = _remove(item, workspace, lambda: find(deleted=items)[0])
                        (items if removed else skipped).append(item if removed else f"kept: {item.path} is needed")
                    except (FileError, CheckpointError) as error:
                        skipped.append(f"kept: {item.path}: {error}")
                    done(1)
    items.sort(key=lambda item: (-item.size, str(item.path)))
    size, what = sum(item.size for item in items), "not needed any more" if dry_run else "deleted"
    lines = [f"{one.size / 1e6:10,.1f} MB  {one.kind}: {one.path} ({one.why})" for one in items] if not listed else []
    total = f"{symbol}: {len(items)} {what}, {size / 1e6:,.1f} MB; the newest {keep} kept"
    return Result(
        [*lines, *(f"  {one}" for one in (*skipped, *kept)), total], symbol=symbol, keep=keep, items=tuple(items),
        bytes=size, deleted=not dry_run, skipped=tuple(skipped), kept=kept, seconds=time.perf_counter() - started,
    )  # fmt: skip


@contextmanager
def _without_prepare(processed: Path, dry_run: bool) -> Iterator[bool]:
    """Hold the lock of `prepare` inside a `with`; it yields False where another process prepares this symbol now.

    dry_run : only look at the lock, and write nothing.
    """
    lock = processed / "prepare.lock"
    if dry_run or not files.is_folder(processed):
        yield not is_lock_file_held(lock)
        return
    try:
        acquire_lock_file(lock, "the prepared data")
    except CheckpointError:
        yield False
        return
    try:
        yield True
    finally:
        release_lock_file(lock)


def _remove(item: RemovableItem, workspace: Workspace, needless: Callable[[], Collection[Path]]) -> bool:
    """Delete it under the lock of its run; return False where something needs it by now, or its model is there."""
    with nullcontext() if item.run is None else item.run.locked(workspace):
        if item.path not in needless():
            return False
        if item.kind == "model":
            return ArtifactRegistry(workspace.models).remove(item.artifact)
        if item.artifact is not None and files.is_folder(item.artifact.path):
            return False
        for name in (item.path.name, f"{item.path.name}{USER_SUFFIX}") if item.kind == "results" else ():
            if files.is_folder(checkpoints := stored_path(workspace.checkpoints, name)):
                files.remove_folder(checkpoints)
        files.remove_folder(stored_path(item.path.parent, item.path.name, inside=item.inside))
        return True


def _find_needless(
    workspace: Workspace, symbol: str, keep: int, *, data: bool, deleted: Sequence[RemovableItem] = ()
) -> tuple[dict[Path, RemovableItem], tuple[str, ...]]:
    """Return what nothing needs now by its path, models before the results of their runs; and what limited the search.

    data : False leaves out half-prepared data, which another process may be writing.
    deleted : deleted before; the results of a deleted model are not needed either.
    """
    (runs, unknown), processed = read_stored_runs(workspace.results / symbol), workspace.processed(symbol)
    artifacts, data_sets = ArtifactRegistry(workspace.models).list(symbol), _data_sets(processed)
    current = _current_data(processed)
    used = _artifacts_in_use(artifacts, runs, current, keep)
    gone = [one.artifact for one in deleted if one.kind == "model" and one.artifact]
    old_runs = _superseded_runs(runs, [*gone, *artifacts], used, keep)
    found = list(_leftovers(workspace, symbol))
    torn = [name for name, fingerprint in data_sets.items() if data and not fingerprint]
    found += [
        RemovableItem("prepared data", processed / name, "of an interrupted prepare", processed.parent) for name in torn
    ]
    for run in runs:
        # An upload that hung while the run ended leaves a checkpoint on the drive.
        late = stored_path(workspace.checkpoints, run.run_id)
        if run.ended and run not in old_runs and files.names(late):
            found.append(
                RemovableItem("checkpoints", late, "of a finished run, saved late", workspace.checkpoints, run)
            )
    if not unknown:
        by_id, by_run = {run.run_id: run for run in runs}, {one.facts.get("run_id"): one for one in artifacts}
        for one in artifacts:
            if one.path not in used:
                why = f"{one.name}, horizon {one.facts.get('horizon')}, of {one.registered_at[:16]}"
                run = by_id.get(one.facts.get("run_id"))
                found.append(RemovableItem("model", one.path, why, workspace.models, run, one))
        for run in reversed(old_runs):  # the oldest first: what is left keeps its age
            what = run.facts
            why = f"{what['task']} of {what['model']}, horizon {what['horizon']}, of {what['begun_at'][:16]}"
            made = by_run.get(run.run_id)
            found.append(RemovableItem("results", run.folder, why, workspace.results, run, made))
        needed = {str(one.facts.get("data")) for one in artifacts if one.path in used} | {current, ""}
        needed |= {run.facts["data"] for run in runs if run not in old_runs}
        found += [
            RemovableItem("prepared data", processed / name, "superseded", processed.parent)
            for name, fingerprint in data_sets.items() if data and current and fingerprint not in needed
        ]  # fmt: skip
    kept = tuple(f"kept: models, results and data, since {path} has no readable record" for path in unknown)
    return {one.path: one for one in found}, kept


def _data_sets(processed: Path) -> dict[str, str]:
    """Return folder name -> fingerprint of every data set; "" of an incomplete one."""
    found = {}
    for name in files.names(processed):
        if _DATA_SET.fullmatch(name) and files.is_folder(processed / name):
            manifest = read_dataset_manifest(processed / name)
            complete = manifest is not None and manifest["fingerprint"][:12] == name
            found[name] = manifest["fingerprint"] if complete else ""
    return found


def _current_data(processed: Path) -> str | None:
    """Return the fingerprint of the data set that is read; None where its pointer is missing or damaged."""
    try:
        return DatasetStore.current(processed).fingerprint
    except NotPreparedError:
        return None


def _artifacts_in_use(
    artifacts: Sequence[Artifact], runs: Sequence[StoredRun], current: str | None, keep: int
) -> set[Path]:
    """Return the folders of artifacts that something needs.

    artifacts : oldest first.
    current : fingerprint of the current prepared data: its newest artifact of each model is evaluated.
    """
    by_run, by_hash, used = {run.run_id: run for run in runs}, {one.hash: one for one in artifacts}, []
    for group in _grouped(reversed(artifacts), lambda one: (one.kind, one.name, one.facts.get("horizon"))):
        used += group[:keep] + [one for one in group if one.facts.get("data") == current][:1]
    for one in artifacts:
        run = by_run.get(one.facts.get("run_id"))
        unfinished_or_exported = run is not None and (not run.ended or run.added)
        if one.kind not in ("model", "stack") or "run_id" not in one.facts or unfinished_or_exported:
            used.append(one)
    bases = [digest for run in runs if not run.ended for digest in run.facts["settings"].get("bases") or ()]
    bases += [digest for one in used for digest in dict(one.made_from.get("models", {})).values()]
    return {one.path for one in [*used, *(by_hash[digest] for digest in bases if digest in by_hash)]}


def _superseded_runs(
    runs: Sequence[StoredRun], artifacts: Sequence[Artifact], used: set[Path], keep: int
) -> list[StoredRun]:
    """List the finished runs whose results nothing needs.

    The attempts at a run go together: the number of the newest is found by counting.
    """
    models = {one.facts.get("run_id"): one.path in used for one in artifacts}  # run id -> its model is in use
    newest_first = sorted(runs, key=lambda run: run.facts["begun_at"], reverse=True)
    removable = []
    for group in _grouped(newest_first, lambda run: [run.facts[name] for name in ("task", "model", "horizon")]):
        for age, run in enumerate(group):
            if run.ended and not run.added and not models.get(run.run_id, age < keep):
                removable.append(run)
    staying = {run.base for run in runs if run not in removable}
    return [run for run in removable if run.base not in staying]


def _grouped(things: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Group things by a key, in their order."""
    groups: dict[str, list[Any]] = {}
    for one in things:
        groups.setdefault(repr(key(one)), []).append(one)
    return list(groups.values())


def _leftovers(workspace: Workspace, symbol: str) -> Iterator[RemovableItem]:
    """Yield what killed processes left."""
    for top in (workspace.results, workspace.models, workspace.processed(symbol).parent):
        for name in files.names(top / symbol):
            if name.startswith(REMOVED):
                yield RemovableItem("leftover", top / symbol / name, "of an interrupted clean", top)
