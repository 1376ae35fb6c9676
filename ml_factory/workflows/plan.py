"""`plan`: minutes of models, folds and a stack in this session, forecast from two short fits of each model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_seed, check_units_per_hour
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.checkpoints.compute_session import expected_hours_left
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.models.registry import available_models, build_model, find_model_spec
from ml_factory.result import Result
from ml_factory.runs import RunFolder, count_finished_folds, newest_run_folder
from ml_factory.settings import QuickLimits, RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.folds import FoldPlan, FoldSchemeSpec, plan_folds
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_input_reader,
    dataset_rows_with_weight,
    limit_training_rows,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.stack import settings_per_model, stack_folds, stack_run_settings

TASKS = ("train", "folds", "stack")
RESERVE_SECONDS = 60.0  # of the session's end, for the last save
# A network's short fits: so many batches, and four times as many. A booster's: so many rounds, and three times as many.
_BATCHES, _ROUNDS = 12, 10
_SHARE = 30  # of the work of a whole fit: the short fits of a small one are not longer than it


def plan(
    workspace: Workspace | str | Path, symbol: str, horizon: int, models: Sequence[str] | None = None, *,
    model_settings: Mapping[str, Mapping] | None = None, tasks: Sequence[str] = ("train",),
    scheme: str = "purged_kfold", folds: int = 5, units_per_hour: float | None = None, seed: int = 0,
    quick: bool = False,
) -> Result:  # fmt: skip
    """Forecast which of this work fits into the rest of the session, and in which order.

    Each model is fitted briefly twice, and its time extrapolated to all epochs or rounds; early stopping ends sooner.
    Nothing is kept. Finished runs of the same settings, seed, data and code are left out; finished parts of unfinished
    runs are not counted again. Begun units come first, then the shortest, and the stack last, after its models.

    models : default: all there are; finished ones are left out.
    model_settings : model -> its settings, as of `train`.
    tasks : "train"; "folds", a cross-validation of each; "stack", with these as base models.
    scheme, folds : as of `cross_validate` and `stack`.
    units_per_hour : compute units that this runtime takes per hour, to price the plan; None: no price.

    The result has `hours_left`, and `table`, a row per unit in the recommended order: done_percent is the share held by
    checkpoints, minutes the time left; fits is "whole", "in part" (a later session resumes it) or "later";
    compute_units where a rate was given.
    """
    check_units_per_hour(units_per_hour)
    check_seed(seed)
    for task in tasks:
        if task not in TASKS:
            raise SettingsError("Unknown task", where="tasks", got=repr(task), next_step=did_you_mean(task, TASKS))
    started, workspace, hours = time.perf_counter(), Workspace(workspace), expected_hours_left()
    chosen = available_models() if models is None else [find_model_spec(name).name for name in models]
    settings, data = settings_per_model(chosen, model_settings), load_dataset(workspace, symbol, horizon)
    planner = _Planner(workspace, data, tuple(chosen), quick, seed, settings, FoldSchemeSpec(scheme, folds))
    units = [unit for name in chosen for unit in planner.fits(name)] if {"train", "stack"} & set(tasks) else []
    units += [unit for name in chosen for unit in planner.folds(name)] if "folds" in tasks else []
    units.sort(key=lambda unit: (unit["done_percent"] == 0, unit["seconds"], unit["unit"]))
    units += planner.stack() if "stack" in tasks else []
    table = pd.DataFrame(_schedule(units, 3600 * hours), columns=["unit", *_COLUMNS]).set_index("unit")
    price = ""
    if units_per_hour is not None:
        table["compute_units"] = np.round([one["seconds"] / 3600 * units_per_hour for one in units], 3)
        price = f"all of it: {table['compute_units'].sum():.3f} compute units at {units_per_hour:g} an hour"
    left = f"{hours:.1f} h left" if np.isfinite(hours) else "no end in sight"
    lines = [f"{symbol}, horizon {horizon}, {left}; at most:"]
    for name, row in table.iterrows():
        units_of = f"{row.compute_units:.3f} units, " if price else ""
        lines.append(f"  {name}: {row.minutes:.1f} min, {units_of}{row.fits}")
    return Result(
        [*lines, *([f"  {price}"] if price else [])], symbol=symbol, horizon=horizon, hours_left=hours, table=table,
        units_per_hour=units_per_hour, seconds=time.perf_counter() - started,
    )  # fmt: skip


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
    """Units of work that are not finished; arguments as of `plan`."""

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
        run = self._run_of_model(name, "train", {})
        if run.run_id in self.artifacts:
            return []
        cost, folder = self._cost(name), CheckpointFolder(self.workspace.checkpoints, 1)
        newest = next(iter(folder.infos(run.run_id, f"train_{name}")), {"metrics": {}})["metrics"]
        done = min(newest.get("rounds", newest.get("epochs", 0)) / cost.iterations, 1.0)
        return [_unit(name, cost.seconds(done), done)]

    def folds(self, name: str) -> list[dict]:
        """Return the cross-validation of a model."""
        run = self._run_of_model(name, "folds", self.scheme.to_dict())
        if run.ended:
            return []
        folds = self._fold_plan(self.data.development_rows(), name, self.scheme)
        done = count_finished_folds(run.folder, name) / len(folds.folds)
        return [_unit(f"folds of {name}", self._fold_seconds(name, folds) * (1 - done), done)]

    def stack(self) -> list[dict]:
        """Return the folds of every base model on the training rows; the pool itself costs next to nothing."""
        data, count = self.data, stack_folds(self.scheme.folds, self.quick)
        bases = [self.artifacts.get(self._run_of_model(name, "train", {}).run_id) for name in self.models]
        run = None
        if all(bases):  # a stack is identified by its finished base models and these settings
            own = {name: given for name, given in self.settings.items() if name in self.models}
            run = self._run(stack_run_settings(data, self.models, bases, count, self.seed, self.quick, own))
            if run.run_id in self.artifacts:
                return []
        seconds, finished = 0.0, 0
        for name in self.models:
            folds = self._fold_plan(data.splits["train"], name, FoldSchemeSpec(folds=count))
            ended = count_finished_folds(run.folder, name) if run else 0
            seconds, finished = seconds + self._fold_seconds(name, folds) * (1 - ended / count), finished + ended
        return [_unit("stack", seconds, finished / (count * len(self.models)))]

    def _run_of_model(self, name: str, task: str, more: Mapping) -> RunFolder:
        settings = {**self.settings.get(name, {}), **more}
        return self._run(make_run_settings(
            self.data.symbol, self.data.horizon, name, task=task, seed=self.seed, quick=self.quick,
            data=self.data.fingerprint, settings=settings,
        ))  # fmt: skip

    def _run(self, settings: RunSettings) -> RunFolder:
        return newest_run_folder(self.workspace.results / self.data.symbol, settings.run_id)

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
