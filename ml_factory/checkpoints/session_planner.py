"""Session planner: cost forecasts from a short warm-up, and an order of work that fits the remaining session.

A unit of work (a model, a fold) is measured at two small sizes, and its cost modelled as a fixed part plus a part
proportional to the work. No training and no model here: `workflows/plan.py` measures, and notebooks show the plan.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np

from ml_factory.checkpoints.schedule import reserved_save_seconds
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

optimize = LazyModule("scipy.optimize")  # only a forecast from measured costs reads it


@dataclass(frozen=True)
class WorkCost:
    """Resources of a unit of work.

    Parameters
    ----------
    seconds : run time.
    memory_bytes : peak host memory.
    disk_bytes : files that it leaves in the workspace.
    pool_bytes : checkpoints in the workspace while it runs, overwritten by the next unit.
    device_bytes : peak memory of a GPU or TPU.
    """

    seconds: float
    memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    pool_bytes: float = 0.0
    device_bytes: float = 0.0


@dataclass(frozen=True)
class WorkCostModel:
    """cost = fixed + slope * work, each part non-negative; work counts rows x epochs (rounds) or the like."""

    fixed: WorkCost
    slope: WorkCost

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, WorkCost]]) -> "WorkCostModel":
        """Fit to (work, cost) of runs of at least two sizes, by least squares on relative errors.

        Raises SettingsError with fewer than two sizes.
        """
        measured = list(measured)
        if len({work for work, _ in measured}) < 2:
            raise SettingsError(
                "A forecast needs measurements of two sizes", where="CostModel.fit", got=f"{len(measured)} of one size",
                wanted="at least two different amounts of work", next_step="measure one more, four times as large",
            )  # fmt: skip
        names = [part.name for part in fields(WorkCost)]
        lines = [_fit_line([(work, getattr(cost, name)) for work, cost in measured]) for name in names]
        return cls(WorkCost(*(fixed for fixed, _ in lines)), WorkCost(*(slope for _, slope in lines)))

    def forecast(self, work: float) -> WorkCost:
        """Return the cost of this much work."""
        parts = zip(astuple(self.fixed), astuple(self.slope), strict=True)
        return WorkCost(*(fixed + slope * work for fixed, slope in parts))


@dataclass(frozen=True)
class WorkUnit:
    """One unit of work.

    Parameters
    ----------
    name : as shown to the user.
    model : its cost model.
    work : in the units its cost model was measured in.
    completed : fraction that checkpoints hold already, 0 to 1.
    depends_on : names of units that must be whole before this one begins.
    """

    name: str
    model: WorkCostModel = field(repr=False)
    work: float
    completed: float = 0.0
    depends_on: tuple[str, ...] = ()

    @property
    def remaining(self) -> WorkCost:
        """Cost of the rest; the fixed part is paid again by the session that resumes."""
        return self.model.forecast(self.work * (1 - self.completed))


@dataclass(frozen=True)
class SessionBudget:
    """Resources that a session has left; infinite where nothing bounds them.

    pool_bytes : existing checkpoints, which units overwrite.
    """

    seconds: float = math.inf
    memory_bytes: float = math.inf
    disk_bytes: float = math.inf
    device_bytes: float = math.inf
    pool_bytes: float = 0.0


@dataclass(frozen=True)
class PlannedUnit:
    """A unit and its position in the plan.

    Parameters
    ----------
    unit : the unit of work.
    starts : seconds from now.
    cost : of what remains of the unit.
    fits : "whole", "in part" (a later session resumes it), "later" (does not begin), or the missing resource: "memory",
        "device memory", "disk".
    takes_bytes : of the workspace, in addition to the units before it.
    """

    unit: WorkUnit
    starts: float
    cost: WorkCost
    fits: str
    takes_bytes: float = 0.0


def plan_session_work(
    units: Sequence[WorkUnit], budget: SessionBudget, save: WorkCost = WorkCost(0.0)
) -> list[PlannedUnit]:
    """Order the units and mark what fits the budget.

    Units already begun come first, so that their slots are free again soonest; then the shortest, which finishes the
    most units by any moment the session might end (shortest processing time first, Smith 1956), and last those that
    depend on others. A unit that lacks memory or disk does not delay the others. Units share one pool of checkpoints,
    as large as the largest needs.

    Parameters
    ----------
    units : units of work in any order.
    budget : resources of the session.
    save : cost of one checkpoint; its time is reserved at the session's end.
    """
    deadline = budget.seconds - reserved_save_seconds(save.seconds)
    elapsed, disk, pool, rows = 0.0, budget.disk_bytes - save.disk_bytes, budget.pool_bytes, []
    unfinished = {unit.name for unit in units}
    for unit in sorted(
        units, key=lambda unit: (unit.completed == 0, bool(unit.depends_on), unit.remaining.seconds, unit.name)
    ):
        cost = unit.remaining
        new_pool_bytes = max(0.0, cost.pool_bytes - pool)
        if cost.memory_bytes > budget.memory_bytes:
            fits = "memory"
        elif cost.device_bytes > budget.device_bytes:
            fits = "device memory"
        elif cost.disk_bytes + new_pool_bytes > disk:
            fits = "disk"
        elif unfinished.intersection(unit.depends_on):
            fits = "later"
        elif elapsed + cost.seconds <= deadline:
            fits = "whole"
            unfinished.discard(unit.name)
        else:
            fits = "in part" if elapsed + unit.model.fixed.seconds + save.seconds < deadline else "later"
        rows.append(PlannedUnit(unit, elapsed, cost, fits, cost.disk_bytes + new_pool_bytes))
        if fits in ("whole", "in part"):
            elapsed = elapsed + cost.seconds if fits == "whole" else deadline
            disk, pool = disk - cost.disk_bytes - new_pool_bytes, pool + new_pool_bytes
    return rows


def _fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (fixed, slope) >= 0 of least squares on relative errors, y = fixed + slope * x (Lawson and Hanson
    1974).
    """
    work, cost = np.array(points, dtype=float).T
    if not cost.any():
        return 0.0, 0.0
    scale = 1 / np.maximum(cost, cost.max() * 1e-9)
    # Work relative to the largest: columns of similar scale keep the solver exact.
    unit = work.max()
    fixed, slope = optimize.nnls(np.column_stack([np.ones_like(work), work / unit]) * scale[:, None], cost * scale)[0]
    return float(fixed), float(slope / unit)
