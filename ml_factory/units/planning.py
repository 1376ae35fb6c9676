"""A short warm-up of each model, and what of the work fits into what is left of this session."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.datasets.rows import contiguous_blocks
from ml_factory.experiment import QuickLimits
from ml_factory.models.registry import build_model, spec_of
from ml_factory.runs.mounts import SilentMount, SilentMountError, free_bytes
from ml_factory.runs.planner import Cost, CostModel, Room, WorkUnit, plan
from ml_factory.runs.registry import Registry
from ml_factory.runs.session import hours_left
from ml_factory.runs.state import encode_state, lay_out
from ml_factory.runs.workspace import Workspace
from ml_factory.units.dataset import Dataset, limit_rows, model_inputs, weighted
from ml_factory.units.results import Result

# A network's warm-up: so many batches, and four times as many. A booster's: so many rounds, and three times as many.
_BATCHES, _ROUNDS = 12, 10
_SLOTS = 5  # of a unit's checkpoints at most: three kept, the best, the one being written


@dataclass(frozen=True)
class PlanResult(Result):
    """What fits into this session.

    table : a row a unit in the order to do them; workspace_mb is what it takes beyond the units before it.
    unknown : what the workspace did not tell, in sentences.
    """

    symbol: str
    horizon: int
    hours_left: float
    table: pd.DataFrame
    unknown: tuple[str, ...] = ()

    def summary(self) -> str:
        told = [f"{name}: {row.minutes:.1f} min, {row.fits}" for name, row in self.table.iterrows()]
        left = "no end in sight" if np.isinf(self.hours_left) else f"{self.hours_left:.1f} h left"
        head = f"{self.symbol}, horizon {self.horizon}, {left}; at most:"
        return "\n".join([head, *(f"  {one}" for one in (*told, *self.unknown))])


@dataclass(frozen=True)
class Size:
    """How much of a model's work a fit is: rows it learns from and epochs, or rounds."""

    rows: int
    turns: int


def plan_models(
    workspace: Workspace, data: Dataset, models: Sequence[str], *, quick: bool, seed: int, settings: Mapping
) -> PlanResult:
    """Warm each model up, forecast a whole run of it, and put them in order.

    What is finished is left out. The forecast is of all epochs or rounds that the settings allow; early stopping ends
    sooner. settings : model -> its settings.
    """
    started, units = time.perf_counter(), []
    done, space, unknown = asked(workspace, data)
    for name in (name for name in models if name not in done):
        mine = dict(settings.get(name, {}))
        limited = QuickLimits().settings_for(spec_of(name).family) if quick else {}
        whole = full_size(data, name, limited | mine, seed, quick)
        units.append(WorkUnit(name, warm_up(data, name, limited | mine, seed, whole), work_of(name, whole)))
    room = Room(hours_left() * 3600, _free_memory(), space)
    rows = plan(units, room)
    table = pd.DataFrame(
        {
            "starts_at_minute": [row.starts / 60 for row in rows],
            "minutes": [row.cost.seconds / 60 for row in rows],
            "memory_mb": [row.cost.memory_bytes / 1e6 for row in rows],
            "workspace_mb": [row.takes_bytes / 1e6 for row in rows],
            "fits": [row.fits for row in rows],
        },
        index=pd.Index([row.unit.name for row in rows], name="model"),
    ).round(1)
    return PlanResult(
        symbol=data.symbol, horizon=data.horizon, hours_left=hours_left(), table=table, unknown=unknown,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def asked(workspace: Workspace, data: Dataset) -> tuple[set[str], float, tuple[str, ...]]:
    """(models that are finished, bytes free for the workspace, what of these a mount did not tell): then no model
    counts as finished, and the space as unbounded."""
    done, space, unknown = set(), np.inf, []
    try:
        found = Registry(workspace.models).list(data.symbol)
        facts = {"horizon": data.horizon, "data": data.fingerprint}
        done = {one.name for one in found if one.kind == "model" and facts.items() <= one.facts.items()}
    except SilentMountError as error:
        unknown.append(f"not known which of them are finished: the mount does not answer ({error.got})")
    try:
        space = float(free_bytes(workspace.root))
    except SilentMount as error:
        unknown.append(f"not known how much space is left: the mount does not answer ({error.strerror})")
    return done, space, tuple(unknown)


def full_size(data: Dataset, name: str, settings: Mapping, seed: int, quick: bool) -> Size:
    """What a whole run of this model learns from."""
    model = build_model(name, seed=seed, **settings)
    rows, _ = limit_rows(_usable(data, model.lookback, "train"), quick)
    return Size(len(weighted(data, rows)[0]), getattr(model.settings, "epochs", 0) or model.settings.rounds)


def warm_up(data: Dataset, name: str, settings: Mapping, seed: int, whole: Size) -> CostModel:
    """Two short fits of different size on the rows of a real one.

    A network's time grows with rows times epochs, so it is shown few rows; a booster's grows with rounds but starts
    with a pass over all rows, so it is shown all of them for few rounds.
    """
    if spec_of(name).windowed:
        batch = build_model(name, seed=seed, **settings).settings.batch
        sizes = [Size(min(whole.rows, batch * count), 1) for count in (_BATCHES, 4 * _BATCHES)]
    else:
        sizes = [Size(whole.rows, min(whole.turns, count)) for count in (_ROUNDS, 3 * _ROUNDS)]
    if sizes[0] == sizes[1]:
        sizes[0] = Size(max(1, sizes[0].rows // 2), sizes[0].turns)
    fit_once(data, name, settings, seed, sizes[0], whole)  # libraries load and kernels compile on first use
    return CostModel.fit([(work_of(name, size), fit_once(data, name, settings, seed, size, whole)) for size in sizes])


def fit_once(data: Dataset, name: str, settings: Mapping, seed: int, size: Size, whole: Size) -> Cost:
    """The cost of fitting this much of it, on the training rows, with its share of the validation rows."""
    model = build_model(name, seed=seed, **settings)
    turns = {"epochs": size.turns, "rounds": size.turns}
    take = model_inputs(data, data.scaler, model.lookback)
    train = _part(_usable(data, model.lookback, "train"), size.rows)
    held = _usable(data, model.lookback, "validation")
    held = _part(held, max(1, len(held) * size.rows // max(whole.rows, 1)))
    (train, w_train), (held, w_held) = weighted(data, train), weighted(data, held)
    rows, seen = (take(train), take(held)), _Scale()
    before, began = _reset_peak(), time.perf_counter()
    model.fit(
        rows[0], data.y[train], w_train, validation=(rows[1], data.y[held], w_held), limits=turns, checkpoints=seen
    )
    seconds, memory = time.perf_counter() - began, _peak() - before
    return Cost(seconds, max(0, memory), len(encode_state(model.get_state())), _SLOTS * seen.bytes)


class _Scale:
    """Stands where checkpoints would, and weighs them."""

    bytes = 0

    def due(self) -> bool:
        return False

    def due_in(self) -> float:
        return float("inf")

    def load(self) -> None:
        return None

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> None:
        if force:
            self.bytes = max(self.bytes, lay_out(state).size)


def work_of(name: str, size: Size) -> float:
    return float(size.rows * size.turns if spec_of(name).windowed else size.turns)


def _usable(data: Dataset, lookback: int, split: str) -> np.ndarray:
    rows = data.splits[split]
    return rows[data.usable(lookback)[rows]]


def _part(rows: np.ndarray, count: int) -> np.ndarray:
    return rows if count >= len(rows) else contiguous_blocks(rows, count)


def _free_memory() -> float:
    """Bytes of memory that a process may still take; infinite where the system does not say."""
    told = _proc("meminfo", "MemAvailable:")
    return np.inf if told is None else told


def _reset_peak() -> int:
    """Bytes in use now; the peak counts from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _proc("self/status", "VmRSS:") or 0


def _peak() -> int:
    return _proc("self/status", "VmHWM:") or 0


def _proc(name: str, field: str) -> int | None:
    try:
        line = next(line for line in Path("/proc", name).read_text().splitlines() if line.startswith(field))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024
