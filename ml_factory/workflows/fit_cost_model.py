"""Warm-up fits of a model, and the cost model of a whole fit: seconds, memory, space."""

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ml_factory.checkpoints.session_planner import WorkCost, WorkCostModel
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.models.registry import build_model, find_model_spec
from ml_factory.storage.serialization import plan_state_layout, serialize_state
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_input_reader,
    dataset_rows_with_weight,
    limit_training_rows,
    quick_row_limit,
)

# A network's warm-up: so many batches, and four times as many. A booster's: so many rounds, and three times as many.
_BATCHES, _ROUNDS = 12, 10
_SHARE = 30  # limits the warm-up of a small fit to about a fifth of it
SLOTS = 5  # of a unit's checkpoints at most: the last three, the best, the one being written


@dataclass(frozen=True)
class FitSize:
    """Size of a fit: training rows, and epochs or rounds."""

    rows: int
    iterations: int


def full_fit_size(data: PreparedDataset, name: str, settings: Mapping, seed: int, quick: bool) -> FitSize:
    """Return the size of a whole fit of this model."""
    model = build_model(name, seed=seed, **settings)
    rows, _ = limit_training_rows(_usable(data, model.lookback, "train"), quick_row_limit(name, quick))
    return FitSize(
        len(dataset_rows_with_weight(data, rows)[0]), getattr(model.settings, "epochs", 0) or model.settings.rounds
    )


def fit_cost_model(data: PreparedDataset, name: str, settings: Mapping, seed: int, whole: FitSize) -> WorkCostModel:
    """Run two short fits of different size on rows of a real one, and fit the cost model.

    A network's time grows with rows times epochs, so few rows are used; a booster's grows with rounds but starts with a
    pass over all rows, so all rows are used for few rounds.
    """
    if find_model_spec(name).windowed:
        batch = build_model(name, seed=seed, **settings).settings.batch
        least = max(1, min(_BATCHES, whole.rows * whole.iterations // (_SHARE * batch)))
        sizes = [FitSize(min(whole.rows, batch * count), 1) for count in (least, 4 * least)]
    else:
        sizes = [FitSize(whole.rows, min(whole.iterations, count)) for count in (_ROUNDS, 3 * _ROUNDS)]
    if sizes[0] == sizes[1]:
        sizes[0] = FitSize(max(1, sizes[0].rows // 2), sizes[0].iterations)
    measure_fit_cost(data, name, settings, seed, sizes[0], whole)  # libraries load and kernels compile on first use
    return WorkCostModel.fit(
        [(cost_model_work(name, size), measure_fit_cost(data, name, settings, seed, size, whole)) for size in sizes]
    )


def quick_cost_model(data: PreparedDataset, name: str, settings: Mapping, seed: int, whole: FitSize) -> WorkCostModel:
    """Run one short fit on few rows: for QUICK, whose fits are hardly longer than two that `fit_cost_model` compares.

    Loading the libraries counts as work here, so the forecast is high.
    """
    windowed = find_model_spec(name).windowed
    size = FitSize(min(whole.rows, 256 if windowed else 4096), min(whole.iterations, 1 if windowed else 4))
    cost = measure_fit_cost(data, name, settings, seed, size, whole)
    of_all = 1 if windowed else whole.rows / size.rows  # a booster's work is counted in rounds over all rows
    return WorkCostModel(replace(cost, seconds=0.0), WorkCost(of_all * cost.seconds / cost_model_work(name, size)))


def measure_fit_cost(
    data: PreparedDataset, name: str, settings: Mapping, seed: int, size: FitSize, whole: FitSize
) -> WorkCost:
    """Return the cost of a fit of this size on the training rows, with its share of the validation rows."""
    model = build_model(name, seed=seed, **settings)
    iterations = {"epochs": size.iterations, "rounds": size.iterations}
    take = dataset_input_reader(data, data.scaler, model)
    train = _part(_usable(data, model.lookback, "train"), size.rows)
    held = _usable(data, model.lookback, "validation")
    held = _part(held, max(1, len(held) * size.rows // max(whole.rows, 1)))
    (train, w_train), (held, w_held) = dataset_rows_with_weight(data, train), dataset_rows_with_weight(data, held)
    rows, seen = (take(train), take(held)), _CheckpointSizeRecorder()
    device = accelerator_of_model(name, settings)
    if device is not None:
        device.reset_peak_memory()
    before, began = _reset_peak(), time.perf_counter()
    model.fit(
        rows[0], data.y[train], w_train, validation=(rows[1], data.y[held], w_held), limits=iterations, checkpoints=seen
    )
    seconds, memory = time.perf_counter() - began, _peak() - before
    device_peak = (device.peak_memory_bytes() or 0) if device is not None else 0
    return WorkCost(seconds, max(0, memory), len(serialize_state(model.get_state())), SLOTS * seen.bytes, device_peak)


class _CheckpointSizeRecorder:
    """A stand-in for checkpoints that records the size of the final state."""

    bytes = 0

    def due(self) -> bool:
        return False

    def due_in(self) -> float:
        return float("inf")

    def load(self) -> None:
        return None

    def save(self, state: dict, metrics: dict | None = None, force: bool = False) -> None:
        if force:
            self.bytes = max(self.bytes, plan_state_layout(state).size)


def cost_model_work(name: str, size: FitSize) -> float:
    """Return the work of a fit in the unit its time grows with: rows of a network, rounds of a booster."""
    return float(size.rows * size.iterations if find_model_spec(name).windowed else size.iterations)


def _usable(data: PreparedDataset, lookback: int, split: str) -> np.ndarray:
    rows = data.splits[split]
    return rows[data.full_window_mask(lookback)[rows]]


def _part(rows: np.ndarray, count: int) -> np.ndarray:
    return rows if count >= len(rows) else sample_contiguous_blocks(rows, count)


def available_memory_bytes() -> float:
    """Return the bytes of memory that a process may still allocate; infinite where the system does not report them."""
    available = _proc("meminfo", "MemAvailable:")
    return np.inf if available is None else available


def _reset_peak() -> int:
    """Reset the peak memory and return the bytes in use."""
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


def accelerator_of_model(name: str, settings: Mapping):
    """Return the GPU or TPU a model trains on, None where that is the CPU."""
    if not find_model_spec(name).windowed:
        return None
    # torch comes with the networks only
    device = importlib.import_module("ml_factory.training.device").pick_device(build_model(name, **settings).settings)
    return None if device.kind == "cpu" else device
