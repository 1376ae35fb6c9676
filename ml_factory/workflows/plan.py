"""`plan`: minutes of models, folds and a stack in this session, forecast from two short fits of each model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_seed, check_units_per_hour
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.checkpoints.compute_session import expected_hours_left
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.result import Result
from ml_factory.runs import RunFolder, finished_folds, newest_run_folder
from ml_factory.settings import TASKS, RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.folds import FoldSchemeSpec, plan_folds
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_rows_with_weight,
    load_dataset,
    quick_row_limit,
)
from ml_factory.workflows.stack import settings_per_model, stack_folds, stack_run_settings
from ml_factory.workflows.train import build_untrained_model, fit_inputs

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
    lines = [f"{symbol}, horizon {horizon}, {left}; {'at most:' if len(table) else 'all of it is finished'}"]
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


@dataclass
class _Planner:
    """Units of work that are not finished; fields as of `plan`."""

    workspace: Workspace
    data: PreparedDataset
    models: tuple[str, ...]
    quick: bool
    seed: int
    settings: Mapping
    scheme: FoldSchemeSpec
    costs: dict[str, FitCost] = field(default_factory=dict)  # measured, of each requested model

    @cached_property
    def artifacts(self) -> dict[str, str]:
        """Run id -> hash of its artifact."""
        found = ArtifactRegistry(self.workspace.models).list(self.data.symbol)
        return {one.facts["run_id"]: one.hash for one in found if "run_id" in one.facts}

    def fits(self, name: str) -> list[dict]:
        """Return the fit of a model on the chronological split."""
        run = self._run(self._spec(name))
        if run.run_id in self.artifacts:
            return []
        folder, cost = CheckpointFolder(self.workspace.checkpoints, 1), self._cost(name)
        newest = next(iter(folder.infos(run.run_id, f"train_{name}")), {"metrics": {}})["metrics"]
        done = min(newest.get("rounds", newest.get("epochs", 0)) / cost.iterations, 1.0)
        return [_unit(name, cost.seconds(done), done)]

    def folds(self, name: str) -> list[dict]:
        """Return the cross-validation of a model."""
        run = self._run(self._spec(name, "folds", self.scheme.to_dict()))
        if run.ended:
            return []
        seconds, count = self._fold_seconds(name, self.data.development_rows(), self.scheme)
        done = finished_folds(run.folder, name)[0] / count
        return [_unit(f"folds of {name}", seconds * (1 - done), done)]

    def stack(self) -> list[dict]:
        """Return the folds of every base model on the training rows; the pool itself costs next to nothing."""
        data, count = self.data, stack_folds(self.scheme.folds, self.quick)
        bases, run = [self.artifacts.get(self._run(self._spec(name)).run_id) for name in self.models], None
        if all(bases):  # a stack is identified by its finished base models and these settings
            run = self._run(stack_run_settings(data, self.models, bases, count, self.seed, self.quick, self.settings))
            if run.run_id in self.artifacts:
                return []
        seconds, finished = 0.0, 0
        for name in self.models:
            ended = finished_folds(run.folder, name)[0] if run else 0
            whole, _ = self._fold_seconds(name, data.splits["train"], FoldSchemeSpec(folds=count))
            seconds, finished = seconds + whole * (1 - ended / count), finished + ended
        return [_unit("stack", seconds, finished / (count * len(self.models)))]

    def _cost(self, name: str) -> FitCost:
        if name not in self.costs:
            self.costs[name] = fit_cost(self.data, self._spec(name))
        return self.costs[name]

    def _spec(self, name: str, task: str = "train", more: Mapping | None = None) -> RunSettings:
        return make_run_settings(
            self.data.symbol, self.data.horizon, name, task=task, seed=self.seed, quick=self.quick,
            data=self.data.fingerprint, settings={**self.settings.get(name, {}), **(more or {})},
        )  # fmt: skip

    def _run(self, settings: RunSettings) -> RunFolder:
        return newest_run_folder(self.workspace.results / self.data.symbol, settings.run_id)

    def _fold_seconds(self, name: str, rows: np.ndarray, scheme: FoldSchemeSpec) -> tuple[float, int]:
        """Return the seconds of all folds, of their training rows less those kept for early stopping; their number."""
        lookback = build_untrained_model(self.data, self._spec(name))[0].lookback
        folds = plan_folds(self.data, rows, scheme, lookback, quick_row_limit(name, self.quick))
        counts = [0.85 * np.count_nonzero(folds.usable[train]) for train, _ in folds.folds]
        return sum(self._cost(name).seconds(rows=count) for count in counts), len(counts)


def fit_cost(data: PreparedDataset, spec: RunSettings) -> FitCost:
    """Run two short fits of different size on rows of a real one, and put a line through their seconds.

    A network's time grows with rows times epochs, so few rows are used; a booster's grows with rounds but starts with a
    pass over all rows, so all rows are used for few rounds.
    """
    model, train, _, _ = build_untrained_model(data, spec)
    windowed, rows = find_model_spec(spec.model).windowed, len(dataset_rows_with_weight(data, train)[0])
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
    fit_seconds(data, spec, sizes[0])  # libraries load and kernels compile on first use
    work = [count * times if windowed else times for count, times in sizes]
    taken = [fit_seconds(data, spec, size) for size in sizes]
    slope = max(0.0, (taken[1] - taken[0]) / (work[1] - work[0])) if work[1] > work[0] else taken[1] / work[1]
    return FitCost(rows, iterations, max(0.0, taken[1] - slope * work[1]), slope, windowed)


def fit_seconds(data: PreparedDataset, spec: RunSettings, size: tuple[int, int]) -> float:
    """Return the seconds of a fit on this many training rows and iterations, with its share of the validation rows."""
    model, train, held_out, _ = build_untrained_model(data, spec)
    share = min(1.0, size[0] / len(train))
    parts = [
        sample_contiguous_blocks(rows, max(1, round(share * len(rows)))) if share < 1 else rows
        for rows in (train, held_out)
    ]
    *_, learnt, validation = fit_inputs(data, model, *parts, lambda rows: data.scaler, None)
    unit = "epochs" if find_model_spec(spec.model).windowed else "rounds"
    model.settings = replace(model.settings, **{unit: size[1]})
    began = time.perf_counter()
    model.fit(*learnt, validation=validation)
    return time.perf_counter() - began
