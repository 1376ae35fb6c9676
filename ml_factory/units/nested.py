"""Folds told: plain ones, and nested ones that repeat a search for barriers on each fold's own training rows.

A nested fold asks its own question: its labels, also those that judge, are made with the barriers that its training
rows led to. No test row had a say in them, but a log loss is of another question in every fold; what can be set side
by side, and averaged, is the gain over the prior of the same fold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.datasets.store import Store
from ml_factory.errors import SettingsError
from ml_factory.experiment import Run, RunSpec, open_checkpoints
from ml_factory.models.tabular_data import FoldBins
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.runs.storage import write_bytes_atomic
from ml_factory.runs.workspace import Workspace
from ml_factory.seeding import derive_seed
from ml_factory.targets.labels import LabelSpec, triple_barrier
from ml_factory.targets.search_spec import SearchSpec
from ml_factory.targets.splits import label_times, no_training_row, purge
from ml_factory.targets.weights import WeightSpec
from ml_factory.units.dataset import Dataset
from ml_factory.units.folds import (
    FoldPlan,
    check_taught,
    fold_metrics,
    forecast_folds,
    gain_over_blocks,
    judged_folds,
    out_of_fold_predictions,
    path_metrics,
)
from ml_factory.units.keeping import folds_phase, forecasts_file, how_far, nested_run, trials_file
from ml_factory.units.restoring import keepsake_of, recorded
from ml_factory.units.trials import Frames, frames_for, kept_search, trial_of


@dataclass(frozen=True)
class FoldsTold:
    """scores : a row per fold, block and forecast.  table : a row a fold.  paths : of combinatorial folds.

    untaught : folds that forecast nothing.  found, reached, inexact : see `FoldOutcome`.
    """

    scores: pd.DataFrame
    table: pd.DataFrame
    paths: pd.DataFrame | None
    untaught: list[int]
    found: int
    reached: str
    inexact: tuple[str, ...]


def plain_folds(
    workspace: Workspace, data: Dataset, plan: FoldPlan, run: Run, spec: RunSpec, settings: dict,
    weights: WeightSpec | None, bins: FoldBins | None = None, *, mirror: str,
) -> FoldsTold:  # fmt: skip
    """Every fold on the labels as they are prepared."""
    with open_checkpoints(workspace.checkpoints, run) as manager, _recorded(manager, run, spec, mirror) as told:
        keep = forecasts_file(run, spec.model)
        outcome = out_of_fold_predictions(manager, data, plan, spec, spec.model, settings, weights, keep, bins)
        judged = judged_folds(data, outcome, spec.model)
        scores = told(fold_metrics(data, judged))
    return FoldsTold(
        scores, plan.table().assign(temperature=outcome.temperatures), path_metrics(data, plan, judged),
        outcome.untaught, outcome.found, outcome.reached, outcome.inexact,
    )  # fmt: skip


@contextmanager
def _recorded(
    manager: CheckpointManager, run: Run, spec: RunSpec, mirror: str
) -> Iterator[Callable[[pd.DataFrame], pd.DataFrame]]:
    """The run's record; inside, what the scores that it ends with go through."""
    keepsake, owned = keepsake_of(manager, run, spec), folds_phase(spec.model)
    with recorded(manager, run, spec.to_dict(), keepsake, mirror, owned=owned) as finish:

        def told(scores: pd.DataFrame) -> pd.DataFrame:
            mean, error = gain_over_blocks(scores, spec.model)
            finish({"gain_mean": mean, "gain_se": error})
            return scores

        yield told


def searched_folds(
    workspace: Workspace, data: Dataset, plan: FoldPlan, run: Run, spec: RunSpec, settings: dict,
    weights: WeightSpec | None, search: SearchSpec, embargo: int, bins: FoldBins | None = None, *, mirror: str,
) -> FoldsTold:  # fmt: skip
    """Every fold on labels made with what a search on its own training rows found; purged again.

    Each found label spec goes to `barriers-{fold}.json` in the run's folder; the table names its barriers. Folds of
    one test block each. Raises SettingsError where a fold's search cannot keep the balance.
    """
    frames = frames_for(workspace, Store.current(workspace.processed(data.symbol)))
    search = replace(search, labels=replace(search.labels, horizon=data.horizon))
    with open_checkpoints(workspace.checkpoints, run) as manager, _recorded(manager, run, spec, mirror) as told:
        found = _searched_folds(workspace, data, plan, run, spec, settings, weights, search, embargo, bins, frames)
        told(found.scores)
    return found


def _searched_folds(
    workspace: Workspace, data: Dataset, plan: FoldPlan, run: Run, spec: RunSpec, settings: dict,
    weights: WeightSpec | None, search: SearchSpec, embargo: int, bins: FoldBins | None, frames: Frames,
) -> FoldsTold:  # fmt: skip
    """Fold by fold, each under a run id of its own."""
    scores, tables, untaught, inside, found, inexact = [], [], [], [], 0, {}
    for number, (train, test) in enumerate(plan.folds):
        moments = plan.labels.index[train], plan.labels.index[test]
        with open_checkpoints(workspace.checkpoints, nested_run(run, number)) as manager:
            keep = trials_file(run, number)
            spec_found, _, trials, elsewhere = kept_search(
                manager.phase("barriers"), frames, *moments, search, keep=keep
            )
            write_bytes_atomic(_place(run, number), spec_found.to_json().encode())
            own = relabelled(data, frames, spec_found.labels, plan.labels.index)
            part = fold_of(own, moments, number, embargo, plan)
            seeded = replace(spec, seed=derive_seed(spec.seed, "nested", number))
            keep = forecasts_file(run, spec.model, number)
            mine = None if bins is None else {0: bins[number]}
            outcome = forecast_folds(manager, own, part, seeded, spec.model, settings, weights, keep, mine)
        found += outcome.found
        inside.append(outcome.inside or (trial_of(trials, search) if trials else ""))
        inexact |= dict.fromkeys([*elsewhere, *outcome.inexact])
        barriers = {name: getattr(spec_found.labels, name) for name in ("k_up", "k_down", "sigma_span")}
        tables.append(part.table().assign(fold=number, temperature=outcome.temperatures, **barriers))
        if outcome.untaught:
            untaught.append(number)
        else:
            scores.append(fold_metrics(own, judged_folds(own, outcome, spec.model)).assign(fold=number))
    check_taught(untaught, len(plan.folds), spec.model)
    told = pd.concat(scores, ignore_index=True)
    reached = how_far(f"fold {found} of {len(plan.folds)}" if found else "", [*inside, ""][found])
    return FoldsTold(told, pd.concat(tables, ignore_index=True), None, untaught, found, reached, tuple(inexact))


def relabelled(data: Dataset, frames: Frames, labels: LabelSpec, moments: pd.DatetimeIndex) -> Dataset:
    """The data set with other labels, of the rows at `moments` only and proven before the first test row."""
    base, fine, market = frames
    made = triple_barrier(base, fine, labels, market)
    first_test = data.labels.index[data.splits["test"][0]]
    made = made[made.index.isin(moments) & (made["label_end"] < first_test)]
    return replace(data, labels=made, splits={})


def fold_of(
    own: Dataset, moments: tuple[pd.DatetimeIndex, pd.DatetimeIndex], number: int, embargo: int, plan: FoldPlan
) -> FoldPlan:
    """The fold of these training and test moments as a plan of one fold over `own`'s labels, purged by their ends."""
    train, test = (np.flatnonzero(own.labels.index.isin(part)) for part in moments)
    usable = pd.Series(plan.usable, plan.labels.index).reindex(own.labels.index).to_numpy()
    train = purge(*label_times(own.labels), train, test, embargo)
    if not len(train):
        raise no_training_row(number, len(own.labels), f"barriers searched for, embargo of {embargo} rows")
    block = np.full(len(own.labels), -1)
    block[test] = number
    return FoldPlan(np.arange(len(own.labels)), own.labels, [(train, test)], usable, block, None, plan.limited)


def check_unsearched(data: Dataset) -> None:
    """Refuse folds over labels whose barriers were searched for on rows that some fold judges.

    A search sees the training rows of the chronological split, and every fold judges some of these.
    Raises SettingsError.
    """
    for found in data.settings["data"].get("searched", ()):
        if found["labels"]["horizon"] == data.horizon:
            seen = found["seen_rows"]
            raise SettingsError(
                "The barriers of these labels were searched for on rows that the folds judge", where="search",
                got=f"barriers that saw {seen['count']:,} rows, {seen['first']} to {seen['last']}",
                wanted="a search in every fold, on its own training rows",
                next_step="give search=SearchSpec() (--search), or run prepare without searched=",
            )  # fmt: skip


def search_setting(search: SearchSpec | None) -> dict:
    """What a run's settings say of it: nothing without one."""
    return {} if search is None else {"search": asdict(search)}


def _place(run: Run, number: int) -> Path:
    return run.folder / f"barriers-{number}.json"
