"""What fits into this session: forecasts from a short warm-up, and an order of work.

A unit of work (a model, a fold) is measured twice in small, and its cost taken as a fixed part and a part that grows
with the work. Nothing here trains or knows a model: `workflows/plan.py` measures, and notebooks show the plan.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np
from scipy.optimize import nnls

from ml_factory.checkpoints.schedule import reserved_seconds
from ml_factory.errors import SettingsError


@dataclass(frozen=True)
class Cost:
    """What a unit of work takes: seconds, bytes of memory at its peak, bytes it leaves in the workspace, bytes of
    checkpoints there while it is at work, which the next unit writes over, and bytes of a GPU's or TPU's memory."""

    seconds: float
    memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    pool_bytes: float = 0.0
    device_bytes: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """cost = fixed + slope * work, each part never negative; work counts rows x epochs (rounds) or the like."""

    fixed: Cost
    slope: Cost

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, Cost]]) -> "CostModel":
        """From (work, cost) of runs of at least two sizes, weighted so that relative errors count, not absolute ones.

        Raises SettingsError with fewer than two sizes.
        """
        measured = list(measured)
        if len({work for work, _ in measured}) < 2:
            raise SettingsError(
                "A forecast wants measurements of two sizes", where="CostModel.fit", got=f"{len(measured)} of one size",
                wanted="at least two different amounts of work", next_step="measure one more, four times as large",
            )  # fmt: skip
        names = [part.name for part in fields(Cost)]
        lines = [_line([(work, getattr(cost, name)) for work, cost in measured]) for name in names]
        return cls(Cost(*(fixed for fixed, _ in lines)), Cost(*(slope for _, slope in lines)))

    def forecast(self, work: float) -> Cost:
        """The cost of this much work."""
        parts = zip(_values(self.fixed), _values(self.slope), strict=True)
        return Cost(*(fixed + slope * work for fixed, slope in parts))


@dataclass(frozen=True)
class WorkUnit:
    """One thing to be done, as a person would name it.

    work : in the units its cost model was measured in.  done : the share that checkpoints hold already, 0 to 1.
    after : names of units that must be whole before it begins.
    """

    name: str
    model: CostModel = field(repr=False)
    work: float
    done: float = 0.0
    after: tuple[str, ...] = ()

    @property
    def left(self) -> Cost:
        """What is still to be paid: the fixed part is paid again by whoever goes on."""
        return self.model.forecast(self.work * (1 - self.done))


@dataclass(frozen=True)
class Budget:
    """What a session has left. Infinite where nothing bounds it.

    pool_bytes : of checkpoints that are there already, and that units write over.
    """

    seconds: float = math.inf
    memory_bytes: float = math.inf
    disk_bytes: float = math.inf
    device_bytes: float = math.inf
    pool_bytes: float = 0.0


@dataclass(frozen=True)
class PlannedUnit:
    """A unit in its place.

    fits : "whole", "in part" (a later session goes on with it), "later" (does not begin), or what it lacks: "memory",
    "device memory", "disk".  takes_bytes : of the workspace, beyond what the units before it have taken.
    """

    unit: WorkUnit
    starts: float
    cost: Cost
    fits: str
    takes_bytes: float = 0.0


def plan(units: Sequence[WorkUnit], budget: Budget, save: Cost = Cost(0.0)) -> list[PlannedUnit]:
    """An order for the units and what of it fits.

    What was begun comes first, so that its slots are free again soonest; then the shortest, which finishes the most
    units by any moment the session might end (shortest processing time first, Smith 1956), and last those that wait
    for others. A unit that lacks memory or disk does not hold up the others. Units share one pool of checkpoints,
    which is as large as the largest needs.

    save : cost of one checkpoint; its time is kept free at the session's end.
    """
    until = budget.seconds - reserved_seconds(save.seconds)
    clock, disk, pool, rows = 0.0, budget.disk_bytes - save.disk_bytes, budget.pool_bytes, []
    unfinished = {unit.name for unit in units}
    for unit in sorted(units, key=lambda unit: (unit.done == 0, bool(unit.after), unit.left.seconds, unit.name)):
        cost = unit.left
        grows = max(0.0, cost.pool_bytes - pool)
        if cost.memory_bytes > budget.memory_bytes:
            fits = "memory"
        elif cost.device_bytes > budget.device_bytes:
            fits = "device memory"
        elif cost.disk_bytes + grows > disk:
            fits = "disk"
        elif unfinished.intersection(unit.after):
            fits = "later"
        elif clock + cost.seconds <= until:
            fits = "whole"
            unfinished.discard(unit.name)
        else:
            fits = "in part" if clock + unit.model.fixed.seconds + save.seconds < until else "later"
        rows.append(PlannedUnit(unit, clock, cost, fits, cost.disk_bytes + grows))
        if fits in ("whole", "in part"):
            clock = clock + cost.seconds if fits == "whole" else until
            disk, pool = disk - cost.disk_bytes - grows, pool + grows
    return rows


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(fixed, slope) >= 0 of least squares on relative errors, y = fixed + slope * x (Lawson and Hanson 1974)."""
    work, cost = np.array(points, dtype=float).T
    if not cost.any():
        return 0.0, 0.0
    scale = 1 / np.maximum(cost, cost.max() * 1e-9)
    # Work as a share of the largest: columns of like size keep the solver exact.
    unit = work.max()
    fixed, slope = nnls(np.column_stack([np.ones_like(work), work / unit]) * scale[:, None], cost * scale)[0]
    return float(fixed), float(slope / unit)


def _values(cost: Cost) -> tuple[float, ...]:
    return astuple(cost)
