"""Checkpoints of one unit of work, with its progress and the machines it ran on; the phase names of units."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.phase import PhaseCheckpoints
from ml_factory.models.base import ModelFitResult, describe_differences, merge_inexact_reasons
from ml_factory.run_folder import RunFolder
from ml_factory.tracking.tracker import Tracker

PROVENANCE_KEY = "carried"
FINISHED_PARTS = ("forecasts-*.state",)  # files of finished parts in a run's folder


class UnitCheckpoints:
    """Checkpoints of one unit: `due`, `load` and `save` of a phase, with the machines of its sessions in each state.

    machine : this machine, as of `run_folder.machine`.
    reached : function from a state to its progress in words.
    machine_differences : differences between the machines of the unit's sessions; kept once there are any.
    metrics : those of the checkpoint that was found, {} before `load` and where there was none.
    trained_on : as of `Estimator.trained_on`, for readers of the checkpoint alone.
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
        """Return the newest verified checkpoint, its state as the unit saved it."""
        found = self._checkpoints.load()
        if found is not None:
            provenance = found["state"].pop(PROVENANCE_KEY, None) or {"machine": self.machine, "elsewhere": []}
            differences = describe_differences(provenance["machine"], self.machine)
            self.record_machine_change([*provenance["elsewhere"], *differences])
            self.metrics = found["metrics"]
        return found

    def record_machine_change(self, reasons) -> None:
        """Record that a part was done on another machine."""
        self.machine_differences = merge_inexact_reasons(self.machine_differences, reasons)

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


class LoggedCheckpoints(UnitCheckpoints):
    """Checkpoints of a fit that are never ahead of its log: the log is put on the disk before each save.

    An epoch is saved before it is logged, so a run killed in between logs it first when it resumes.
    """

    def __init__(self, checkpoints: PhaseCheckpoints, machine: Mapping, tracker: Tracker, trained_on: Mapping):
        super().__init__(checkpoints, machine, format_fit_progress, trained_on)
        self._tracker = tracker

    def load(self) -> dict | None:
        found = super().load()
        if found is not None:
            self._tracker.log_missing(history_log_steps(unit_checkpoint_history(found["state"])))
        return found

    def save(self, state: Mapping, metrics: Mapping | None = None, force: bool = False) -> dict | None:
        if not force and not self.due():
            return None
        self._tracker.flush()
        return super().save(state, metrics=metrics, force=force)


class FoldCheckpoints:
    """Checkpoints of folds: an outer phase for the forecasts of finished folds, and one for the fit inside each fold.

    The checkpoints of a fold are deleted once its forecasts are in the outer checkpoint.
    model : its name.
    machine : this machine, as of `UnitCheckpoints`.
    """

    def __init__(self, manager: CheckpointManager, model: str, folds: int, machine: Mapping):
        self._manager, self._model, self._folds, self._machine = manager, model, folds, machine
        self._phase = manager.phase(folds_phase_name(model))
        self.outer = UnitCheckpoints(self._phase, self._machine, lambda state: f"fold {state['finished']} of {folds}")
        self._inner: dict[int, UnitCheckpoints] = {}
        self._released: set[int] = set()

    def fold_fit_checkpoints(self, fold: int) -> UnitCheckpoints:
        """Return the checkpoints of the fit inside a fold that begins now."""
        before = self._inner.keys() - self._released
        if before and self._phase.is_saved():
            for one in sorted(before):
                self._fit(one).remove_files()
            self._released.update(before)
        self._inner[fold] = UnitCheckpoints(self._fit(fold), self._machine, format_fit_progress)
        return self._inner[fold]

    def record_nondeterminism(self, fold: int, result: ModelFitResult) -> None:
        """Record the nondeterminism of a fold's fit."""
        self.outer.record_machine_change([*result.nondeterminism, *self._inner[fold].machine_differences])

    def release(self) -> None:
        """Delete all checkpoints: the forecasts of the folds are stored in a file."""
        for phase in (self._phase, *map(self._fit, range(self._folds))):
            phase.remove_files()

    @property
    def resumed(self) -> int:
        """Number of folds that an earlier session had finished."""
        return int(self.outer.metrics.get("finished", 0))

    @property
    def partial_progress(self) -> str:
        """Progress of the interrupted fit after those folds; "" where it starts now."""
        return str(self._inner[self.resumed].metrics.get("reached", "")) if self.resumed in self._inner else ""

    def _fit(self, fold: int) -> PhaseCheckpoints:
        return self._manager.phase(fold_fit_phase_name(self._model, fold))


def fit_phase_name(model: str) -> str:
    """Return the phase name of a model's fit."""
    return f"train_{model}"


def folds_phase_name(model: str) -> str:
    """Return the phase name of a model's folds: forecasts of the finished ones."""
    return f"folds_{model}"


def fold_fit_phase_name(model: str, fold: int) -> str:
    """Return the phase name of the fit inside one fold."""
    return f"{folds_phase_name(model)}_{fold}"


def fold_forecasts_path(run: RunFolder, model: str) -> Path:
    """Return the file of the forecasts of all finished folds."""
    return run.folder / f"forecasts-{model}.state"


def format_fold_progress(done: str, partial_progress: str) -> str:
    """Format the progress of folds from finished folds ("fold 1 of 3", "" without any) and the fit inside the next one.

    Returns "" where there is neither.
    """
    if not partial_progress:
        return done
    return f"{done}, {partial_progress} in the next" if done else f"{partial_progress} in the first fold"


def unit_checkpoint_history(state: Mapping) -> list[dict]:
    """Return the history of finished epochs or blocks in a model's state."""
    return list(state["history"] if "history" in state else state["memory"]["history"])


def history_log_steps(history: Sequence[dict]) -> list[tuple[int, dict]]:
    """Convert a fit's history to log entries: (epoch, metrics)."""
    return [(epoch["epoch"], {name: value for name, value in epoch.items() if name != "epoch"}) for epoch in history]


def format_fit_progress(state: Mapping) -> str:
    """Format the progress of a model's fit: "round 40", or "epoch 3, step 17"."""
    if "rounds" in state:
        return f"round {state['rounds']}"
    return f"epoch {len(unit_checkpoint_history(state))}, step {state['step']}"


def parse_fit_progress(reached: str) -> int:
    """Parse the rounds, or whole epochs, from the text of `format_fit_progress`; 0 for any other text."""
    found = re.match(r"(?:round|epoch) (\d+)", reached)
    return int(found[1]) if found else 0
