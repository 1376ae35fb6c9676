"""`cross_validate`: a model on purged folds, its metrics block by block with the baselines of each fold's own rows."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.calibration import condition_on_classes
from ml_factory.evaluation.findings import concentration_finding, finding_lines, sort_findings
from ml_factory.evaluation.intervals import describe_lacking_weeks, fold_gain_interval
from ml_factory.evaluation.verdict import ModelVerdict, describe_missing_classes, model_verdict, verdict_gains_of_folds
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import build_model, check_registered_model_settings
from ml_factory.result import Result, limits_lines, origin_table, verdict_lines
from ml_factory.runs import FitCheckpoints, RunOptions, open_run
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.targets.labels import expected_label_classes
from ml_factory.tracking.run_log import is_log_complete
from ml_factory.workflows.evaluation import best_baseline, prepared_dataset_baselines, prepared_dataset_metrics
from ml_factory.workflows.folds import (
    FoldForecasts,
    FoldModel,
    FoldPlan,
    FoldSchemeSpec,
    fit_fold,
    fit_folds,
    plan_folds,
)
from ml_factory.workflows.predictions import write_predictions
from ml_factory.workflows.prepared_dataset import PreparedDataset, quick_row_limit, resolve_dataset_settings
from ml_factory.workflows.train import load_data_of_run, settings_limited_by_quick
from ml_factory.workflows.train_ranks import check_single_rank

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def cross_validate(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *,
    scheme: str | FoldSchemeSpec = "purged_kfold", folds: int = 5, model_settings: Mapping | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """Cross-validate a model with purged and embargoed folds over all rows before the test rows.

    scheme : "purged_kfold", "walk_forward_expanding", "walk_forward_rolling" or "combinatorial"; or a `FoldSchemeSpec`,
        which also holds the folds, the test blocks of combinatorial folds and the window of rolling ones.
    folds : number of test blocks, where `scheme` is a name.
    model_settings, options : as of `train`, without `source`.

    Each fold is calibrated on its early-stopping rows, as `train` does on validation rows; uncalibrated forecasts have
    the suffix `_uncalibrated`. A fold whose training rows hold one class has no forecasts and is listed; the others
    continue. Data prepared with searched barriers (`prepare(searched=…)`) are refused: that search saw rows that folds
    test.

    The result has

    folds, paths : a row per fold, block and forecast; a row per path and forecast of combinatorial folds.
    fold_table : a row per fold: rows, temperature and bias of its calibration.
    gain_mean, gain_se : over the blocks; gain_uncalibrated the mean without calibration.
    untaught : folds whose training rows hold one class.
    verdict : over the blocks, against every baseline.
    findings : on the gains of the blocks over the class prior, the mean of a block that several folds test.
    reused, resumed_from, reached, exact, inexact_because, limited, found, origin : as of `train`; `resumed_from` is the
        number of folds that were there.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    check_single_rank("cross_validate")
    own = check_registered_model_settings(model, model_settings)
    cut = scheme if isinstance(scheme, FoldSchemeSpec) else FoldSchemeSpec(scheme, folds)
    chosen = RunOptions.of(options, unused=("source",))
    data = load_data_of_run(workspace, symbol, horizon, chosen)
    check_barriers_unsearched(data)
    spec = make_run_settings(
        symbol, horizon, model, task="folds", seed=chosen.seed, quick=chosen.quick, data=data.fingerprint,
        settings=cut.to_dict() | own,
    )  # fmt: skip
    with open_run(workspace, spec, chosen) as run:
        ended = run.ended
        found = run.status(finished=ended)
        chosen.on_status(found)
        fitted_with = {name: value for name, value in spec.settings if name not in cut.to_dict()}
        fold_model = FoldModel(chosen.seed, model, fitted_with)
        plan = plan_model_folds(data, fold_model, cut, chosen.quick)
        run.begin()
        # Locked before the log is opened; a complete log is not written again.
        complete = is_log_complete(run.folder / "log")
        with run.phase.acquired(), nullcontext() if complete else run.log(chosen.mirror) as tracker:
            outcome = fit_folds(run, data, plan, fold_model)
            scored = score_folds(data, outcome, model)
            table = fold_score_table(data, scored)
            gain, gain_se = fold_score_mean_gain(table, model)
            if tracker is not None:
                tracker.finish({"gain_mean": gain, "gain_se": gain_se})
        paths, paths_path, path_lines = path_score_table(data, plan, scored), None, []
        write_predictions(run.folder / "folds.parquet", table)
        if paths is not None:
            paths_path = run.folder / "paths.parquet"
            write_predictions(paths_path, paths)
            of = paths.loc[paths["name"] == model, "log_loss_gain"]
            path_lines = [f"  {len(of)} paths: from {of.min():+.4f} to {of.max():+.4f}, {(of > 0).mean():.0%} above 0"]
        run.end()
    calibrations = {
        "temperature": [one.temperature for one in outcome.calibrations],
        "bias_neutral": [one.bias[1] for one in outcome.calibrations],
    }
    uncalibrated = fold_score_mean_gain(table, model + UNCALIBRATED)[0]
    verdict = verdict_of_fold_scores(data, table, model, labels_of_scored_folds(data, scored))
    blocks = table[table["name"] == model].groupby("block")["log_loss_gain"].mean()
    findings = sort_findings([concentration_finding("fold", blocks)])
    limited = plan.quick_limits | settings_limited_by_quick(model, fitted_with) if chosen.quick else {}
    reused = ended and outcome.resumed == len(plan.folds)  # a fold whose file was damaged is fitted again
    state = {
        "run_id": run.run_id, "found": found, "reused": reused,
        "resumed_from": None if reused else outcome.resumed or None,
        "reached": outcome.reached, "exact": not outcome.inexact, "inexact_because": list(outcome.inexact),
    }  # fmt: skip
    begun = f", resumed at {outcome.reached}" if outcome.reached else ""
    resumed = f", {outcome.resumed} folds found done" if outcome.resumed else begun
    seconds = time.perf_counter() - started
    untaught = ", ".join(map(str, outcome.unfitted_folds))
    lines = [
        f"{model} on {symbol}, horizon {horizon}, {len(plan.folds)} folds ({cut.name}){resumed}: log loss below the "
        f"prior's by {gain:+.4f} (standard error over blocks {gain_se:.4f}; not calibrated {uncalibrated:+.4f}), "
        f"{seconds:.1f} s",
        *path_lines,
        *([f"  forecast nothing, their training rows are of one class: fold {untaught}"] if untaught else []),
        *limits_lines(limited, outcome.inexact), f"  folds {run.folder / 'folds.parquet'}", *verdict_lines(verdict),
        *finding_lines(findings),
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: plots.plot_fold_scores(table, paths),
        also={"findings": findings, "origin": origin_table(state)}, symbol=symbol, horizon=horizon, model=model,
        **state, limited=limited, scheme=cut.name, folds=table, paths=paths, gain_mean=gain, gain_se=gain_se,
        fold_table=plan.table().assign(**calibrations), gain_uncalibrated=uncalibrated,
        untaught=outcome.unfitted_folds, path=run.folder / "folds.parquet", paths_path=paths_path, verdict=verdict,
        seconds=seconds,
    )  # fmt: skip


def plan_model_folds(data: PreparedDataset, model: FoldModel, scheme: FoldSchemeSpec, quick: bool) -> FoldPlan:
    """Cut the rows before the test rows into folds for this model."""
    lookback = build_model(model.name, **resolve_dataset_settings(data, model.settings)).lookback
    return plan_folds(data, data.development_rows(), scheme, lookback, quick_row_limit(model.name, quick))


def check_barriers_unsearched(data: PreparedDataset) -> None:
    """Raise SettingsError for labels whose barriers were searched on rows that some fold tests.

    A search sees the training rows of the chronological split, and every fold tests some of these.
    """
    for found in data.settings["data"].get("searched", ()):
        if found["labels"]["horizon"] == data.horizon:
            seen = found["seen_rows"]
            raise SettingsError(
                "The barriers of these labels were searched on rows that the folds test", where="search",
                got=f"barriers that saw {seen['count']:,} rows, {seen['first']} to {seen['last']}",
                wanted="barriers that no search chose",
                next_step="run prepare without searched= (--searched, --search)",
            )  # fmt: skip


# ---- scores --------------------------------------------------------------------------------------------------------

# Suffix of a model's name: its forecasts before the calibration of the fold.
UNCALIBRATED = "_uncalibrated"


@dataclass(frozen=True)
class ScoredFold:
    """Test rows and forecasts of one fold.

    rows : int64 positions into the labels.
    block : int64, test block of each row.
    forecasts : name -> float64 (rows, 3).
    best : name of the best baseline on the held-out training rows.
    """

    rows: np.ndarray
    block: np.ndarray
    forecasts: dict[str, np.ndarray]
    best: str

    def part(self, block: int) -> "ScoredFold":
        """Return the rows of one block."""
        at = self.block == block
        return ScoredFold(self.rows[at], self.block[at], {name: p[at] for name, p in self.forecasts.items()}, self.best)


def score_folds(data: PreparedDataset, outcome: FoldForecasts, name: str) -> list[ScoredFold]:
    """Return per fold the model's forecasts, calibrated and uncalibrated, and the baselines of its own training
    rows.
    """
    plan, found = outcome.plan, []
    for number, ((train, test), p, calibration) in enumerate(
        zip(plan.folds, outcome.forecasts, outcome.calibrations, strict=True)
    ):
        finite = np.isfinite(p).all(axis=1)
        rows = plan.rows[test[finite]]
        counted, best = {}, "prior"
        if len(rows):
            counted = prepared_dataset_baselines(data, plan.rows[train[plan.usable[train]]], rows)
            # On the early-stopping rows of the fold, counted on the rows that were fitted.
            fit, held_out = (plan.rows[part] for part in plan.fit_and_held_out(number))
            best = best_baseline(data, held_out, prepared_dataset_baselines(data, fit, held_out))
        calibrated = condition_on_classes(calibration.apply(p[finite]), data.classes.values())
        forecasts = {name: calibrated, name + UNCALIBRATED: p[finite], **counted}
        found.append(ScoredFold(rows, plan.block[test[finite]], forecasts, best))
    return found


def fold_gain(
    data: PreparedDataset, settings: RunSettings, scheme: FoldSchemeSpec, fold: int,
    checkpoints: FitCheckpoints | None = None,
) -> tuple[float, list[str]]:  # fmt: skip
    """Fit a model on one fold; return its gain over the best baseline there, and why it may be inexact.

    It depends on the arguments alone, whatever the process. Raises FactoryError where the fold's training rows hold
    one class.
    """
    model = FoldModel(settings.seed, settings.model, dict(settings.settings))
    plan = plan_model_folds(data, model, scheme, settings.quick)
    p_N3, calibration, inexact = fit_fold(data, plan, model, fold, checkpoints, None)
    if not np.isfinite(p_N3).any():
        raise FactoryError("The training rows of a fold are of one class", where=f"fold {fold + 1} of {scheme.folds}",
                           next_step="prepare more bars, or set closer barriers: a smaller k_up, k_down")  # fmt: skip
    forecasts = FoldForecasts(replace(plan, folds=plan.folds[fold : fold + 1]), [p_N3], [calibration])
    table = fold_score_table(data, score_folds(data, forecasts, model.name)).set_index("name")
    return float(table.loc[model.name, "gain_best"]), [*inexact]


def fold_score_table(data: PreparedDataset, evaluated: Sequence[ScoredFold]) -> pd.DataFrame:
    """Compute metrics per fold, block and forecast; a fold without forecasts has no row."""
    tables = []
    for number, one in enumerate(evaluated):
        for block in np.unique(one.block):
            part = one.part(block)
            table = prepared_dataset_metrics(data, part.rows, part.forecasts, part.best)
            tables.append(table.reset_index().assign(fold=number, block=block))
    return pd.concat(tables, ignore_index=True)


def path_score_table(data: PreparedDataset, plan: FoldPlan, evaluated: Sequence[ScoredFold]) -> pd.DataFrame | None:
    """Compute metrics per path and forecast: all rows as one backtest (AFML 12.4); None without paths."""
    if plan.paths is None:
        return None
    tables = []
    for number, taken in enumerate(plan.paths):
        parts = [part for g, fold in enumerate(taken) if len((part := evaluated[fold].part(g)).rows)]
        rows = np.concatenate([part.rows for part in parts])
        forecasts = {name: np.concatenate([part.forecasts[name] for part in parts]) for name in parts[0].forecasts}
        tables.append(
            prepared_dataset_metrics(data, rows, forecasts, _most_frequent([part.best for part in parts])).reset_index()
        )
        tables[-1]["path"] = number
    return pd.concat(tables, ignore_index=True)


def fold_score_mean_gain(table: pd.DataFrame, name: str) -> tuple[float, float]:
    """Return the mean gain of `name` in log loss over the blocks, and its standard error.

    A block that several folds test counts once, with the mean of their gains: those folds share training rows.
    """
    gains = table[table["name"] == name].groupby("block")["log_loss_gain"].mean()
    return float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))


def labels_of_scored_folds(data: PreparedDataset, evaluated: Sequence[ScoredFold]) -> pd.Series:
    """Return the labels of the unambiguous test rows of all folds, each once, in time order: index known_at."""
    rows = np.unique(np.concatenate([one.rows for one in evaluated]))
    rows = rows[data.unambiguous_mask[rows]]
    return pd.Series(data.y[rows], index=data.labels.index[rows])


def verdict_of_fold_scores(data: PreparedDataset, table: pd.DataFrame, name: str, labels: pd.Series) -> ModelVerdict:
    """Compute the verdict on `name` over the blocks: t intervals of the blocks' mean gains over each baseline.

    table : as of `fold_score_table`. The best baseline of each fold was chosen on rows it held out.
    labels : as of `labels_of_scored_folds`, of all folds.
    """
    missing = describe_missing_classes({"test": labels.to_numpy()}, expected_label_classes(data.kind))
    own_rows = table[table["name"] == name]
    over_best = fold_gain_interval(own_rows.groupby("block")["gain_best"].mean().to_numpy())
    blocks = own_rows.drop_duplicates("block")
    return model_verdict(
        name, verdict_gains_of_folds(table, name), over_best,
        best_name=_most_frequent(own_rows["best_baseline"].tolist()),
        rows=int(blocks["rows"].sum()), effective_rows=float(blocks["effective_rows"].sum()), kind=data.kind,
        lacking="; ".join(filter(None, [missing, describe_lacking_weeks(labels.index)])),
    )  # fmt: skip


def _most_frequent(names: Sequence[str]) -> str:
    """Return the name that most folds chose; of equals the first of BASELINES."""
    return max(BASELINES, key=names.count)
