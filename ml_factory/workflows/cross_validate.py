"""Cross-validation: plain folds, and nested folds that search barriers on each fold's own training rows.

The labels of a nested fold, also those of its test rows, use the barriers found on its training rows. No test row
influences them, but log losses of different folds are then not comparable. Compare and average the gain over the prior
of the same fold instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import SettingsError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.seeding import derive_seed
from ml_factory.settings import RunSettings
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels
from ml_factory.targets.splits import label_start_and_end, no_training_row_error, purge_training_rows
from ml_factory.workflows.barriers.barrier_trials import (
    Frames,
    format_trial_progress,
    load_barrier_trial_frames,
    run_barrier_trials,
)
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan, FoldSchemeSpec
from ml_factory.workflows.cross_validation.fold_scores import (
    UNCALIBRATED,
    fold_score_mean_gain,
    fold_score_table,
    labels_of_scored_folds,
    path_score_table,
    score_folds,
    verdict_of_fold_scores,
)
from ml_factory.workflows.cross_validation.folds import (
    FoldModel,
    check_any_fold_fitted,
    fit_and_forecast_folds,
    fit_and_forecast_folds_or_raise,
)
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.runs.restore_run import restorable_snapshot, tracked_run
from ml_factory.workflows.unit_checkpoints import (
    fold_forecasts_path,
    fold_trials_path,
    folds_phase_name,
    format_fold_progress,
    nested_fold_run,
)


@dataclass(frozen=True)
class _CrossValidationScores:
    """Scores of a cross-validation.

    scores : DataFrame, a row per fold, block and forecast.
    table : DataFrame, a row per fold.
    paths : DataFrame of the paths of combinatorial folds; None otherwise.
    gain, gain_se : mean gain over the blocks and its standard error, nats per row.
    gain_uncalibrated : the mean without calibration.
    unfitted : numbers of folds without forecasts.
    resumed, progress, nondeterminism : as of `FoldOutcome`.
    verdict : over the blocks, as of `verdict_of_fold_scores`.
    """

    scores: pd.DataFrame
    table: pd.DataFrame
    paths: pd.DataFrame | None
    gain: float
    gain_se: float
    gain_uncalibrated: float
    unfitted: list[int]
    resumed: int
    progress: str
    nondeterminism: tuple[str, ...]
    verdict: ModelVerdict


def cross_validate_plain(
    workspace: Workspace, data: PreparedDataset, plan: FoldPlan, run: RunFolder, model: FoldModel, *, mirror: str
) -> _CrossValidationScores:
    """Fit and evaluate every fold on the prepared labels."""
    with _open_unit(workspace, run, model.spec, mirror) as (manager, finish):
        results_path = fold_forecasts_path(run, model.name)
        outcome = fit_and_forecast_folds_or_raise(manager, data, plan, model, results_path)
        evaluated = score_folds(data, outcome, model.name)
        scores = fold_score_table(data, evaluated)
        gains = _gains(scores, model.name, finish)
    return _CrossValidationScores(
        scores, plan.table().assign(**_fold_calibration_columns(outcome.calibrations)),
        path_score_table(data, plan, evaluated), **gains,
        unfitted=outcome.unfitted_folds, resumed=outcome.resumed, progress=outcome.progress,
        nondeterminism=outcome.nondeterminism,
        verdict=verdict_of_fold_scores(data, scores, model.name, labels_of_scored_folds(data, evaluated)),
    )  # fmt: skip


@contextmanager
def _open_unit(
    workspace: Workspace, run: RunFolder, spec: RunSettings, mirror: str
) -> Iterator[tuple[CheckpointManager, Callable[[dict], None]]]:
    """Open the run's checkpoints and its log; yield the manager and the function that takes the log's summary."""
    with open_run_checkpoints(workspace.checkpoints, run) as manager:
        snapshot, owned = restorable_snapshot(manager, run, spec), folds_phase_name(spec.model)
        with tracked_run(manager, run, spec.to_dict(), snapshot, mirror, owned=owned) as finish:
            yield manager, finish


def _gains(scores: pd.DataFrame, name: str, finish: Callable[[dict], None]) -> dict[str, float]:
    """Return the gains of the model over the blocks, and close the run's log with them."""
    mean, error = fold_score_mean_gain(scores, name)
    finish({"gain_mean": mean, "gain_se": error})
    return {"gain": mean, "gain_se": error, "gain_uncalibrated": fold_score_mean_gain(scores, name + UNCALIBRATED)[0]}


def cross_validate_nested(
    workspace: Workspace,
    data: PreparedDataset,
    plan: FoldPlan,
    run: RunFolder,
    model: FoldModel,
    search: BarrierSearchSpec,
    *,
    mirror: str,
) -> _CrossValidationScores:
    """Fit and evaluate every fold on labels whose barriers were searched on its own training rows, purged again.

    Each label spec found goes to `barriers-{fold}.json` in the run's folder; the table names its barriers. Folds have
    one test block each. Raises SettingsError where a fold's search cannot keep the class balance.
    """
    frames = load_barrier_trial_frames(workspace, DatasetStore.current(workspace.processed(data.symbol)))
    search = replace(search, labels=replace(search.labels, horizon=data.horizon))
    with _open_unit(workspace, run, model.spec, mirror) as (_, finish):
        nested = [_nested_fold(workspace, data, plan, run, model, search, frames, k) for k in range(len(plan.folds))]
        unfitted = [k for k, fold in enumerate(nested) if fold.scores is None]
        check_any_fold_fitted(unfitted, len(nested), model.name)
        scores = pd.concat([fold.scores for fold in nested if fold.scores is not None], ignore_index=True)
        gains = _gains(scores, model.name, finish)
    labels = pd.concat([fold.labels for fold in nested if fold.labels is not None]).sort_index()
    resumed = sum(fold.resumed for fold in nested)
    progress = format_fold_progress(
        f"fold {resumed} of {len(nested)}" if resumed else "",
        [*(fold.partial_progress for fold in nested), ""][resumed],
    )
    nondeterminism = tuple(dict.fromkeys(reason for fold in nested for reason in fold.nondeterminism))
    return _CrossValidationScores(
        scores, pd.concat([fold.table for fold in nested], ignore_index=True), None, **gains,
        unfitted=unfitted, resumed=resumed, progress=progress, nondeterminism=nondeterminism,
        verdict=verdict_of_fold_scores(data, scores, model.name, labels),
    )  # fmt: skip


@dataclass(frozen=True)
class _NestedFold:
    """Result of one nested fold.

    table : its row of the fold table, with its barriers.
    scores, labels : metrics, and `labels_of_scored_folds`; None where nothing was fitted.
    resumed, partial_progress, nondeterminism : as of `FoldOutcome`, those of the search included.
    """

    table: pd.DataFrame
    scores: pd.DataFrame | None
    labels: pd.Series | None
    resumed: int
    partial_progress: str
    nondeterminism: list[str]


def _nested_fold(
    workspace: Workspace, data: PreparedDataset, plan: FoldPlan, run: RunFolder, model: FoldModel,
    search: BarrierSearchSpec,
    frames: Frames, number: int,
) -> _NestedFold:  # fmt: skip
    """Run one fold under its own run id: search, relabel, fit."""
    train, test = plan.folds[number]
    moments = plan.labels.index[train], plan.labels.index[test]
    with open_run_checkpoints(workspace.checkpoints, nested_fold_run(run, number)) as manager:
        results_path = fold_trials_path(run, number)
        searched = run_barrier_trials(manager.phase("barriers"), frames, *moments, search, results_path=results_path)
        files.write(_barriers_file(run, number), searched.spec.to_json().encode())
        relabelled = _relabel_nested_fold(data, frames, searched.spec.labels, plan.labels.index)
        part = _nested_fold_plan(relabelled, moments, number, plan)
        seeded = replace(model.spec, seed=derive_seed(model.spec.seed, "nested", number))
        fold_model = replace(model, spec=seeded, bins=None if model.bins is None else {0: model.bins[number]})
        outcome = fit_and_forecast_folds(
            manager, relabelled, part, fold_model, fold_forecasts_path(run, model.name, number)
        )
    barriers = {name: getattr(searched.spec.labels, name) for name in ("k_up", "k_down", "sigma_span")}
    table = part.table().assign(fold=number, **_fold_calibration_columns(outcome.calibrations), **barriers)
    scores = labels = None
    if not outcome.unfitted_folds:
        evaluated = score_folds(relabelled, outcome, model.name)
        scores = fold_score_table(relabelled, evaluated).assign(fold=number)
        labels = labels_of_scored_folds(relabelled, evaluated)
    partial_progress = outcome.partial_progress or (
        format_trial_progress(searched.resumed, search) if searched.resumed else ""
    )
    nondeterminism = [*searched.nondeterminism, *outcome.nondeterminism]
    return _NestedFold(table, scores, labels, outcome.resumed, partial_progress, nondeterminism)


def _relabel_nested_fold(
    data: PreparedDataset, frames: Frames, labels: LabelSpec, moments: pd.DatetimeIndex
) -> PreparedDataset:
    """Return the data set with other labels, of the rows at `moments` whose labels end before the first test row."""
    base, minute_bars, market = frames
    made = triple_barrier_labels(base, minute_bars, labels, market)
    first_test = data.labels.index[data.splits["test"][0]]
    made = made[made.index.isin(moments) & (made["label_end"] < first_test)]
    return replace(data, labels=made, splits={})


def _nested_fold_plan(
    relabelled: PreparedDataset, moments: tuple[pd.DatetimeIndex, pd.DatetimeIndex], number: int, plan: FoldPlan
) -> FoldPlan:
    """Make a plan of one fold, of these training and test moments over `relabelled`, purged by the labels' ends."""
    train, test = (np.flatnonzero(relabelled.labels.index.isin(part)) for part in moments)
    usable = pd.Series(plan.usable, plan.labels.index).reindex(relabelled.labels.index).to_numpy()
    train = purge_training_rows(*label_start_and_end(relabelled.labels), train, test, plan.embargo)
    if not len(train):
        raise no_training_row_error(
            number, len(relabelled.labels), f"barriers searched for, embargo of {plan.embargo} rows"
        )
    block = np.full(len(relabelled.labels), -1)
    block[test] = number
    return FoldPlan(
        np.arange(len(relabelled.labels)),
        relabelled.labels,
        [(train, test)],
        usable,
        block,
        None,
        plan.quick_limits,
        plan.embargo,
    )


def check_nested_search_scheme(scheme: FoldSchemeSpec, search: BarrierSearchSpec | None) -> None:
    """Raise SettingsError for a search in folds whose paths combine several folds."""
    if search and scheme.name == "combinatorial":
        raise SettingsError(
            "A path cannot combine folds with different labels", where="search",
            got=f"scheme={scheme.name!r}", wanted="a scheme that tests each row once",
            next_step="use purged_kfold, or leave out search",
        )  # fmt: skip


def check_cross_validation_labels(data: PreparedDataset) -> None:
    """Raise SettingsError for labels whose barriers were searched on rows that some fold tests.

    A search sees the training rows of the chronological split, and every fold tests some of these.
    """
    for found in data.settings["data"].get("searched", ()):
        if found["labels"]["horizon"] == data.horizon:
            seen = found["seen_rows"]
            raise SettingsError(
                "The barriers of these labels were searched on rows that the folds test", where="search",
                got=f"barriers that saw {seen['count']:,} rows, {seen['first']} to {seen['last']}",
                wanted="a search in every fold, on its own training rows",
                next_step="give search=SearchSpec() (--search), or run prepare without searched=",
            )  # fmt: skip


def nested_search_settings(search: BarrierSearchSpec | None) -> dict:
    """Return the settings of the search for the run's record; {} without a search."""
    return {} if search is None else {"search": asdict(search)}


def _barriers_file(run: RunFolder, number: int) -> Path:
    return run.folder / f"barriers-{number}.json"


def _fold_calibration_columns(calibrations: Sequence[Calibration]) -> dict[str, list[float]]:
    """Return columns of the fold table: temperature, and bias of the neutral class."""
    return {
        "temperature": [one.temperature for one in calibrations],
        "bias_neutral": [one.bias[1] for one in calibrations],
    }
