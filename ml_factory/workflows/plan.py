"""`plan`: minutes of models, folds and a stack in this session, forecast from two short fits of each model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_seed, check_values
from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.checkpoints.schedule import expected_hours_left
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.errors import check_known
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.result import Result
from ml_factory.runs import RunFolder, finished_folds, newest_run_folder
from ml_factory.settings import TASKS, RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.folds import VALIDATION_SHARE, FoldSchemeSpec, plan_folds
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
    check_values({"units_per_hour": units_per_hour}, units_per_hour="(0, inf)")
    check_seed(seed)
    for task in tasks:
        check_known("Unknown task", "tasks", task, TASKS)
    started, workspace, hours = time.perf_counter(), Workspace(workspace), expected_hours_left()
    chosen = available_models() if models is None else [find_model_spec(name).name for name in models]
    settings, data = settings_per_model(chosen, model_settings), load_dataset(workspace, symbol, horizon)
    work = WorkOnData(workspace, data, tuple(chosen), settings, FoldSchemeSpec(scheme, folds), seed, quick)
    wanted = [("train", name) for name in chosen] if {"train", "stack"} & set(tasks) else []
    wanted += [("folds", name) for name in chosen] if "folds" in tasks else []
    units = [work.left(*one) for one in wanted if not work.is_finished(*one)]
    units.sort(key=lambda unit: (unit["done_percent"] == 0, unit["seconds"], unit["unit"]))
    units += [work.left("stack")] if "stack" in tasks and not work.is_finished("stack") else []
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


@dataclass(frozen=True)
class WorkOnData:
    """Runs on a data set: of each model a training and a cross-validation, and a stack of them all.

    settings : model -> its settings. scheme : of the cross-validation; a stack has as many folds.
    """

    workspace: Workspace
    data: PreparedDataset
    models: tuple[str, ...]
    settings: Mapping[str, Mapping]
    scheme: FoldSchemeSpec
    seed: int
    quick: bool
    costs: dict[str, FitCost] = field(default_factory=dict)  # measured, of each requested model

    def is_finished(self, task: str, name: str = "") -> bool:
        """Return True where the run of a model, or the stack, would only be loaded."""
        run = self._run(task, name)
        return run is not None and (run.ended if task == "folds" else self._artifact(run) is not None)

    def left(self, task: str, name: str = "") -> dict:
        """Return name, seconds and finished share of a run: of a training by its newest checkpoint, else by its folds.

        The pool of a stack itself costs next to nothing.
        """
        run = self._run(task, name)
        if task == "train":
            cost, folder = self._cost(name), CheckpointFolder(self.workspace.checkpoints, 1)
            newest = next(iter(folder.infos(run.run_id, f"train_{name}")), {"metrics": {}})["metrics"]
            done = min(newest.get("rounds", newest.get("epochs", 0)) / cost.iterations, 1.0)
            return {"unit": name, "seconds": cost.seconds(done), "done_percent": round(100 * done, 1)}
        rows, scheme, models = self.data.development_rows(), self.scheme, (name,)
        if task == "stack":
            rows, models = self.data.splits["train"], self.models
            scheme = FoldSchemeSpec(folds=stack_folds(self.scheme.folds, self.quick))
        seconds, shares = 0.0, []
        for one in models:
            whole, count = self._fold_seconds(one, rows, scheme)
            shares.append(finished_folds(run.folder, one)[0] / count if run else 0.0)
            seconds += whole * (1 - shares[-1])
        unit = "stack" if task == "stack" else f"folds of {name}"
        return {"unit": unit, "seconds": seconds, "done_percent": round(100 * float(np.mean(shares)), 1)}

    def _artifact(self, run: RunFolder) -> Artifact | None:
        return ArtifactRegistry(self.workspace.models).find(self.data.symbol, run_id=run.run_id)

    def _run(self, task: str, name: str) -> RunFolder | None:
        """Return the newest attempt at a run; None for a stack whose base models, which identify it, are missing."""
        if task == "stack":
            bases = [self._artifact(self._run("train", one)) for one in self.models]
            if None in bases:
                return None
            hashes, folds = [one.hash for one in bases], stack_folds(self.scheme.folds, self.quick)
            spec = stack_run_settings(self.data, self.models, hashes, folds, self.seed, self.quick, self.settings)
        else:
            spec = self._spec(name, task)
        return newest_run_folder(self.workspace.results / self.data.symbol, spec.run_id)

    def _spec(self, name: str, task: str = "train") -> RunSettings:
        return make_run_settings(
            self.data.symbol, self.data.horizon, name, task=task, seed=self.seed, quick=self.quick,
            data=self.data.fingerprint,
            settings={**self.settings.get(name, {}), **(self.scheme.to_dict() if task == "folds" else {})},
        )  # fmt: skip

    def _cost(self, name: str) -> FitCost:
        if name not in self.costs:
            self.costs[name] = fit_cost(self.data, self._spec(name))
        return self.costs[name]

    def _fold_seconds(self, name: str, rows: np.ndarray, scheme: FoldSchemeSpec) -> tuple[float, int]:
        """Return the seconds of all folds, of their training rows less those kept for early stopping; their number."""
        lookback = build_untrained_model(self.data, self._spec(name))[0].lookback
        folds = plan_folds(self.data, rows, scheme, lookback, quick_row_limit(name, self.quick))
        counts = [(1 - VALIDATION_SHARE) * np.count_nonzero(folds.usable[train]) for train, _ in folds.folds]
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
    *_, learnt, validation = fit_inputs(data, model, *parts, lambda rows: data.scaler)
    unit = "epochs" if find_model_spec(spec.model).windowed else "rounds"
    model.settings = replace(model.settings, **{unit: size[1]})
    began = time.perf_counter()
    model.fit(*learnt, validation=validation)
    return time.perf_counter() - began
