"""A search for barriers whose trials outlive a kill: kept as often as any training, and found again when it is over."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ml_factory.checkpoints.manager import PhaseCheckpoints
from ml_factory.data.activity_bars import base_and_minute_bars
from ml_factory.data.io import load_bars
from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import Store
from ml_factory.errors import WorkspaceError
from ml_factory.run_folder import machine_with
from ml_factory.storage.atomic_files import is_file, read_json, write_json
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search import search_barriers
from ml_factory.targets.barrier_search_spec import SearchedLabels, SearchSpec
from ml_factory.workflows.prove import settings_of
from ml_factory.workflows.unit_checkpoints import UnitCheckpoints

_log = logging.getLogger("ml_factory")
Frames = tuple[Frame, Frame | None, MarketSpec]


def frames_for(workspace: Workspace, store: Store) -> Frames:
    """The base frame, the raw bars as a frame (None where they are the base) and the market of a data set."""
    settings, market = settings_of(store), MarketSpec.from_dict(store.facts["market"])
    bars, _ = load_bars(workspace, store.facts["symbol"], settings.bars, market=market)
    return *base_and_minute_bars(bars, market, settings.features.base), market


@dataclass(frozen=True)
class SearchOutcome:
    """spec : the label spec found.  record : of every trial, as `search_barriers` gives it.  found : trials that were
    done before.  inexact : how machines that did some of them differ from this one."""

    spec: SearchedLabels
    record: dict
    resumed: int
    nondeterminism: list[str]


def checkpointed_search(
    checkpoints: PhaseCheckpoints, frames: Frames, train: pd.DatetimeIndex, evaluated: pd.DatetimeIndex,
    spec: SearchSpec, *, results_path: Path, done: Callable[[int], None] = lambda count: None,
) -> SearchOutcome:  # fmt: skip
    """`search_barriers` with its record in a phase of checkpoints.

    frames : base, raw bars (None where they are the base), and the market.  train, judged : known_at of the rows that
    teach, and of those that a label of theirs must not reach.
    keep : the file in which the record of a finished search stays, and is found again; the checkpoints' slots are given
    back then.
    """
    if is_file(results_path):
        stored = read_json(results_path)
        record, count = stored["record"], len(stored["record"]["trials"])
        done(count)
        found = search_barriers(*frames, train, spec, judged=evaluated, record=record)
        return SearchOutcome(found, record, count, stored["elsewhere"])
    machine = machine_with(("optuna",), 1)
    checkpoint = UnitCheckpoints(checkpoints, machine, lambda record: format_trial(len(record["trials"]), spec))
    with checkpoints.acquired():
        before = (checkpoint.load() or {"state": None})["state"]
        recorder = _TrialRecorder(checkpoint, before, done)
        try:
            found = search_barriers(*frames, train, spec, judged=evaluated, record=before, save=recorder.save)
        finally:
            recorder.flush()  # a balance that cannot be kept is not searched for twice either
            if recorder.record is not None and len(recorder.record["trials"]) == spec.trials:
                _release_slots(
                    checkpoints, results_path, {"record": recorder.record, "elsewhere": checkpoint.machine_differences}
                )
    return SearchOutcome(found, recorder.record, len(before["trials"]) if before else 0, checkpoint.machine_differences)


def format_trial(done: int, spec: SearchSpec) -> str:
    """How far a search is, in words."""
    return f"trial {done} of {spec.trials}"


def _release_slots(checkpoints: PhaseCheckpoints, results_path: Path, stored: dict) -> None:
    """The search is over: its record stays in a file, its slots serve others."""
    try:
        write_json(results_path, stored)
    except WorkspaceError as error:
        _log.warning("The trials of this search stay in its checkpoints: %s", error)
        return
    checkpoints.release_slots()


class _TrialRecorder:
    """The record of the trials in a phase of checkpoints, saved as often as any training."""

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
        """What the timer left unsaved."""
        if self.record is not self._saved:
            self._checkpoints.save(self.record, force=True)
