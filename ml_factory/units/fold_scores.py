"""What folds forecast, judged block by block beside the baselines of each fold's own training rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.calibration import Temperature
from ml_factory.evaluation.metrics import among
from ml_factory.units.dataset import Dataset, baselines, verdicts
from ml_factory.units.folds import FoldOutcome
from ml_factory.units.schemes import FoldPlan

# Behind a model's name: its forecasts before the temperature of the fold.
UNCALIBRATED = "_uncalibrated"


@dataclass(frozen=True)
class Judged:
    """Rows one fold has judged: positions into the labels, their blocks, and forecasts, name -> (rows, 3)."""

    rows: np.ndarray
    block: np.ndarray
    forecasts: dict[str, np.ndarray]

    def part(self, block: int) -> "Judged":
        """Those of one block."""
        at = self.block == block
        return Judged(self.rows[at], self.block[at], {name: p[at] for name, p in self.forecasts.items()})


def judged_folds(data: Dataset, outcome: FoldOutcome, name: str) -> list[Judged]:
    """Per fold the model's forecasts, calibrated as a trained model's are and as they were, beside the baselines of
    that fold's own training rows."""
    plan, found = outcome.plan, []
    for (train, test), p, temperature in zip(plan.folds, outcome.forecasts, outcome.temperatures, strict=True):
        said = np.isfinite(p).all(axis=1)
        rows, teachers = plan.rows[test[said]], plan.rows[train[plan.usable[train]]]
        beside = baselines(data, teachers, rows) if len(rows) else {}
        calibrated = among(Temperature(temperature).apply(p[said]), data.classes.values())
        forecasts = {name: calibrated, name + UNCALIBRATED: p[said], **beside}
        found.append(Judged(rows, plan.block[test[said]], forecasts))
    return found


def fold_metrics(data: Dataset, judged: Sequence[Judged]) -> pd.DataFrame:
    """A row per fold, block and forecast; a fold that forecast nothing has none."""
    tables = []
    for number, one in enumerate(judged):
        for block in np.unique(one.block):
            part = one.part(block)
            table = verdicts(data, part.rows, part.forecasts)
            tables.append(table.reset_index().assign(fold=number, block=block))
    return pd.concat(tables, ignore_index=True)


def path_metrics(data: Dataset, plan: FoldPlan, judged: Sequence[Judged]) -> pd.DataFrame | None:
    """A row per path and forecast: the whole of the rows as one backtest (AFML 12.4); None without paths."""
    if plan.paths is None:
        return None
    tables = []
    for number, taken in enumerate(plan.paths):
        parts = [part for g, fold in enumerate(taken) if len((part := judged[fold].part(g)).rows)]
        rows = np.concatenate([part.rows for part in parts])
        forecasts = {name: np.concatenate([part.forecasts[name] for part in parts]) for name in parts[0].forecasts}
        tables.append(verdicts(data, rows, forecasts).reset_index().assign(path=number))
    return pd.concat(tables, ignore_index=True)


def gain_over_blocks(table: pd.DataFrame, name: str) -> tuple[float, float]:
    """Mean gain of `name` in log loss over the blocks, and its standard error.

    A block that several folds judged counts once, with the mean of their gains: those folds share what they learnt.
    """
    gains = table[table["name"] == name].groupby("block")["log_loss_gain"].mean()
    return float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
