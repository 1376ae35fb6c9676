"""Plan of a session: minutes of models, folds and a stack, forecast from two short fits of each model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_units_per_hour
from ml_factory.checkpoints.compute_session import expected_hours_left
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.models.registry import build_model, find_model_spec
from ml_factory.run_folder import RunFolder, open_run_checkpoints, open_run_folder
from ml_factory.settings import QuickLimits, make_run_settings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan, FoldSchemeSpec, plan_folds
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_input_reader,
    dataset_rows_with_weight,
    limit_training_rows,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.results.base import Result
from ml_factory.workflows.stack import stack_folds, stack_run_spec
from ml_factory.workflows.unit_checkpoints import folds_phase_name, parse_fit_progress

TASKS = ("train", "folds", "stack")
RESERVE_SECONDS = 60.0  # of the session's end, for the last save
# A network's short fits: so many batches, and four times as many. A booster's: so many rounds, and three times as many.
_BATCHES, _ROUNDS = 12, 10
_SHARE = 30  # of the work of a whole fit: the short fits of a small one are not longer than it


@dataclass(frozen=True)
class PlanResult(Result):
    """Work that fits into this session.

    table : a row per unit in the recommended order; done_percent is the share held by checkpoints, minutes the time
        left; fits is "whole", "in part" (a later session resumes it) or "later"; compute_units where a rate was given.
    units_per_hour : compute units that this runtime takes per hour; None without a price.
    """

    symbol: str
    horizon: int
    hours_left: float
    table: pd.DataFrame
    units_per_hour: float | None = None

    def summary(self) -> str:
        lines = [f"{name}: {row.minutes:.1f} min, {self._price(row)}{row.fits}" for name, row in self.table.iterrows()]
        left = "no end in sight" if np.isinf(self.hours_left) else f"{self.hours_left:.1f} h left"
        if self.units_per_hour is not None:
            units = self.table["compute_units"].sum()
            lines.append(f"all of it: {units:.3f} compute units at {self.units_per_hour:g} an hour")
        return "\n".join([f"{self.symbol}, horizon {self.horizon}, {left}; at most:", *(f"  {one}" for one in lines)])

    def _price(self, row: pd.Series) -> str:
        return "" if self.units_per_hour is None else f"{row.compute_units:.3f} units, "


@dataclass(frozen=True)
class FitCost:
    """Forecast of a fit: rows it learns from, epochs or rounds, seconds = fixed + slope * work.

    Work is what the time grows with: rows times epochs of a network, rounds of a booster.
    """

    rows: int
    iterations: int
    fixed: float
    slope: float
    windowed: bool

    def seconds(self, done: float = 0.0, rows: float | None = None) -> float:
        """Return the seconds of what is left of a fit, which pays the fixed part again.

        rows : of a smaller fit; None: all. A booster passes over all of its rows at the start and in each round.
        """
        share = 1.0 if rows is None else rows / self.rows
        whole = self.slope * self.iterations * (self.rows if self.windowed else 1)
        return self.fixed * (1.0 if self.windowed else share) + whole * share * (1 - done)


def plan_models(
    workspace: Workspace, data: PreparedDataset, models: Sequence[str], *, quick: bool, seed: int, settings: Mapping,
    tasks: Sequence[str] = ("train",), scheme: FoldSchemeSpec | None = None, units_per_hour: float | None = None,
) -> PlanResult:  # fmt: skip
    """Fit each model briefly, forecast the minutes of its work, and order the work.

    Finished runs of the same settings, seed, data and code are left out; finished parts of unfinished runs are not
    counted again. The forecast is of all epochs or rounds; early stopping ends sooner. Units that are begun come first,
    then the shortest, and the stack last, after its models.

    settings : model -> its settings.
    tasks, scheme, units_per_hour : as of `pipeline.plan`.
    """
    check_units_per_hour(units_per_hour)
    for task in tasks:
        if task not in TASKS:
            raise SettingsError("Unknown task", where="tasks", got=repr(task), next_step=did_you_mean(task, TASKS))
    started, hours = time.perf_counter(), expected_hours_left()
    plan = _Planner(workspace, data, tuple(models), quick, seed, settings, scheme or FoldSchemeSpec())
    units = [unit for name in models for unit in plan.fits(name)] if {"train", "stack"} & set(tasks) else []
    units += [unit for name in models for unit in plan.folds(name)] if "folds" in tasks else []
    units.sort(key=lambda unit: (unit["done_percent"] == 0, unit["seconds"], unit["unit"]))
    units += plan.stack() if "stack" in tasks else []
    table = pd.DataFrame(_schedule(units, 3600 * hours), columns=["unit", *_COLUMNS]).set_index("unit")
    if units_per_hour is not None:
        table["compute_units"] = np.round([one["seconds"] / 3600 * units_per_hour for one in units], 3)
    return PlanResult(symbol=data.symbol, horizon=data.horizon, hours_left=hours, table=table,
                      units_per_hour=units_per_hour, seconds=time.perf_counter() - started)  # fmt: skip


_COLUMNS = ("starts_at_minute", "minutes", "done_percent", "fits")


def _schedule(units: Sequence[dict], seconds: float) -> list[dict]:
    """Return the rows of the plan: when each unit starts, and how much of it fits into so many seconds."""
    rows, elapsed, deadline = [], 0.0, seconds - RESERVE_SECONDS
    for unit in units:
        fits = "whole" if elapsed + unit["seconds"] <= deadline else "in part" if elapsed < deadline else "later"
        starts, minutes = round(elapsed / 60, 1), round(unit["seconds"] / 60, 1)
        rows.append(unit | {"starts_at_minute": starts, "minutes": minutes, "fits": fits})
        elapsed = elapsed + unit["seconds"] if fits == "whole" else max(elapsed, deadline)
    return rows


def _unit(name: str, seconds: float, done: float) -> dict:
    return {"unit": name, "seconds": seconds, "done_percent": round(100 * done, 1)}


class _Planner:
    """Units of work that are not finished; arguments as of `plan_models`."""

    def __init__(
        self, workspace: Workspace, data: PreparedDataset, models: tuple[str, ...], quick: bool, seed: int,
        settings: Mapping, scheme: FoldSchemeSpec,
    ):  # fmt: skip
        self.workspace, self.data, self.models, self.quick, self.seed = workspace, data, models, quick, seed
        self.settings, self.scheme, self._costs = settings, scheme, {}
        found = ArtifactRegistry(workspace.models).list(data.symbol)
        self.artifacts = {one.facts["run_id"]: one.hash for one in found if "run_id" in one.facts}

    def fits(self, name: str) -> list[dict]:
        """Return the fit of a model on the chronological split."""
        run = self._run(name, "train", {})
        if run.run_id in self.artifacts:
            return []
        cost = self._cost(name)
        done = parse_fit_progress(str(self._reached(run, f"train_{name}").get("reached", ""))) / cost.iterations
        return [_unit(name, cost.seconds(min(done, 1.0)), min(done, 1.0))]

    def folds(self, name: str) -> list[dict]:
        """Return the cross-validation of a model."""
        run = self._run(name, "folds", self.scheme.to_dict())
        if run.ended:
            return []
        folds = self._fold_plan(self.data.development_rows(), name, self.scheme)
        done = self._reached(run, folds_phase_name(name)).get("finished", 0) / len(folds.folds)
        return [_unit(f"folds of {name}", self._fold_seconds(name, folds) * (1 - done), done)]

    def stack(self) -> list[dict]:
        """Return the folds of every base model on the training rows; the pool itself costs next to nothing."""
        data, count = self.data, stack_folds(self.scheme.folds, self.quick)
        bases, run = [self.artifacts.get(self._run(name, "train", {}).run_id) for name in self.models], None
        if all(bases):  # a stack is identified by its finished base models and these settings
            own = {name: given for name, given in self.settings.items() if name in self.models}
            spec = stack_run_spec(data, self.models, bases, count, self.seed, self.quick, own)
            run = open_run_folder(self.workspace.results, data.symbol, spec, False)
            if run.run_id in self.artifacts:
                return []
        seconds, finished = 0.0, 0
        for name in self.models:
            folds = self._fold_plan(data.splits["train"], name, FoldSchemeSpec(folds=count))
            ended = int(self._reached(run, folds_phase_name(name)).get("finished", 0)) if run else 0
            seconds, finished = seconds + self._fold_seconds(name, folds) * (1 - ended / count), finished + ended
        return [_unit("stack", seconds, finished / (count * len(self.models)))]

    def _run(self, name: str, task: str, more: Mapping) -> RunFolder:
        spec = make_run_settings(
            self.data.symbol, self.data.horizon, name, task=task, seed=self.seed, quick=self.quick,
            data=self.data.fingerprint, settings={**self.settings.get(name, {}), **more},
        )  # fmt: skip
        return open_run_folder(self.workspace.results, self.data.symbol, spec, False)

    def _reached(self, run: RunFolder, phase: str) -> dict:
        """Return the metrics of a run's newest checkpoint; {} without one."""
        with open_run_checkpoints(self.workspace.checkpoints, run) as manager:
            return (manager.phase(phase).latest_info() or {"metrics": {}})["metrics"]

    def _fit_settings(self, name: str) -> dict:
        """Return the settings of a fit: QUICK's limits, and the user's own over them."""
        limits = QuickLimits().settings_for(find_model_spec(name).family) if self.quick else {}
        return resolve_dataset_settings(self.data, limits | dict(self.settings.get(name, {})))

    def _fold_plan(self, rows: np.ndarray, name: str, scheme: FoldSchemeSpec) -> FoldPlan:
        lookback = build_model(name, **self._fit_settings(name)).lookback
        return plan_folds(self.data, rows, scheme, lookback, quick_row_limit(name, self.quick))

    def _fold_seconds(self, name: str, folds: FoldPlan) -> float:
        """Return the seconds of all folds, of their training rows less those kept for early stopping."""
        rows = [0.85 * np.count_nonzero(folds.usable[train]) for train, _ in folds.folds]
        return sum(self._cost(name).seconds(rows=count) for count in rows)

    def _cost(self, name: str) -> FitCost:
        if name not in self._costs:
            limit = quick_row_limit(name, self.quick)
            self._costs[name] = fit_cost(self.data, name, self._fit_settings(name), self.seed, limit)
        return self._costs[name]


def fit_cost(data: PreparedDataset, name: str, settings: Mapping, seed: int, row_limit: int | None) -> FitCost:
    """Run two short fits of different size on rows of a real one, and put a line through their seconds.

    A network's time grows with rows times epochs, so few rows are used; a booster's grows with rounds but starts with a
    pass over all rows, so all rows are used for few rounds.
    """
    model, windowed = build_model(name, seed=seed, **settings), find_model_spec(name).windowed
    train, _ = limit_training_rows(_usable(data, model.lookback, "train"), row_limit)
    rows = len(dataset_rows_with_weight(data, train)[0])
    iterations = getattr(model.settings, "epochs", 0) or model.settings.rounds
    if windowed:
        batch = model.settings.batch
        least = max(1, min(_BATCHES, rows * iterations // (_SHARE * batch)))
        sizes = [(min(rows, batch * count), 1) for count in (least, 4 * least)]
    else:
        least = max(1, min(_ROUNDS, iterations // _SHARE))
        sizes = [(rows, min(iterations, count)) for count in (least, 3 * least)]
    if sizes[0] == sizes[1]:
        sizes[0] = max(1, sizes[0][0] // 2), sizes[0][1]
    fit_seconds(data, name, settings, seed, sizes[0], rows)  # libraries load and kernels compile on first use
    work = [count * times if windowed else times for count, times in sizes]
    taken = [fit_seconds(data, name, settings, seed, size, rows) for size in sizes]
    slope = max(0.0, (taken[1] - taken[0]) / (work[1] - work[0])) if work[1] > work[0] else taken[1] / work[1]
    return FitCost(rows, iterations, max(0.0, taken[1] - slope * work[1]), slope, windowed)


def fit_seconds(
    data: PreparedDataset, name: str, settings: Mapping, seed: int, size: tuple[int, int], whole: int
) -> float:
    """Return the seconds of a fit on this many training rows and iterations, with its share of the validation rows.

    whole : training rows of a whole fit.
    """
    model = build_model(name, seed=seed, **settings)
    take = dataset_input_reader(data, data.scaler, model)
    train = _part(_usable(data, model.lookback, "train"), size[0])
    held = _usable(data, model.lookback, "validation")
    held = _part(held, max(1, len(held) * size[0] // max(whole, 1)))
    (train, w_train), (held, w_held) = dataset_rows_with_weight(data, train), dataset_rows_with_weight(data, held)
    x_train, validation = take(train), (take(held), data.y[held], w_held)
    limits, began = {"epochs": size[1], "rounds": size[1]}, time.perf_counter()
    model.fit(x_train, data.y[train], w_train, validation=validation, limits=limits)
    return time.perf_counter() - began


def _usable(data: PreparedDataset, lookback: int, split: str) -> np.ndarray:
    rows = data.splits[split]
    return rows[data.full_window_mask(lookback)[rows]]


def _part(rows: np.ndarray, count: int) -> np.ndarray:
    return rows if count >= len(rows) else sample_contiguous_blocks(rows, count)
