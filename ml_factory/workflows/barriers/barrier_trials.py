"""Barrier search with checkpoints: trials survive a kill, and a finished search is read from its file."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ml_factory.checkpoints.phase import PhaseCheckpoints
from ml_factory.data.io import load_bars
from ml_factory.data.resample import ResampledBars, resample_bars, resample_minute_bars_for_labels
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import WorkspaceError, refuse_damaged_content
from ml_factory.run_folder import machine_and_library_versions
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search import search_barriers_on_training_rows
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.workflows.prove import stored_data_settings
from ml_factory.workflows.unit_checkpoints import UnitCheckpoints

_log = logging.getLogger("ml_factory")
Frames = tuple[ResampledBars, ResampledBars | None, MarketSpec]


def load_barrier_trial_frames(workspace: Workspace, store: DatasetStore) -> Frames:
    """Return the base frame, the raw bars as a frame (None where they are the base bars) and the market of a data
    set.
    """
    settings, market = stored_data_settings(store), MarketSpec.from_dict(store.facts["market"])
    bars, _ = load_bars(workspace, store.facts["symbol"], settings.bars, market=market)
    base = settings.features.base_minutes
    return resample_bars(bars, market, base), resample_minute_bars_for_labels(bars, market, base), market


@dataclass(frozen=True)
class _BarrierTrialsOutcome:
    """Result of a search.

    spec : the label spec found.
    record : every trial, as of `search_barriers`.
    resumed : number of trials that an earlier session had finished.
    nondeterminism : differences between the machines that ran the trials.
    """

    spec: SearchedLabelSpec
    record: dict
    resumed: int
    nondeterminism: list[str]


def run_barrier_trials(
    checkpoints: PhaseCheckpoints, frames: Frames, train: pd.DatetimeIndex, evaluated: pd.DatetimeIndex,
    spec: BarrierSearchSpec, *, results_path: Path, done: Callable[[int], None] = lambda count: None,
) -> _BarrierTrialsOutcome:  # fmt: skip
    """Run `search_barriers` with its record in a phase of checkpoints.

    frames : base frame, raw bars (None where they are the base bars), and the market.
    train, evaluated : known_at of the training rows, and of the rows that a training label must not reach.
    results_path : file that keeps the record of a finished search and is read instead of searching again. The slots of
        the checkpoints are released then.
    """
    if files.is_file(results_path):
        what, step = "This record of a search is damaged", "delete it and search again"
        with refuse_damaged_content(WorkspaceError, what, where=results_path, next_step=step):
            stored = files.read_json(results_path)
            record, count = stored["record"], len(stored["record"]["trials"])
            done(count)
            found = search_barriers_on_training_rows(*frames, train, spec, evaluated=evaluated, record=record)
            return _BarrierTrialsOutcome(found, record, count, [str(one) for one in stored["elsewhere"]])
    machine = machine_and_library_versions(("optuna",), 1)
    checkpoint = UnitCheckpoints(
        checkpoints, machine, lambda record: format_trial_progress(len(record["trials"]), spec)
    )
    with checkpoints.acquired():
        before = (checkpoint.load() or {"state": None})["state"]
        recorder = _TrialRecorder(checkpoint, before, done)
        try:
            found = search_barriers_on_training_rows(
                *frames, train, spec, evaluated=evaluated, record=before, save=recorder.save
            )
        finally:
            recorder.flush()  # also after a failure: an impossible balance is not searched twice
            if recorder.record is not None and len(recorder.record["trials"]) == spec.trials:
                _release_slots(
                    checkpoints, results_path, {"record": recorder.record, "elsewhere": checkpoint.machine_differences}
                )
    return _BarrierTrialsOutcome(
        found, recorder.record, len(before["trials"]) if before else 0, checkpoint.machine_differences
    )


def format_trial_progress(done: int, spec: BarrierSearchSpec) -> str:
    """Format the progress of a search, such as "trial 3 of 40"."""
    return f"trial {done} of {spec.trials}"


def _release_slots(checkpoints: PhaseCheckpoints, results_path: Path, stored: dict) -> None:
    """Write the record of the finished search to its file and release the slots of its checkpoints."""
    try:
        files.write_json(results_path, stored)
    except WorkspaceError as error:
        _log.warning("The trials of this search stay in its checkpoints: %s", error)
        return
    checkpoints.release_slots()


class _TrialRecorder:
    """The record of the trials in a phase of checkpoints, saved when a save is due."""

    def __init__(self, checkpoints: UnitCheckpoints, record: dict | None, done: Callable[[int], None]):
        self.record, self._saved = record, record
        self._checkpoints, self._done = checkpoints, done
        done(len(record["trials"]) if record else 0)

    def save(self, record: dict) -> None:
        self.record = record
        self._done(1)
        if self._checkpoints.save(record):
            self._saved = record

    def flush(self) -> None:
        """Save the trials since the last save."""
        if self.record is not self._saved:
            self._checkpoints.save(self.record, force=True)
