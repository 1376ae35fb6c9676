"""Where a process may be killed: named points of the library, wrapped from outside in the process that is to die.

The library knows nothing of this. A wrapper tells of an event; the n-th event of one name since the first checkpoint
is the last thing the process does. Events and what was loaded are lines of a file that outlives the process.
"""

import functools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cloud import Cloud


@dataclass(frozen=True)
class Kill:
    """Die at the n-th event of this name, counted from 1; `early` counts those before the first checkpoint too."""

    event: str
    n: int
    early: bool = False


class Hooks:
    """The events of one process.

    diary : the file its events go to.  kill : where it dies; None: nowhere.  cloud : what receives written files.
    """

    def __init__(self, diary: Path, kill: Kill | None, cloud: Cloud | None = None):
        self.diary, self.kill, self.cloud, self.kept = diary, kill, cloud, False
        self.count: Counter = Counter()

    def event(self, name: str, last: Callable[[], None] = lambda: None, **facts) -> None:
        """Something happened; perhaps the last thing, after `last`."""
        if not (self.kept or (self.kill and self.kill.early)):
            return
        self.count[name] += 1
        if self.kill and (name, self.count[name]) == (self.kill.event, self.kill.n):
            last()
            self.write("killed", event=name, n=self.kill.n, **facts)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def checkpoint(self) -> None:
        """There is a checkpoint from here on: from now on a kill counts."""
        self.kept = True

    def written(self, path: object) -> None:
        """A file was written whole."""
        if self.cloud:
            self.cloud.written(path, self.kept)

    def write(self, what: str, **facts) -> None:
        with open(self.diary, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **facts}) + "\n")


def wrap_everywhere(module: str, name: str, around: Callable[[Callable], Callable]) -> None:
    """`around(function)` in the place of a function, in its module and wherever it was imported by name."""
    function = getattr(sys.modules[module], name)
    wrapper = functools.wraps(function)(around(function))
    for other in [one for key, one in sys.modules.items() if key.startswith("ml_factory")]:
        for key, value in list(vars(other).items()):
            if value is function:
                setattr(other, key, wrapper)


def wrap_method(cls: type, name: str, around: Callable[[Callable], Callable]) -> None:
    """`around(method)` in the place of a method."""
    setattr(cls, name, functools.wraps(getattr(cls, name))(around(getattr(cls, name))))


def before(hooks: Hooks, name: str) -> Callable[[Callable], Callable]:
    """A wrapper that tells of the event, then does the work."""

    def around(function):
        def wrapped(*args, **kwargs):
            hooks.event(name)
            return function(*args, **kwargs)

        return wrapped

    return around


def step_of(state: dict) -> str:
    """How far a checkpoint's state is, in the words of the unit it belongs to."""
    for name, words in (("trials", "trial"), ("p", "fold"), ("step", "step"), ("rounds", "round")):
        if name in state:
            value = state[name]
            return f"{words} {len(value) if isinstance(value, list) else int(value)}"
    return "state"


def install(hooks: Hooks) -> None:
    """Wrap the library's points. Everything is imported by now."""
    _saves(hooks)
    _loads(hooks)
    _files(hooks)
    _work(hooks)


def _saves(hooks: Hooks) -> None:
    """save: begins (values are copied next); chunk: a piece of a slot goes to disk; saved: it is there, verified."""
    from ml_factory.runs.checkpoints import PhaseCheckpoints

    def around(save):
        def wrapped(self, state, *args, **kwargs):
            hooks.event("save", phase=self.name)
            found = save(self, state, *args, **kwargs)
            if found is not None:
                hooks.checkpoint()
                hooks.event("saved", phase=self.name)
            return found

        return wrapped

    wrap_method(PhaseCheckpoints, "save", around)


def _loads(hooks: Hooks) -> None:
    """load: begins; loaded: the state is there and the work goes on from it."""
    from ml_factory.runs.checkpoints import PhaseCheckpoints

    def around(load):
        def wrapped(self):
            found = load(self)
            if found is not None:
                hooks.checkpoint()
                hooks.write("loaded", phase=self.name, sequence=found["sequence"], step=step_of(found["state"]))
                hooks.event("load", phase=self.name)
            return found

        return wrapped

    wrap_method(PhaseCheckpoints, "load", around)


def _files(hooks: Hooks) -> None:
    """chunk: in the middle of a slot; file: a file is about to be put in its place; placed: it was."""

    def torn(overwrite):
        def wrapped(path, parts):
            parts = [bytes(part) for part in parts]
            hooks.event("chunk", last=lambda: _half(path, b"".join(parts)))
            found = overwrite(path, parts)
            hooks.written(path)
            return found

        return wrapped

    def replaced(replace):
        def wrapped(path, *args, **kwargs):
            hooks.event("file", path=str(path))
            found = replace(path, *args, **kwargs)
            hooks.written(path)
            hooks.event("placed", path=str(path))
            return found

        return wrapped

    wrap_everywhere("ml_factory.runs.storage", "replace_file", replaced)
    wrap_everywhere("ml_factory.runs.storage", "overwrite_file", torn)


def _half(path: Path, data: bytes) -> None:
    """What a process that dies in the middle of overwriting a slot leaves there: the new first half, the old rest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.pwrite(descriptor, data[: len(data) // 2], 0)
    os.close(descriptor)


def _work(hooks: Hooks) -> None:
    """step, block, fold, trial, part, committed, judge, stack: what the units do between two saves."""
    from ml_factory.datasets.store import Store
    from ml_factory.models import tabular, tabular_catboost, tabular_lightgbm, tabular_xgboost
    from ml_factory.targets import barrier_search
    from ml_factory.training.loop import Order

    wrap_method(Order, "positions", before(hooks, "step"))
    for module in (tabular_catboost, tabular_lightgbm, tabular_xgboost):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, tabular.Grower) and kind is not tabular.Grower:
                wrap_method(kind, "grow", before(hooks, "block"))
    wrap_method(barrier_search._View, "judge", before(hooks, "trial"))
    wrap_everywhere("ml_factory.ensemble.out_of_fold", "inner_validation", before(hooks, "fold"))
    for name in ("write_features", "write_labels", "write_splits", "write_scaler"):
        wrap_method(Store, name, before(hooks, "part"))
    wrap_everywhere("ml_factory.leakage.proof", "prove", before(hooks, "part"))
    wrap_method(Store, "commit", _committed(hooks))
    wrap_everywhere("ml_factory.units.forecasts", "judge", _judged(hooks))
    for module, name in (
        ("inference.predict", "predict_features"), ("units.forecasts", "write_frame"),
        ("evaluation.metrics", "metrics_table"), ("evaluation.report", "write_report"),
    ):  # fmt: skip
        wrap_everywhere(f"ml_factory.{module}", name, before(hooks, "judge"))
    for module, name in (
        ("units.stacked", "_temperature"), ("units.folds", "fold_plan"), ("units.dataset", "fit_on"),
        ("units.forecasts", "uncalibrated"),
    ):  # fmt: skip
        wrap_everywhere(f"ml_factory.{module}", name, before(hooks, "stack"))


def _committed(hooks: Hooks) -> Callable[[Callable], Callable]:
    """A committed part of prepared data is a checkpoint of `prepare`."""

    def around(commit):
        def wrapped(self, *args, **kwargs):
            found = commit(self, *args, **kwargs)
            hooks.checkpoint()
            hooks.event("committed")
            return found

        return wrapped

    return around


def _judged(hooks: Hooks) -> Callable[[Callable], Callable]:
    """A finished model is a checkpoint of its evaluation."""

    def around(judge):
        def wrapped(workspace, data, artifact):
            if not hooks.count["saved"]:
                hooks.write("loaded", phase=artifact.name, sequence=artifact.sequence, step="finished model")
            hooks.checkpoint()
            hooks.event("judge")
            return judge(workspace, data, artifact)

        return wrapped

    return around
