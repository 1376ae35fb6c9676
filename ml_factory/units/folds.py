"""Purged folds over some rows of a data set, each fold a unit of work that is found again after a kill."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.datasets.scaling import RobustScaler
from ml_factory.ensemble.out_of_fold import out_of_fold
from ml_factory.experiment import RunSpec
from ml_factory.models.registry import build_model
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.seeding import derive_seed
from ml_factory.targets.splits import purged_kfold
from ml_factory.units.dataset import Dataset, limit_rows, model_inputs, with_baselines


@dataclass(frozen=True)
class FoldPlan:
    """Which rows are folded, and how.

    rows : positions into the labels' rows.  folds : (train, test) positions into `rows`, purged and embargoed.
    limited : what QUICK limits.
    """

    rows: np.ndarray
    folds: list[tuple[np.ndarray, np.ndarray]]
    limited: dict

    def table(self) -> pd.DataFrame:
        """Per fold: rows trained on, judged, and left out by purge and embargo (or by QUICK)."""
        return pd.DataFrame(
            [
                {
                    "fold": number,
                    "train": len(train),
                    "test": len(test),
                    "left_out": len(self.rows) - len(train) - len(test),
                }
                for number, (train, test) in enumerate(self.folds)
            ]
        )


def fold_plan(data: Dataset, rows: np.ndarray, folds: int, lookback: int, quick: bool) -> FoldPlan:
    """`folds` contiguous test blocks of `rows`; the embargo is at least the model's input window."""
    embargo = max(int(data.settings["data"]["splits"]["embargo_bars"]), lookback)
    plan, limited = [], {}
    for train, test in purged_kfold(data.labels.iloc[rows], folds, embargo):
        kept, said = limit_rows(train, quick)
        limited |= {"rows of a fold": said["training rows"]} if said else {}
        plan.append((kept, test))
    return FoldPlan(rows, plan, limited)


@dataclass(frozen=True)
class FoldOutcome:
    """p_N3 : probabilities of the plan's rows, NaN where none.  found : folds that were done before.

    inexact : why a fold that was continued elsewhere is not the same to the bit; empty when all are.
    """

    p_N3: np.ndarray
    found: int
    inexact: tuple[str, ...]


def out_of_fold_predictions(
    manager: CheckpointManager, data: Dataset, plan: FoldPlan, spec: RunSpec, model: str, settings: dict
) -> FoldOutcome:
    """Train `model` once per fold and predict the fold's test rows. Everything fitted is the fold's."""
    inexact: dict[str, None] = {}
    lookback = build_model(model, **settings).lookback
    phase = manager.phase(f"folds_{model}")
    before = phase.load()
    usable = data.usable(lookback)[plan.rows] if lookback > 1 else None

    def inputs(fit: np.ndarray):
        scaler = RobustScaler.fit(data.x_NF[data.row[plan.rows[fit]]])
        take = model_inputs(data, scaler, lookback)
        return lambda positions: take(plan.rows[positions])

    p_N3 = out_of_fold(
        lambda fold: build_model(model, seed=derive_seed(spec.seed, model, "fold", fold), **settings),
        inputs,
        data.labels.iloc[plan.rows],
        plan.folds,
        usable=usable,
        fit_options=lambda fold: {"checkpoints": manager.phase(f"folds_{model}_{fold}")},
        checkpoints=phase,
        on_fold=lambda fold, result: inexact.update(dict.fromkeys(result.inexact)),
    )
    return FoldOutcome(p_N3, int(before["state"]["finished"]) if before else 0, tuple(inexact))


def fold_metrics(data: Dataset, plan: FoldPlan, p_N3: np.ndarray, name: str) -> pd.DataFrame:
    """A row per fold and forecast: the model beside the baselines of that fold's own training rows."""
    tables = []
    readable = np.isfinite(p_N3).all(axis=1)
    for number, (train, test) in enumerate(plan.folds):
        train, test = train[readable[train]], test[readable[test]]
        table = with_baselines(data, plan.rows[train], plan.rows[test], {name: p_N3[test]})
        tables.append(table.reset_index().assign(fold=number))
    return pd.concat(tables, ignore_index=True)
