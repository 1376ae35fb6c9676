"""Status of a run in one line: what was found in the workspace, and what is done now."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import SettingsError
from ml_factory.models.base import describe_differences
from ml_factory.run_folder import RunFolder, open_run_checkpoints, run_machine_facts
from ml_factory.settings import RunSettings
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.unit_checkpoints import (
    fit_phase_name,
    fold_fit_phase_name,
    fold_forecasts_path,
    folds_phase_name,
    format_fold_progress,
)

_SAME = ("symbol", "horizon", "model", "task", "seed", "quick")


@dataclass(frozen=True)
class _OtherRun:
    """A run of the same model, horizon, seed and form with other settings, data or code.

    begun_at : UTC, ISO 8601.
    differs : what prevents resuming it, in words.
    """

    run_id: str
    begun_at: str
    differs: str


def check_run_unlocked(workspace: Workspace, run: RunFolder, spec: RunSettings) -> None:
    """Raise CheckpointError when another process works on this run, before anything is printed or begun."""
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        owned = fit_phase_name(spec.model) if spec.task == "train" else folds_phase_name(spec.models[0])
        manager.phase(owned).check_unlocked_by_others()


def format_run_status(workspace: Workspace, run: RunFolder, spec: RunSettings, *, finished: bool) -> str:
    """Return what was found of this run and what is done now, in one line.

    finished : True where its artifact exists.
    """
    what = f"{spec.model} on {spec.symbol}, horizon {spec.horizon}"
    if finished:
        return f"Found {what}: finished before as {run.run_id}. It is loaded; nothing is trained."
    reached = unfinished_run_progress(workspace, run, spec)
    if reached:
        elsewhere = ", ".join(describe_differences(_read_run_machine(run), run_machine_facts(spec)))
        mark = f" on another machine ({elsewhere}): continued, not bit-exact" if elsewhere else ""
        return f"Found {what}: unfinished at {reached} ({run.run_id}). Resumes from there{mark}."
    if files.is_file(run.folder / "run.json") and not run.ended:
        return f"Found {what}: begun as {run.run_id}, but no checkpoint of it is there. Starts from the beginning."
    others = _find_other_runs(run.folder.parent, spec)
    if others:
        more = f", and {len(others) - 1} earlier ones differ too" if len(others) > 1 else ""
        return f"Found {what}: {others[-1].run_id} {others[-1].differs}{more}. Opens a new run, {run.run_id}."
    return f"Found nothing of {what}. Starts from the beginning, as {run.run_id}."


def unfinished_run_progress(workspace: Workspace, run: RunFolder, spec: RunSettings) -> str:
    """Return the progress of a run by its newest checkpoints, the fit inside a fold included; "" where there is
    none.
    """
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        if spec.task == "train":
            return _newest_progress(manager, fit_phase_name(spec.model))
        progress = {name: _folds(manager, run, name) for name in spec.models}
    return "; ".join(f"{name}: {at}" if len(progress) > 1 else at for name, at in progress.items() if at)


def _folds(manager: CheckpointManager, run: RunFolder, model: str) -> str:
    if files.is_file(fold_forecasts_path(run, model)):
        return "all folds"
    found = manager.phase(folds_phase_name(model)).latest_info()
    done = int(found["metrics"]["finished"]) if found else 0
    return format_fold_progress(
        _newest_progress(manager, folds_phase_name(model)), _newest_progress(manager, fold_fit_phase_name(model, done))
    )


def _newest_progress(manager: CheckpointManager, phase: str) -> str:
    found = manager.phase(phase).latest_info()
    return "" if found is None else str(found["metrics"].get("reached", "a checkpoint"))


def _read_run_machine(run: RunFolder) -> dict | None:
    """Return the machine that began a run; None where it is unknown."""
    record = files.read_json_or_none(run.folder / "run.json")
    return record.get("environment") if isinstance(record, dict) else None


def _find_other_runs(parent: Path, spec: RunSettings) -> list[_OtherRun]:
    """Return runs of the same model, horizon, seed and form that differ otherwise, the newest last."""
    wanted, sources, found = spec.to_dict(), spec.all_sources, []
    for path in _run_records(parent, f"{spec.task}-{spec.model}-h{spec.horizon}-"):
        try:
            stored = files.read_json_or_none(path)
            same = all(stored[name] == wanted[name] for name in _SAME) and not stored["run_id"].startswith(spec.run_id)
            settings, code = dict(stored["settings"]), dict(stored["sources"]) != sources
        except (KeyError, TypeError, ValueError):  # missing or damaged
            continue
        if same:
            # Other code also changes the base models of a stack.
            changed = _differing_settings(settings, wanted["settings"], ignoring="bases" if code else "")
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            differs = f"is of other settings ({', '.join(changed[:3])}{more})" if changed else "is of other data"
            differs = "was begun with other code" if code and not changed else differs
            found.append(_OtherRun(stored["run_id"], str(stored.get("begun_at") or ""), differs))
    return sorted(found, key=lambda one: one.begun_at)


def _differing_settings(stored: Mapping, wanted: Mapping, ignoring: str) -> list[str]:
    """Return the settings in which two runs differ, with both values where these are short."""
    found = []
    for name in sorted({*stored, *wanted} - {ignoring}):
        one, other = stored.get(name, "as usual"), wanted.get(name, "as usual")
        if one != other:
            long = isinstance(one, Mapping | list | tuple) or isinstance(other, Mapping | list | tuple)
            found.append(f"other {name}" if long else f"{name} {one} then, {other} now")
    return found


def _run_records(parent: Path, start: str = "") -> list[Path]:
    """Return the `run.json` files of runs whose names begin like this, in order of their names."""
    return [parent / name / "run.json" for name in files.names(parent) if name.startswith(start)]


def check_run_matches(parent: Path, spec: RunSettings, run_name: str) -> None:
    """Raise SettingsError for a run id that does not exist, or whose settings, data or code differ."""
    if run_name == spec.run_id or run_name.startswith(f"{spec.run_id}-"):
        if files.is_folder(parent / run_name):
            return
        other = None
    else:
        other = next((one for one in _find_other_runs(parent, spec) if one.run_id == run_name), None)
    if other is None:
        names = ", ".join(path.parent.name for path in _run_records(parent) if files.is_file(path)) or "none"
        raise SettingsError(
            "No such run of this model, horizon and seed", where="run", got=repr(run_name),
            wanted=f"one of: {names}", next_step="leave out run: the newest attempt is resumed, or a new one begins",
        )  # fmt: skip
    raise SettingsError(
        "This run cannot be resumed", where="run", got=f"{other.run_id} {other.differs}",
        wanted="the same settings, data and code", next_step="leave out run: a new run begins",
    )  # fmt: skip
