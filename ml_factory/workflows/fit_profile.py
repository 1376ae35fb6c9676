"""Profile of a training: a table and a flame graph of where its time is spent, without a change of what is trained.

A booster, or the linear model, runs under cProfile from its begin to its end. A network's steps run under torch's
profiler, since its time is in operations and not in Python's functions: so many steps after the first ones, which
compile and allocate. A longer record would fill the memory.
"""

import cProfile
import pstats
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.errors import FactoryError
from ml_factory.evaluation.flame_graph import FlameBox, flame_graph_svg
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import find_model_spec
from ml_factory.progress import ProgressPhase, report_progress_to
from ml_factory.storage.files import files

torch_profiler = LazyModule("torch.profiler")

FOLDER, TABLE, GRAPH = "profile", "table.csv", "flame_graph.svg"  # in the run's folder
WARM_UP_STEPS, PROFILED_STEPS = 3, 40
_SHOWN = 3  # names in the sentence
_SMALLEST_SHARE, _DEEPEST = 0.001, 60  # of a flame graph's boxes
_BETWEEN = "between operations: Python and input"


@dataclass
class FitProfile:
    """Profile of one training.

    table : a row per function or operation, by its own seconds: calls, seconds (its own), total_seconds, share.
    what : what was recorded, in words.
    """

    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    root: FlameBox = field(default_factory=lambda: FlameBox("training"))
    what: str = ""

    def sentence(self) -> str:
        """Return where time is spent, in a line."""
        top = ", ".join(f"{row.share:.0%} {name}" for name, row in self.table.head(_SHOWN).iterrows())
        return f"time: {top} (of {self.root.seconds:.1f} s, {self.what})"


def write_fit_profile(profile: FitProfile | None, run_folder: Path) -> dict[str, Any]:
    """Write table and flame graph into the run's folder; return the fields of a `TrainResult`.

    profile : None where nothing was trained.
    """
    if profile is None or profile.table.empty:
        return {"time_line": "time: not profiled, since no step was trained; open a new run with --fresh"}
    path = run_folder / FOLDER
    files.write(path / TABLE, profile.table.to_csv(lineterminator="\n").encode())
    files.write(path / GRAPH, flame_graph_svg(profile.root, profile.sentence()).encode())
    return {"profile": profile.table.reset_index(), "profile_path": path, "time_line": profile.sentence()}


@contextmanager
def profile_fit(model: str) -> Iterator[FitProfile]:
    """Profile the training of this model inside the `with`; the profile is filled at its end."""
    profile = FitProfile()
    with _profile_steps(profile) if find_model_spec(model).windowed else _profile_calls(profile):
        yield profile


# ---------------------------------------------------------------------- functions, by cProfile


@contextmanager
def _profile_calls(profile: FitProfile) -> Iterator[None]:
    recorder = cProfile.Profile()
    try:
        recorder.enable()
    except ValueError as error:
        next_step = "run without the debugger, the coverage or the other profiler, or without --profile"
        raise FactoryError("Another profiler is active", where="--profile", got=error, next_step=next_step) from error
    try:
        yield
    finally:
        recorder.disable()
    stats: Mapping[tuple, tuple] = pstats.Stats(recorder).stats  # type: ignore[attr-defined]
    rows = [(_function_name(one), calls, own, total) for one, (_, calls, own, total, _) in stats.items()]
    profile.table, profile.what = _table("function", rows), "under cProfile, which slows Python's own calls"
    profile.root = _calls_to_boxes(stats)


def _function_name(function: tuple[str, int, str]) -> str:
    """Return "name (package/file.py:12)"; of a built-in function its name."""
    file, line, name = function
    return name if file == "~" else f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})"


def _calls_to_boxes(stats: Mapping[tuple, tuple]) -> FlameBox:
    """Return the boxes below one root.

    cProfile knows who called whom, and not the whole chain: a function's time by one caller is divided among that
    caller's own callers by their shares.
    """
    called: dict[tuple, list[tuple[tuple, float]]] = {}
    for function, (*_, callers) in stats.items():
        for caller, (*_, total) in callers.items():
            called.setdefault(caller, []).append((function, total))
    by_others = {one: sum(total for *_, total in callers.values()) for one, (*_, callers) in stats.items()}
    first = {one: max(0.0, stats[one][3] - seconds) for one, seconds in by_others.items()}  # called from outside
    root = FlameBox("training", sum(first.values()))

    def add(box: FlameBox, function: tuple, seconds: float, chain: tuple) -> None:
        inner = box.child(_function_name(function))
        inner.seconds += seconds
        share = seconds / stats[function][3] if stats[function][3] else 0.0
        for one, total in called.get(function, ()):
            if one not in chain and len(chain) < _DEEPEST and total * share > root.seconds * _SMALLEST_SHARE:
                add(inner, one, total * share, (*chain, one))

    for one, seconds in first.items():
        if seconds > root.seconds * _SMALLEST_SHARE:
            add(root, one, seconds, (one,))
    return root


# ---------------------------------------------------------------------- operations, by torch's profiler


@contextmanager
def _profile_steps(profile: FitProfile) -> Iterator[None]:
    recorder = _StepRecorder()
    try:
        with report_progress_to(recorder.follow):
            yield
    finally:
        recorder.stop()
    if recorder.record is not None:
        profile.root = _events_to_boxes(recorder.record.events(), recorder.seconds)
        between = profile.root.child(_BETWEEN).seconds
        events = recorder.record.key_averages()
        rows = [(one.key, one.count, *_own_and_total_seconds(one)) for one in events]
        profile.table = _table("operation", [*rows, (_BETWEEN, recorder.steps, between, between)])
        profile.what = f"{recorder.steps} steps under torch's profiler"


class _StepRecorder:
    """Records some steps of a training, which reports each of its steps as progress, from within its own thread."""

    def __init__(self) -> None:
        self.record: Any = None
        self.seconds, self.steps = 0.0, 0
        self._passed, self._began = 0, 0.0

    def follow(self, phase: ProgressPhase) -> None:
        if phase.name != "training" or self.seconds:
            return
        self._passed += 0 if phase.over or phase.done == phase.start else 1
        if self.record is not None:
            self.steps = self._passed - WARM_UP_STEPS
            if phase.over or self.steps == PROFILED_STEPS:
                self.stop()
        elif self._passed == WARM_UP_STEPS and not phase.over:
            self.record = torch_profiler.profile()
            self.record.start()
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self.record is not None and not self.seconds:
            self.seconds = time.perf_counter() - self._began
            self.record.stop()


def _own_and_total_seconds(event: Any) -> tuple[float, float]:
    """Return the seconds of an operation on the processor, or of a kernel on its accelerator.

    An operation also carries the time of the kernels that it started, which have rows of their own.
    """
    where = "cpu" if str(event.device_type).endswith("CPU") else "device"
    return tuple(getattr(event, f"{form}{where}_time_total", 0.0) / 1e6 for form in ("self_", ""))


def _events_to_boxes(events: Any, seconds: float) -> FlameBox:
    """Return the operations of the processor as boxes, with what is between them."""
    root = FlameBox("steps", seconds)

    def add(box: FlameBox, event: Any) -> None:
        inner = box.child(event.name)
        inner.seconds += event.cpu_time_total / 1e6
        for one in event.cpu_children:
            add(inner, one)

    for event in events:
        if event.cpu_parent is None and event.cpu_time_total > 0.0:
            add(root, event)
    root.child(_BETWEEN).seconds = max(0.0, seconds - sum(one.seconds for one in root.below.values()))
    return root


def _table(what: str, rows: list[tuple[str, int, float, float]]) -> pd.DataFrame:
    """Return a row per name: calls, seconds, total_seconds, share of all own seconds; the longest first."""
    table = pd.DataFrame(rows, columns=[what, "calls", "seconds", "total_seconds"]).groupby(what).sum()
    table["share"] = table["seconds"] / max(table["seconds"].sum(), 1e-12)
    return table.sort_values(["seconds", "calls"], ascending=False)
