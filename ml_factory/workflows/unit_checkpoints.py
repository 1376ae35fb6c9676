"""Checkpoints of one unit of work that also carry how far it is and the machines it has seen; the names of units."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ml_factory.checkpoints.manager import CheckpointManager, PhaseCheckpoints
from ml_factory.models.base import FitResult, differences, union
from ml_factory.run_folder import Run

PROVENANCE_KEY = "carried"
FINISHED_PARTS = ("forecasts-*.state", "trials-*.json")  # what finished parts of a run leave in its folder


class UnitCheckpoints:
    """A phase of checkpoints for one unit: the same `due`, `load` and `save`, and a mark that travels.

    here : this machine, as `run_folder.machine` tells it.  reached : state -> how far it is, in words.
    elsewhere : how machines that did a part of the unit differ from one another; once continued elsewhere, always so.
    metrics : those of the checkpoint that was found, {} before `load` and where there was none.
    trained_on : what the model is for, as of `Estimator.trained_on`, for whoever finds the checkpoint alone.
    """

    def __init__(
        self, checkpoints: PhaseCheckpoints, machine: Mapping, reached: Callable[[Mapping], str],
        trained_on: Mapping | None = None,
    ):  # fmt: skip
        self._checkpoints, self.machine, self._reached = checkpoints, dict(machine), reached
        self._trained_on = {"trained_on": dict(trained_on)} if trained_on else {}
        self.due, self.due_in = checkpoints.due, checkpoints.due_in
        self.machine_differences: list[str] = []
        self.metrics: dict = {}

    def load(self) -> dict | None:
        """The newest verified checkpoint, its state as the unit gave it."""
        found = self._checkpoints.load()
        if found is not None:
            provenance = found["state"].pop(PROVENANCE_KEY, None) or {"machine": self.machine, "elsewhere": []}
            self.mark([*provenance["elsewhere"], *differences(provenance["machine"], self.machine)])
            self.metrics = found["metrics"]
        return found

    def mark(self, reasons) -> None:
        """Remember that a part was done elsewhere."""
        self.machine_differences = union(self.machine_differences, reasons)

    def save(self, state: Mapping, metrics: Mapping | None = None, force: bool = False) -> dict | None:
        """Save when it is due, or with `force`; None when nothing was saved."""
        if not force and not self.due():
            return None
        provenance = {
            PROVENANCE_KEY: {"machine": self.machine, "elsewhere": self.machine_differences, **self._trained_on}
        }
        return self._checkpoints.save(
            {**state, **provenance}, metrics={**(metrics or {}), "reached": self._reached(state)}, force=force
        )


class FoldCheckpoints:
    """Checkpoints of folds: an outer phase for what finished ones forecast, one for the fit inside each.

    The slots of a fold serve the next ones as soon as its forecasts are in the outer checkpoint.
    model : its name.  here : this machine, as of `UnitCheckpoints`.
    """

    def __init__(self, manager: CheckpointManager, model: str, folds: int, machine: Mapping):
        self._manager, self._model, self._folds, self._machine = manager, model, folds, machine
        self._phase = manager.phase(folds_phase(model))
        self.outer = UnitCheckpoints(self._phase, self._machine, lambda state: f"fold {state['finished']} of {folds}")
        self._inner: dict[int, UnitCheckpoints] = {}
        self._released: set[int] = set()

    def of(self, fold: int) -> UnitCheckpoints:
        """Those of the fit inside a fold that begins now."""
        before = self._inner.keys() - self._released
        if before and self._phase.is_saved():
            for one in sorted(before):
                self._fit(one).release_slots()
            self._released.update(before)
        self._inner[fold] = UnitCheckpoints(self._fit(fold), self._machine, fit_progress)
        return self._inner[fold]

    def mark(self, fold: int, result: FitResult) -> None:
        """Remember what of a fold was done elsewhere."""
        self.outer.mark([*result.nondeterminism, *self._inner[fold].machine_differences])

    def release(self) -> None:
        """All of them: what the folds forecast is kept in another place."""
        for phase in (self._phase, *map(self._fit, range(self._folds))):
            phase.release_slots()

    @property
    def resumed(self) -> int:
        """How many folds were done before."""
        return int(self.outer.metrics.get("finished", 0))

    @property
    def partial_progress(self) -> str:
        """How far the fit of the fold after those was, in words; "" where it began now."""
        return str(self._inner[self.resumed].metrics.get("reached", "")) if self.resumed in self._inner else ""

    def _fit(self, fold: int) -> PhaseCheckpoints:
        return self._manager.phase(fold_phase(self._model, fold))


def fit_phase(model: str) -> str:
    """The name of the checkpoints of a model's fit."""
    return f"train_{model}"


def folds_phase(model: str) -> str:
    """The name of the checkpoints of a model's folds: what the finished ones forecast."""
    return f"folds_{model}"


def fold_phase(model: str, fold: int) -> str:
    """The name of the checkpoints of the fit inside one fold."""
    return f"{folds_phase(model)}_{fold}"


def forecasts_file(run: Run, model: str, fold: int | None = None) -> Path:
    """Where the forecasts of all folds stay, or of one nested fold, when they are done."""
    return run.folder / (f"forecasts-{model}.state" if fold is None else f"forecasts-{model}-{fold}.state")


def trials_file(run: Run, fold: int) -> Path:
    """Where the trials of one nested fold's search stay when they are done."""
    return run.folder / f"trials-{fold}.json"


def nested_run(run: Run, fold: int) -> Run:
    """The run under whose id one nested fold keeps its checkpoints."""
    return Run(f"{run.run_id}-fold{fold}", run.folder)


def format_progress(done: str, partial_progress: str) -> str:
    """How far folds are, in words: what is `done` ("fold 1 of 3", "" without any) and what was begun of the one after
    ("round 10"); "" where there is neither."""
    if not partial_progress:
        return done
    return f"{done}, {partial_progress} in the next" if done else f"{partial_progress} in the first fold"


def history_of(state: Mapping) -> list[dict]:
    """What a model's state says of the epochs or blocks that are over."""
    return list(state["history"] if "history" in state else state["memory"]["history"])


def fit_progress(state: Mapping) -> str:
    """How far a model's fit is: "round 40", or "epoch 3, step 17"."""
    if "rounds" in state:
        return f"round {state['rounds']}"
    return f"epoch {len(history_of(state))}, step {state['step']}"


def parse_progress(reached: str) -> int:
    """The rounds, or whole epochs, of what `fit_progress` says; 0 of anything else."""
    found = re.match(r"(?:round|epoch) (\d+)", reached)
    return int(found[1]) if found else 0
