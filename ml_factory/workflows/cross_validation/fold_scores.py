"""Metrics of folds, block by block, compared with baselines of each fold's own training rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.ensemble.out_of_fold import OutOfFoldFit, inner_validation_split
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.calibration import condition_on_classes
from ml_factory.evaluation.intervals import describe_lacking_weeks, fold_gain_interval
from ml_factory.evaluation.verdict import ModelVerdict, describe_missing_classes, model_verdict, verdict_gains_of_folds
from ml_factory.targets.labels import expected_label_classes
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan
from ml_factory.workflows.cross_validation.folds import FoldOutcome
from ml_factory.workflows.dataset_evaluation import (
    dataset_best_baseline,
    prepared_dataset_baselines,
    prepared_dataset_metrics,
)
from ml_factory.workflows.prepared_dataset import PreparedDataset

# Suffix of a model's name: its forecasts before the calibration of the fold.
UNCALIBRATED = "_uncalibrated"


@dataclass(frozen=True)
class _ScoredFold:
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

    def part(self, block: int) -> "_ScoredFold":
        """Return the rows of one block."""
        at = self.block == block
        return _ScoredFold(
            self.rows[at], self.block[at], {name: p[at] for name, p in self.forecasts.items()}, self.best
        )


def score_folds(data: PreparedDataset, outcome: FoldOutcome, name: str) -> list[_ScoredFold]:
    """Return per fold the model's forecasts, calibrated and uncalibrated, and the baselines of its own training
    rows.
    """
    plan, found = outcome.plan, []
    for (train, test), p, calibration in zip(plan.folds, outcome.forecasts, outcome.calibrations, strict=True):
        finite = np.isfinite(p).all(axis=1)
        rows, train_rows = plan.rows[test[finite]], plan.rows[train[plan.usable[train]]]
        counted, best = (
            (prepared_dataset_baselines(data, train_rows, rows), _best_of(data, plan, train))
            if len(rows)
            else ({}, "prior")
        )
        calibrated = condition_on_classes(calibration.apply(p[finite]), data.classes.values())
        forecasts = {name: calibrated, name + UNCALIBRATED: p[finite], **counted}
        found.append(_ScoredFold(rows, plan.block[test[finite]], forecasts, best))
    return found


def _best_of(data: PreparedDataset, plan: FoldPlan, train: np.ndarray) -> str:
    """Return the best baseline on the early-stopping rows of the fold, counted on the rows that were fitted."""
    fit, held_out = inner_validation_split(plan.labels, train[plan.usable[train]], OutOfFoldFit.validation_share)
    return dataset_best_baseline(data, plan.rows[fit], plan.rows[held_out])


def fold_score_table(data: PreparedDataset, evaluated: Sequence[_ScoredFold]) -> pd.DataFrame:
    """Compute metrics per fold, block and forecast; a fold without forecasts has no row."""
    tables = []
    for number, one in enumerate(evaluated):
        for block in np.unique(one.block):
            part = one.part(block)
            table = prepared_dataset_metrics(data, part.rows, part.forecasts, part.best)
            tables.append(table.reset_index().assign(fold=number, block=block))
    return pd.concat(tables, ignore_index=True)


def path_score_table(data: PreparedDataset, plan: FoldPlan, evaluated: Sequence[_ScoredFold]) -> pd.DataFrame | None:
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


def labels_of_scored_folds(data: PreparedDataset, evaluated: Sequence[_ScoredFold]) -> pd.Series:
    """Return the labels of the unambiguous test rows of all folds, each once, in time order: index known_at."""
    rows = np.unique(np.concatenate([one.rows for one in evaluated]))
    rows = rows[data.unambiguous_mask[rows]]
    return pd.Series(data.y[rows], index=data.labels.index[rows])


def _describe_missing_in_folds(labels: pd.Series, kind: str) -> str:
    """Describe the classes or weeks that the test rows of all folds lack for a verdict; "" for nothing.

    A single fold may lack a class.
    labels : as of `labels_of_scored_folds`.
    kind : kind of the labels.
    """
    missing = describe_missing_classes({"test": labels.to_numpy()}, expected_label_classes(kind))
    return "; ".join(filter(None, [missing, describe_lacking_weeks(labels.index)]))


def verdict_of_fold_scores(data: PreparedDataset, table: pd.DataFrame, name: str, labels: pd.Series) -> ModelVerdict:
    """Compute the verdict on `name` over the blocks: t intervals of the blocks' mean gains over each baseline.

    table : as of `fold_score_table`. The best baseline of each fold was chosen on rows it held out.
    labels : as of `labels_of_scored_folds`, of all folds.
    """
    own_rows = table[table["name"] == name]
    over_best = fold_gain_interval(own_rows.groupby("block")["gain_best"].mean().to_numpy())
    blocks = own_rows.drop_duplicates("block")
    return model_verdict(
        name, verdict_gains_of_folds(table, name), over_best,
        best_name=_most_frequent(own_rows["best_baseline"].tolist()),
        rows=int(blocks["rows"].sum()), effective_rows=float(blocks["effective_rows"].sum()), kind=data.kind,
        lacking=_describe_missing_in_folds(labels, data.kind),
    )  # fmt: skip


def _most_frequent(names: Sequence[str]) -> str:
    """Return the name that most folds chose; of equals the first of BASELINES."""
    return max(BASELINES, key=names.count)
