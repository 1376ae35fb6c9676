"""Folds over some rows of a data set, each fold a unit of work that is found again after a kill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.ensemble.out_of_fold import Fold, fold_forecasts, together
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.evaluation.calibration import Temperature
from ml_factory.evaluation.metrics import among
from ml_factory.experiment import RunSpec, machine
from ml_factory.models.registry import build_model
from ml_factory.models.tabular_data import BinnedData
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.runs.mounts import SilentMountError
from ml_factory.runs.state import load_state, save_state
from ml_factory.runs.storage import is_file
from ml_factory.seeding import derive_seed
from ml_factory.targets.combinatorial import CombinatorialFolds, combinatorial_purged
from ml_factory.targets.splits import purged_kfold
from ml_factory.targets.walk_forward import walk_forward_expanding, walk_forward_rolling
from ml_factory.targets.weights import WeightSpec, effective_rows
from ml_factory.units.dataset import (
    Dataset,
    baselines,
    binned_for,
    fit_on,
    limit_rows,
    model_inputs,
    resolved,
    verdicts,
    weights_of,
)
from ml_factory.units.keeping import Kept, fold_phase, folds_phase, how_far, reached_by_fit

# scheme -> what its folds are called
SCHEMES = {
    "purged_kfold": "purged folds",
    "walk_forward_expanding": "folds that walk forward on all that came before",
    "walk_forward_rolling": "folds that walk forward on a rolling window",
    "combinatorial": "combinatorial purged folds",
}

# Behind a model's name: its forecasts before the temperature of the fold.
UNCALIBRATED = "_uncalibrated"


@dataclass(frozen=True)
class SchemeSpec:
    """How rows are cut into folds.

    name : one of SCHEMES.  folds : blocks that judge; of "combinatorial" the blocks to choose from.
    test_blocks : of "combinatorial", how many of them one fold judges.
    window : of "walk_forward_rolling", rows trained on; None: as many as the first fold has.
    """

    name: str = "purged_kfold"
    folds: int = 5
    test_blocks: int = 2
    window: int | None = None

    def __post_init__(self):
        if self.name not in SCHEMES:
            raise SettingsError(
                "Unknown scheme of folds",
                where="scheme",
                got=repr(self.name),
                next_step=did_you_mean(self.name, SCHEMES),
            )

    def cut(self, labels: pd.DataFrame, embargo: int) -> Sequence[Fold]:
        """(train, test) positions into `labels` of each fold. SettingsError when the rows cannot be cut like this."""
        if self.name == "purged_kfold":
            return purged_kfold(labels, self.folds, embargo)
        if self.name == "walk_forward_expanding":
            return walk_forward_expanding(labels, self.folds)
        if self.name == "walk_forward_rolling":
            return walk_forward_rolling(labels, self.folds, self.window)
        return combinatorial_purged(labels, self.folds, self.test_blocks, embargo)

    def to_dict(self) -> dict:
        """What decides the folds, for a run's settings."""
        own = {"walk_forward_rolling": {"window": self.window}, "combinatorial": {"test_blocks": self.test_blocks}}
        return {"scheme": self.name, "folds": self.folds} | own.get(self.name, {})


@dataclass(frozen=True)
class FoldPlan:
    """Which rows are folded, and how.

    rows : positions into the labels' rows.  labels : the labels of these rows.
    folds : (train, test) positions into `rows`, purged and embargoed.  usable : bool, rows the model can read.
    block : int64, the block each row is judged in, -1 for none.
    paths : int64[paths, blocks], the fold whose forecast of each block a path takes; None: each row is judged once.
    limited : what QUICK limits.
    """

    rows: np.ndarray
    labels: pd.DataFrame
    folds: Sequence[Fold]
    usable: np.ndarray
    block: np.ndarray
    paths: np.ndarray | None
    limited: dict

    def table(self) -> pd.DataFrame:
        """Per fold: rows trained on, judged, and neither (purged, embargoed, out of sight, or left out by QUICK).

        effective_train, effective_test : how many rows without overlap would tell as much.
        """
        return pd.DataFrame(
            [
                {
                    "fold": number,
                    "train": len(train),
                    "test": len(test),
                    "left_out": len(self.rows) - len(train) - len(test),
                    "effective_train": effective_rows(self.labels.iloc[train]),
                    "effective_test": effective_rows(self.labels.iloc[test]),
                }
                for number, (train, test) in enumerate(self.folds)
            ]
        )


def fold_plan(data: Dataset, rows: np.ndarray, folds: int | SchemeSpec, lookback: int, quick: bool) -> FoldPlan:
    """`rows` cut into folds; the embargo is at least the model's input window.

    folds : a number of purged folds, or the whole scheme.
    """
    scheme = folds if isinstance(folds, SchemeSpec) else SchemeSpec(folds=folds)
    labels = data.labels.iloc[rows]
    cut = scheme.cut(labels, embargo_of(data, lookback))
    block, paths = np.full(len(rows), -1), None
    if isinstance(cut, CombinatorialFolds):
        block, paths = np.repeat(np.arange(len(cut.edges) - 1), np.diff(cut.edges)), cut.paths
    else:
        for number, (_, test) in enumerate(cut):
            block[test] = number
    limited = {}
    if quick:
        kept = [(*limit_rows(train, quick), test) for train, test in cut]
        said = [limit["training rows"] for _, limit, _ in kept if limit]
        limited = {"rows of a fold": said[-1]} if said else {}
        cut = [(train, test) for train, _, test in kept]
    return FoldPlan(rows, labels, cut, data.usable(lookback)[rows], block, paths, limited)


def embargo_of(data: Dataset, lookback: int) -> int:
    """Rows kept away behind a block that judges: as set, and at least the model's input window."""
    return max(int(data.settings["data"]["splits"]["embargo_bars"]), lookback)


@dataclass(frozen=True)
class FoldOutcome:
    """What the folds of `plan` forecast.

    forecasts : for each fold float64 (test rows, 3), NaN where none, as the models say them.
    temperatures : what calibrates each fold's, learnt from training rows of the fold.
    found : folds that were done before.
    inexact : why a fold that was continued elsewhere is not the same to the bit; empty when all are.
    inside : how far the fit of the fold after those was, in words; "" where it began now.
    """

    plan: FoldPlan
    forecasts: list[np.ndarray]
    temperatures: list[float]
    found: int
    inexact: tuple[str, ...]
    inside: str = ""

    @property
    def reached(self) -> str:
        """What was there before, in words; "" where all of it was done now."""
        return how_far(f"fold {self.found} of {len(self.plan.folds)}" if self.found else "", self.inside)

    @property
    def p_N3(self) -> np.ndarray:
        """Probabilities of the plan's rows, NaN where none; of folds that judge each row once."""
        return together(len(self.plan.rows), self.plan.folds, self.forecasts)

    @property
    def untaught(self) -> list[int]:
        """Folds that forecast nothing, since their training rows were of one class."""
        return [number for number, p in enumerate(self.forecasts) if not np.isfinite(p).any()]


def out_of_fold_predictions(
    manager: CheckpointManager, data: Dataset, plan: FoldPlan, spec: RunSpec, model: str, settings: dict,
    weights: WeightSpec | None = None, keep: Path | None = None, bins: Mapping[int, BinnedData] | None = None,
) -> FoldOutcome:  # fmt: skip
    """As `forecast_folds`. Raises FactoryError when no fold had rows of two classes to learn from."""
    outcome = forecast_folds(manager, data, plan, spec, model, settings, weights, keep, bins)
    check_taught(outcome.untaught, len(plan.folds), model)
    return outcome


def check_taught(untaught: Sequence[int], folds: int, model: str) -> None:
    """Raises FactoryError when every fold is among the `untaught`."""
    if len(untaught) == folds:
        raise FactoryError(
            "No fold has training rows of two classes",
            where=f"{folds} folds",
            got=f"nothing that {model} could learn",
            next_step="bring more bars, or set barriers that are reached: a smaller k_up, k_down",
        )


def forecast_folds(
    manager: CheckpointManager, data: Dataset, plan: FoldPlan, spec: RunSpec, model: str, settings: dict,
    weights: WeightSpec | None = None, keep: Path | None = None, bins: Mapping[int, BinnedData] | None = None,
) -> FoldOutcome:  # fmt: skip
    """Train `model` once per fold and predict the fold's test rows. Everything fitted is the fold's, weights too.

    keep : the file in which finished forecasts stay, and are found again; the checkpoints' slots are given back then.
    bins : of each fold, where other trials and seeds have built or will want them (`FoldBins`).
    """
    if keep is not None and (found := _finished(keep, plan)):
        return found
    settings = resolved(data, model, settings)
    reader, here = build_model(model, **settings), machine(spec)
    outer, count = manager.phase(folds_phase(model)), len(plan.folds)
    kept = Kept(outer, here, lambda state: f"fold {state['finished']} of {count}")
    inner: dict[int, Kept] = {}
    given_back: set[int] = set()

    def inputs(fit: np.ndarray):
        take = model_inputs(data, fit_on(data, plan.rows[fit]), reader)
        return lambda positions: take(plan.rows[positions])

    def options(fold: int) -> dict:
        before = inner.keys() - given_back
        if before and outer.kept():  # the folds before are in the outer checkpoint: their slots serve this one
            for one in sorted(before):
                manager.phase(fold_phase(model, one)).finish()
            given_back.update(before)
        inner[fold] = Kept(manager.phase(fold_phase(model, fold)), here, reached_by_fit)
        return {"checkpoints": inner[fold]} | binned_for(model, bins, fold)

    forecasts, temperatures = fold_forecasts(
        lambda fold: build_model(model, seed=derive_seed(spec.seed, model, "fold", fold), **settings),
        inputs,
        plan.labels,
        plan.folds,
        usable=plan.usable,
        weigh=lambda fit: weights_of(data, plan.rows[fit], weights),
        fit_options=options,
        checkpoints=kept,
        on_fold=lambda fold, result: kept.mark([*result.inexact, *inner[fold].elsewhere]),
        classes=tuple(data.classes.values()),
    )
    if keep is not None:
        save_state(keep, {"p": forecasts, "temperatures": temperatures, "elsewhere": kept.elsewhere})
    if keep is not None and _finished(keep, plan):  # read back: a mount may say yes and keep nothing
        for phase in (outer, *(manager.phase(fold_phase(model, fold)) for fold in range(count))):
            phase.finish()
    found = int(kept.metrics.get("finished", 0))
    inside = str(inner[found].metrics.get("reached", "")) if found in inner else ""
    return FoldOutcome(plan, forecasts, temperatures, found, tuple(kept.elsewhere), inside)


def _finished(keep: Path, plan: FoldPlan) -> FoldOutcome | None:
    """What an earlier run of these folds left, where it is whole."""
    try:
        state = load_state(keep) if is_file(keep) else {"p": [], "temperatures": []}
    except SilentMountError:
        raise
    except FactoryError:  # torn or damaged: made again
        return None
    forecasts = [np.array(p, dtype=np.float64) for p in state["p"]]
    if [p.shape for p in forecasts] != [(len(test), 3) for _, test in plan.folds]:
        return None
    temperatures = [float(temperature) for temperature in state["temperatures"]]
    return FoldOutcome(plan, forecasts, temperatures, len(forecasts), tuple(state["elsewhere"]))


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
