"""A search for barriers on the training rows of prepared data, and the label spec it leaves behind.

    processed/{SYMBOL}/searched/h20-v1.json       the barriers found, the search, and the rows it saw; never overwritten
                                trials-{run}.json   every trial of a finished search, whose checkpoints are given back
    results/{SYMBOL}/barriers-h20-…/search.json   an attempt at a search: what decides it

Other barriers prove other labels at the end of the bars, which moves the chronological split by a few rows. A search
sees the training rows of the earliest such split, so that what it finds is never refused by the split it leads to.
"""

import importlib.metadata
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from ml_factory.code_fingerprint import source_hash
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.run_folder import RunFolder, newest_run_folder, open_run_checkpoints, run_path
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.fixed_horizon import fixed_horizon_return
from ml_factory.targets.label_table import mark_inferred_labels
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.wandb_process import wandb_mirror_mode
from ml_factory.tracking.wandb_restore import try_restore_from_wandb
from ml_factory.workflows.barriers.barrier_trials import load_barrier_trial_frames, run_barrier_trials
from ml_factory.workflows.prove import stored_data_settings
from ml_factory.workflows.results.data import SearchBarriersResult
from ml_factory.workflows.runs.restore_run import tracked_run

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


def run_barrier_search(
    workspace: Workspace, symbol: str, horizon: int, spec: BarrierSearchSpec | None, fresh: bool, run_name: str = "",
    mirror: str = "off",
) -> SearchBarriersResult:  # fmt: skip
    """Search barriers, or resume an interrupted search, and write the label spec; arguments are checked before.

    run_name : id of the attempt to resume. Raises SettingsError where it is no attempt at this search.
    """
    started = time.perf_counter()
    store = DatasetStore.current(workspace.processed(symbol))
    settings = stored_data_settings(store)
    spec = BarrierSearchSpec(replace(settings.labels, horizon=horizon)) if spec is None else spec
    spec = replace(spec, labels=replace(spec.labels, horizon=horizon))
    base, _, market = frames = load_barrier_trial_frames(workspace, store)
    train, evaluated = barrier_search_rows(base, spec, market, settings.splits, store.facts["first"])
    folder = store.folder.parent / "searched"
    run = _open_search_run(workspace.results / symbol, store, spec, fresh, run_name)
    results_path, decided = folder / f"trials-{run.run_id}.json", _search_identity(store, spec)
    with open_run_checkpoints(workspace.checkpoints, run) as manager, progress_phase("barriers", spec.trials) as done:
        kept = ((str(folder), results_path.name),)
        snapshot = RunSnapshot(run.run_id, str(manager.store.home_folder), kept)
        begun = files.is_file(results_path) or manager.phase("trials").latest_info()
        if not begun and not fresh and wandb_mirror_mode(mirror) == "online":
            try_restore_from_wandb(manager, snapshot)
        with tracked_run(manager, run, decided, snapshot, mirror, owned="trials") as finish:
            outcome = run_barrier_trials(
                manager.phase("trials"), frames, train, evaluated, spec, results_path=results_path, done=done
            )
            finish(outcome.spec.best)
    found = outcome.spec
    path, reused = _write_spec(folder, found, fresh)
    trials = _barrier_search_trial_table(spec, outcome.record["trials"])
    return SearchBarriersResult(
        run_id=run.run_id, symbol=symbol, horizon=horizon, name=path.stem, labels=asdict(found.labels),
        seen_rows=asdict(found.seen_rows), best=found.best, trials=trials, resumed_from=outcome.resumed or None,
        exact=not outcome.nondeterminism, inexact_because=outcome.nondeterminism, reused=reused,
        path=path,
        seconds=time.perf_counter() - started, draw=lambda: plots.plot_barrier_trials(trials),
    )  # fmt: skip


def barrier_search_rows(
    base: ResampledBars, spec: BarrierSearchSpec, market: MarketSpec, splits: SplitSpec, first: int
) -> tuple[pd.DatetimeIndex, pd.DatetimeIndex]:
    """Return known_at of the training rows, and of all rows from the first validation row on.

    Base bars before `first` have no features. The labels here end at the vertical barrier, which proves the fewest
    labels at the end of the bars, so the split is the earliest that any trial's labels can have.
    """
    labels = mark_inferred_labels(fixed_horizon_return(base, spec.labels, market), base, market)
    labels = labels[labels["entry_bar"] >= first]
    parts = chronological_split(labels, splits)
    return labels.index[parts["train"]], labels.index[parts["validation"][0] :]


def _barrier_search_trial_table(spec: BarrierSearchSpec, trials: Sequence[dict]) -> pd.DataFrame:
    """Return a row per trial: barriers, span, value (bits a training row), rows, shares, and whether it kept the
    balance.
    """
    rows = []
    for trial in trials:
        labels = spec.label_spec_of_trial(trial["params"])
        barriers = {name: getattr(labels, name) for name in ("k_up", "k_down", "sigma_span")}
        scores = {name: trial.get(name) for name in ("value", "rows", "short", "neutral", "long")}
        rows.append({"trial": trial["number"], **barriers, **scores, "kept": max(trial["broken"].values()) <= 0})
    return pd.DataFrame(rows)


def _open_search_run(
    parent: Path, store: DatasetStore, spec: BarrierSearchSpec, fresh: bool, run_name: str
) -> RunFolder:
    """Return the newest attempt at this search, a new one with `fresh`, or the one with this name."""
    decided = _search_identity(store, spec)
    base = f"barriers-h{spec.labels.horizon}-s{spec.seed}-{fingerprint_json(decided)[:10]}"
    run = RunFolder(run_name, run_path(parent, run_name)) if run_name else newest_run_folder(parent, base, fresh)
    record = run.folder / "search.json"
    if run_name and not (f"{run_name}-".startswith(f"{base}-") and files.is_file(record)):
        existing = ", ".join(name for name in files.names(parent) if name.startswith("barriers-")) or "none"
        raise SettingsError(
            "Not an attempt at this search", where="run", got=repr(run_name),
            wanted=f"one of {base}; found: {existing}",
            next_step="leave the name out: the newest attempt is found, or a new one begins",
        )  # fmt: skip
    if not files.is_file(record):
        files.write_json(record, {"run_id": run.run_id, **decided})
    return run


def _search_identity(store: DatasetStore, spec: BarrierSearchSpec) -> dict:
    """Return the facts that identify a search: data, search settings, sources and the version of optuna."""
    decided = {"data": store.fingerprint, "search": asdict(spec), "sources": source_hash(("seeding.py",))}
    with suppress(importlib.metadata.PackageNotFoundError):
        decided["optuna"] = importlib.metadata.version("optuna")
    return decided


def _write_spec(folder: Path, found: SearchedLabelSpec, fresh: bool) -> tuple[Path, bool]:
    """Write the spec to the next free version, unless an equal version exists; return (path, True where it existed)."""
    horizon, text = found.labels.horizon, found.to_json().encode()
    with file_lock(folder / "write.lock"):
        number = 1
        while files.is_file(path := folder / f"h{horizon}-v{number}.json"):
            if not fresh and files.read(path) == text:
                return path, True
            number += 1
        files.write(path, text)
    return path, False
