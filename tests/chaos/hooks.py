"""Kill points: named functions of the library, wrapped from outside in the process that is to die.

The library knows nothing of this. A wrapper reports an event; the n-th event of one name since the first checkpoint is
the last thing the process does. Events and loaded checkpoints are lines of a file that survives the process.

    step block fold trial part judge stack   the work of the units between two saves
    save saved load                          a save begins, a save was handed over, a checkpoint was read
    chunk                                    in the middle of a write of a slot, in the process that writes it
    file placed                              before and after a file is renamed into place
"""

import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ml_factory.storage.files import Files
from tests.chaos import half_writes
from tests.chaos.death import die, note

Around = Callable[[Callable], Callable]
SECONDS_BETWEEN_MACHINES = 300.0


@dataclass(frozen=True)
class Kill:
    """Die at the n-th event of this name since the first checkpoint, counted from 1."""

    event: str
    n: int


class Hooks:
    """The events of one process.

    diary : the file its events go to.  kill : where it dies; None: nowhere.  secure : called at the first checkpoint.
    """

    def __init__(self, diary: Path, kill: Kill | None, secure: Callable[[], None]):
        self.diary, self.kill, self.secure, self.kept = diary, kill, secure, False
        self.count: Counter = Counter()

    def event(self, name: str) -> None:
        """Something happened; perhaps the last thing."""
        if not self.kept:
            return
        self.count[name] += 1
        if self.kill and (name, self.count[name]) == (self.kill.event, self.kill.n):
            note(self.diary, "killed", event=name, n=self.kill.n)
            die(os.getpid())

    def checkpoint(self, wait: Callable[[], object] = lambda: None) -> None:
        """There is a checkpoint, when `wait` returns: from now on a kill counts."""
        if not self.kept:
            wait()
            self.secure()
            self.kept = True

    def loaded(self, what: str, step: str) -> None:
        """The work goes on from something that was there."""
        note(self.diary, "loaded", phase=what, step=step)


def install(hooks: Hooks) -> None:
    """Wrap the library's points. Everything is imported by now."""
    _checkpoints(hooks)
    _files(hooks)
    _work(hooks)
    _kept_otherwise(hooks)
    if hooks.kill and hooks.kill.event == "chunk":
        half_writes.half_writes(hooks.kill.n, hooks.diary, lambda: die(os.getpid()))
        os.environ[half_writes.CHUNK_VARIABLE] = json.dumps({"n": hooks.kill.n, "diary": str(hooks.diary)})
        replace_constant("ml_factory.checkpoints.child_slots", "_SERVED_BY", half_writes.__name__)
        if hooks.kill.n % 2:  # small states are written by the process itself: here by its child, as large ones are
            replace_constant("ml_factory.checkpoints.save_writer", "_INLINE_BYTES", 0)


def run_on_new_machine(number: int) -> None:
    """Let leases see the machine of life `number`: another kernel, started five minutes after the one before.

    A session whose machine is lost comes back on another one, minutes later. Without this each life would wait three
    minutes of real time for the lease of the life before.
    """
    from ml_factory.checkpoints.leases import LeaseHolder

    def starts(init):
        return functools.partialmethod(init, now=lambda: time.time() + number * SECONDS_BETWEEN_MACHINES)

    LeaseHolder.__init__ = starts(LeaseHolder.__init__)
    wrap_everywhere("ml_factory.process_identity", "boot_id", lambda _: lambda: f"machine {number}")
    wrap_everywhere("ml_factory.checkpoints.leases", "clock_is_synchronized", lambda _: lambda: True)


def replace_constant(module: str, name: str, value: object) -> None:
    """Give a constant of a module another value; AttributeError where the module has no such constant."""
    getattr(sys.modules[module], name)
    setattr(sys.modules[module], name, value)


def wrap_everywhere(module: str, name: str, around: Around) -> None:
    """`around(function)` in the place of a function, in its module and wherever it was imported by name."""
    function = getattr(sys.modules[module], name)
    wrapper = functools.wraps(function)(around(function))
    for other in [one for key, one in sys.modules.items() if key.startswith("ml_factory")]:
        for key, value in list(vars(other).items()):
            if value is function:
                setattr(other, key, wrapper)


def wrap_method(cls: type, name: str, around: Around) -> None:
    """`around(method)` in the place of a method."""
    setattr(cls, name, functools.wraps(getattr(cls, name))(around(getattr(cls, name))))


def before(hooks: Hooks, name: str) -> Around:
    """Wrap a function: report the event, then run the function."""

    def around(function):
        def wrapped(*args, **kwargs):
            hooks.event(name)
            return function(*args, **kwargs)

        return wrapped

    return around


def step_of(state: dict) -> str:
    """Return the progress in a checkpoint's state, as its unit formats it."""
    for name, words in (("trials", "trial"), ("p", "fold"), ("step", "step"), ("rounds", "round")):
        if name in state:
            value = state[name]
            return f"{words} {len(value) if isinstance(value, list) else int(value)}"
    return "state"


def _checkpoints(hooks: Hooks) -> None:
    from ml_factory.checkpoints.phase import PhaseCheckpoints

    def saves(save):
        def wrapped(self, *args, **kwargs):
            hooks.event("save")
            found = save(self, *args, **kwargs)
            if found is not None:
                hooks.checkpoint(self.store.wait)
                hooks.event("saved")
            return found

        return wrapped

    def loads(load):
        def wrapped(self):
            found = load(self)
            if found is not None:
                hooks.loaded(self.name, step_of(found["state"]))
                hooks.checkpoint()
                hooks.event("load")
            return found

        return wrapped

    wrap_method(PhaseCheckpoints, "save", saves)
    wrap_method(PhaseCheckpoints, "load", loads)


def _files(hooks: Hooks) -> None:
    def replaced(replace):
        def wrapped(*args, **kwargs):
            hooks.event("file")
            found = replace(*args, **kwargs)
            hooks.event("placed")
            return found

        return wrapped

    wrap_method(Files, "replace", replaced)


def _work(hooks: Hooks) -> None:
    from ml_factory.datasets.store_writer import DatasetStoreWriter
    from ml_factory.models.tabular import TabularBlockTrainer
    from ml_factory.targets import barrier_search
    from ml_factory.training.sampler import BatchSampler

    wrap_method(BatchSampler, "positions", before(hooks, "step"))
    for kind in TabularBlockTrainer.__subclasses__():
        wrap_method(kind, "grow", before(hooks, "block"))
    wrap_method(barrier_search._View, "evaluate", before(hooks, "trial"))
    for name in ("write_features", "write_labels", "write_splits", "write_scaler"):
        wrap_method(DatasetStoreWriter, name, before(hooks, "part"))
    for event, module, name in (
        ("fold", "ensemble.out_of_fold", "inner_validation_split"),
        ("part", "leakage.proof", "prove_no_look_ahead"),
        ("judge", "inference.predict", "predict_features"),
        ("judge", "workflows.predictions", "write_prediction_frame"),
        ("judge", "evaluation.metrics", "compute_forecast_metrics"),
        ("judge", "evaluation.html_report", "write_html_report"),
        ("stack", "workflows.stack", "_calibration"),
        ("stack", "workflows.cross_validation.fold_schemes", "plan_folds"),
        ("stack", "workflows.prepared_dataset", "fit_dataset_preprocessing"),
        ("stack", "workflows.predictions", "uncalibrated_predictions"),
    ):
        wrap_everywhere(f"ml_factory.{module}", name, before(hooks, event))


def _kept_otherwise(hooks: Hooks) -> None:
    """Report progress outside checkpoints: a committed part of prepared data, and a finished model before its
    evaluation.
    """
    from ml_factory.datasets.store_writer import DatasetStoreWriter

    def commits(commit):
        def wrapped(*args, **kwargs):
            found = commit(*args, **kwargs)
            hooks.checkpoint()
            return found

        return wrapped

    def finds(find):
        def wrapped(*args):
            found = find(*args)
            if found is not None:
                hooks.loaded("prepared data", f"features, horizons {list(found.horizons)}")
                hooks.checkpoint()
            return found

        return wrapped

    def evaluates(judge):
        def wrapped(workspace, data, artifact):
            if not hooks.count["saved"]:
                hooks.loaded(artifact.name, "finished model")
            hooks.checkpoint()
            hooks.event("judge")
            return judge(workspace, data, artifact)

        return wrapped

    wrap_method(DatasetStoreWriter, "commit", commits)
    DatasetStoreWriter.find = finds(DatasetStoreWriter.find)
    wrap_everywhere("ml_factory.workflows.predictions", "predict_and_evaluate_artifact", evaluates)
