"""Plan of a session: forecast time, memory and space of models, folds and a stack after a short warm-up."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_units_per_hour
from ml_factory.checkpoints.compute_session import expected_hours_left
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import save_durations
from ml_factory.checkpoints.session_planner import SessionBudget, WorkCost, WorkCostModel, WorkUnit, plan_session_work
from ml_factory.errors import SettingsError, UnresponsiveMountError, did_you_mean
from ml_factory.models.registry import build_model, find_model_spec
from ml_factory.run_folder import RunFolder, open_run_checkpoints, open_run_folder
from ml_factory.settings import QuickLimits, make_run_settings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.cross_validation.fold_schemes import FoldPlan, FoldSchemeSpec, plan_folds
from ml_factory.workflows.fit_cost_model import (
    SLOTS,
    FitSize,
    accelerator_of_model,
    available_memory_bytes,
    cost_model_work,
    fit_cost_model,
    full_fit_size,
    quick_cost_model,
)
from ml_factory.workflows.prepared_dataset import PreparedDataset, quick_row_limit, resolve_dataset_settings
from ml_factory.workflows.results.base import Result
from ml_factory.workflows.stack import stack_folds, stack_run_spec
from ml_factory.workflows.unit_checkpoints import folds_phase_name, parse_fit_progress


@dataclass(frozen=True)
class PlanResult(Result):
    """Work that fits into this session.

    table : a row per unit in the recommended order; done_percent is the share held by checkpoints, minutes the time
        left; workspace_mb is the space beyond that of the units before it; compute_units where a rate was given.
    units_per_hour : compute units that this runtime takes per hour; None without a price.
    unknown : facts that the workspace could not report, in sentences.
    """

    symbol: str
    horizon: int
    hours_left: float
    table: pd.DataFrame
    units_per_hour: float | None = None
    unknown: tuple[str, ...] = ()

    def summary(self) -> str:
        lines = [f"{name}: {row.minutes:.1f} min, {self._price(row)}{row.fits}" for name, row in self.table.iterrows()]
        left = "no end in sight" if np.isinf(self.hours_left) else f"{self.hours_left:.1f} h left"
        head = f"{self.symbol}, horizon {self.horizon}, {left}; at most:"
        total = []
        if self.units_per_hour is not None:
            units = self.table["compute_units"].sum()
            total = [f"all of it: {units:.3f} compute units at {self.units_per_hour:g} an hour"]
        return "\n".join([head, *(f"  {one}" for one in (*lines, *total, *self.unknown))])

    def _price(self, row: pd.Series) -> str:
        return "" if self.units_per_hour is None else f"{row.compute_units:.3f} units, "


class _MeasuredCosts:
    """Measured cost of each model: size of a whole fit, and its cost model, measured once."""

    def __init__(self, data: PreparedDataset, quick: bool, seed: int):
        self.data, self.quick, self.seed = data, quick, seed
        self._known: dict[str, tuple[FitSize, WorkCostModel]] = {}
        self.device_free = np.inf

    def of(self, name: str, settings: Mapping) -> tuple[FitSize, WorkCostModel]:
        key = fingerprint_json({"model": name, "settings": dict(settings)})
        if key not in self._known:
            whole = full_fit_size(self.data, name, settings, self.seed, self.quick)
            device = accelerator_of_model(name, settings)
            if device is not None:
                device.release_freed_memory()
                self.device_free = float(device.free_bytes())
            measure = quick_cost_model if self.quick else fit_cost_model
            self._known[key] = whole, measure(self.data, name, settings, self.seed, whole)
        return self._known[key]

    def fold(self, name: str, settings: Mapping, folds: FoldPlan) -> WorkCost:
        """Return the cost of a fold, of its training rows less those kept for early stopping: mean seconds, largest
        memory.
        """
        whole, model = self.of(name, settings)
        rows = [0.85 * np.count_nonzero(folds.usable[train]) for train, _ in folds.folds]
        costs = [model.forecast(cost_model_work(name, FitSize(round(count), whole.iterations))) for count in rows]
        # A booster's work is counted in rounds, each over all of its rows.
        share = 1.0 if find_model_spec(name).windowed else float(np.mean(rows)) / whole.rows
        seconds = share * float(np.mean([cost.seconds for cost in costs]))
        return replace(_largest(costs), seconds=seconds, disk_bytes=0.0)


def plan_models(
    workspace: Workspace, data: PreparedDataset, models: Sequence[str], *, quick: bool, seed: int, settings: Mapping,
    tasks: Sequence[str] = ("train",), scheme: FoldSchemeSpec | None = None, units_per_hour: float | None = None,
) -> PlanResult:  # fmt: skip
    """Warm up each model, forecast the cost of its work, and order the work.

    Finished runs of the same settings, seed, data and code are left out; finished parts of unfinished runs are not
    counted again. The forecast is of all epochs or rounds; early stopping ends sooner.

    settings : model -> its settings.
    tasks, scheme, units_per_hour : as of `pipeline.plan`.
    """
    check_units_per_hour(units_per_hour)
    started, scheme = time.perf_counter(), scheme or FoldSchemeSpec()
    hours = expected_hours_left(workspace.results / "sessions")
    for task in tasks:
        if task not in TASKS:
            raise SettingsError("Unknown task", where="tasks", got=repr(task), next_step=did_you_mean(task, TASKS))
    known, measured = _read_plan_workspace_state(workspace, data), _MeasuredCosts(data, quick, seed)
    request = _PlanRequest(workspace, data, tuple(models), quick, seed, settings, scheme, known, measured)
    wanted = {*tasks, *(("train",) if "stack" in tasks else ())}
    units = [unit for task in TASKS if task in wanted for unit in _UNITS[task](request)]
    save, more = _measure_save_cost(
        workspace, max((unit.model.fixed.pool_bytes for unit in units), default=0.0) / SLOTS
    )
    budget = SessionBudget(hours * 3600, available_memory_bytes(), known.space, measured.device_free)
    rows = plan_session_work(units, budget, save)
    columns = {
        "starts_at_minute": [row.starts / 60 for row in rows],
        "minutes": [row.cost.seconds / 60 for row in rows],
        "done_percent": [100 * row.unit.completed for row in rows],
        "memory_mb": [row.cost.memory_bytes / 1e6 for row in rows],
        "device_mb": [row.cost.device_bytes / 1e6 for row in rows],
        "workspace_mb": [row.takes_bytes / 1e6 for row in rows],
    }
    table = pd.DataFrame(columns, index=pd.Index([row.unit.name for row in rows], name="unit")).round(1)
    if units_per_hour is not None:
        table["compute_units"] = np.round([row.cost.seconds / 3600 * units_per_hour for row in rows], 3)
    return PlanResult(
        symbol=data.symbol, horizon=data.horizon, hours_left=hours,
        table=table.assign(fits=[row.fits for row in rows]), unknown=(*known.unknown, *more),
        units_per_hour=units_per_hour,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


@dataclass(frozen=True)
class _PlanRequest:
    """Arguments of a plan, with the state of the workspace and the measured costs."""

    workspace: Workspace
    data: PreparedDataset
    models: tuple[str, ...]
    quick: bool
    seed: int
    settings: Mapping
    scheme: FoldSchemeSpec
    known: "_PlanWorkspaceState"
    measured: _MeasuredCosts

    def fit_settings(self, name: str) -> dict:
        """Return the settings of a fit: QUICK's limits, and the user's own over them."""
        limits = QuickLimits().settings_for(find_model_spec(name).family) if self.quick else {}
        return resolve_dataset_settings(self.data, limits | dict(self.settings.get(name, {})))

    def run(self, name: str, task: str, more: Mapping) -> RunFolder:
        spec = make_run_settings(
            self.data.symbol, self.data.horizon, name, task=task, seed=self.seed, quick=self.quick,
            data=self.data.fingerprint, settings={**self.settings.get(name, {}), **more},
        )  # fmt: skip
        return open_run_folder(self.workspace.results, self.data.symbol, spec, False)

    def reached(self, run: RunFolder, phase: str) -> dict:
        """Return the metrics of a run's newest checkpoint; {} without one, and where a mount is unresponsive."""
        with open_run_checkpoints(self.workspace.checkpoints, run) as manager, suppress(UnresponsiveMountError):
            return (manager.phase(phase).latest_info() or {"metrics": {}})["metrics"]
        return {}

    def fold_plan(self, rows: np.ndarray, name: str, scheme: FoldSchemeSpec) -> FoldPlan:
        lookback = build_model(name, **self.fit_settings(name)).lookback
        return plan_folds(self.data, rows, scheme, lookback, quick_row_limit(name, self.quick))


def _fit_units(request: _PlanRequest) -> Iterator[WorkUnit]:
    """Yield the fit of each model on the chronological split."""
    for name in request.models:
        run = request.run(name, "train", {})
        if run.run_id in request.known.artifacts:
            continue
        whole, model = request.measured.of(name, request.fit_settings(name))
        iterations = parse_fit_progress(str(request.reached(run, f"train_{name}").get("reached", "")))
        yield WorkUnit(name, model, cost_model_work(name, whole), completed=min(1.0, iterations / whole.iterations))


def _fold_units(request: _PlanRequest) -> Iterator[WorkUnit]:
    """Yield the cross-validation of each model; its work is counted in folds."""
    for name in request.models:
        run = request.run(name, "folds", request.scheme.to_dict())
        if request.known.ended(run):
            continue
        folds = request.fold_plan(request.data.development_rows(), name, request.scheme)
        cost = request.measured.fold(name, request.fit_settings(name), folds)
        done = request.reached(run, folds_phase_name(name)).get("finished", 0) / len(folds.folds)
        yield WorkUnit(f"folds of {name}", _cost_per_item(cost), len(folds.folds), done)


def _stack_units(request: _PlanRequest) -> Iterator[WorkUnit]:
    """Yield the folds of every base model on the training rows; the pool itself costs next to nothing.

    A stack is identified by its finished base models and these settings.
    """
    data, count = request.data, stack_folds(request.scheme.folds, request.quick)
    bases = [request.known.artifacts.get(request.run(name, "train", {}).run_id) for name in request.models]
    run = None
    if all(bases):
        own = {name: given for name, given in request.settings.items() if name in request.models}
        spec = stack_run_spec(data, request.models, bases, count, request.seed, request.quick, own)
        run = open_run_folder(request.workspace.results, data.symbol, spec, False)
        if run.run_id in request.known.artifacts:
            return
    costs, finished = [], 0
    for name in request.models:
        folds = request.fold_plan(data.splits["train"], name, FoldSchemeSpec(folds=count))
        costs.append(request.measured.fold(name, request.fit_settings(name), folds))
        finished += int(request.reached(run, folds_phase_name(name)).get("finished", 0)) if run else 0
    mean = replace(_largest(costs), seconds=float(np.mean([cost.seconds for cost in costs])))
    work = count * len(request.models)
    yield WorkUnit("stack", _cost_per_item(mean), work, finished / work, depends_on=request.models)


TASKS = ("train", "folds", "stack")
_UNITS: dict[str, Callable[[_PlanRequest], Iterator[WorkUnit]]] = {
    "train": _fit_units,
    "folds": _fold_units,
    "stack": _stack_units,
}


def _largest(costs: Sequence[WorkCost]) -> WorkCost:
    """Return the largest of each figure."""
    return WorkCost(*(max(values) for values in zip(*map(astuple, costs), strict=True)))


def _cost_per_item(cost: WorkCost) -> WorkCostModel:
    """Return a cost model of so many seconds per item; the other costs do not grow with their number."""
    return WorkCostModel(replace(cost, seconds=0.0), WorkCost(cost.seconds))


@dataclass(frozen=True)
class _PlanWorkspaceState:
    """State of the workspace.

    artifacts : run id -> hash of finished artifacts.
    space : free bytes.
    unknown : facts that a mount could not report, in sentences; then nothing counts as finished, and space is
        unbounded.
    """

    artifacts: dict[str, str]
    space: float
    unknown: tuple[str, ...]

    def ended(self, run: RunFolder) -> bool:
        try:
            return run.ended
        except UnresponsiveMountError:
            return False


def _read_plan_workspace_state(workspace: Workspace, data: PreparedDataset) -> _PlanWorkspaceState:
    """Read the `PlanWorkspaceState`."""
    artifacts, space, unknown = {}, np.inf, []
    try:
        found = ArtifactRegistry(workspace.models).list(data.symbol)
        artifacts = {one.facts["run_id"]: one.hash for one in found if "run_id" in one.facts}
    except UnresponsiveMountError as error:
        unknown.append(f"unknown: which of them are finished; the mount does not answer ({error.got})")
    try:
        space = float(workspace.files.free_bytes(workspace.root))
    except UnresponsiveMountError as error:
        unknown.append(f"unknown: free space; the mount does not answer ({error.got})")
    return _PlanWorkspaceState(artifacts, space, tuple(unknown))


def _measure_save_cost(workspace: Workspace, size: float) -> tuple[WorkCost, tuple[str, ...]]:
    """Return (cost of saving so many bytes, facts that are unknown).

    The cost is that of the last save of this process, or of one test save on the first disk, which is deleted.
    """
    seconds = save_durations(workspace.checkpoints).seconds
    if seconds or not size:
        return WorkCost(seconds), ()
    with (
        tempfile.TemporaryDirectory(dir=workspace.root, prefix=".planning-") as folder,
        CheckpointManager(Path(folder) / "checkpoints", run="planning") as manager,
    ):
        manager.save_checkpoint("save", {"bytes": np.zeros(round(size), np.uint8)}, force=True)
        manager.wait()
        return WorkCost(manager.durations.seconds), ()
