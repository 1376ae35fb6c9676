"""Progress of long work, reported to registered watchers, and as a status line every few seconds.

The work runs in `with progress_phase("features", rows) as done: … done(n)`; a watcher (progress bars, a result's table)
is a function of a ProgressPhase, called when it begins, moves and ends. A phase inside another is part of it, and not
reported.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field

from ml_factory.lazy_module import LazyModule

numba_events = LazyModule("numba.core.event")

SECONDS = 4.0  # between two lines of a pipe

Watcher = Callable[["ProgressPhase"], None]
watchers: list[Watcher] = []  # which every phase is reported to
_inside: ContextVar[bool] = ContextVar("_inside", default=False)


@dataclass(eq=False)
class ProgressPhase:
    """One phase of long work.

    rows : total; None where it is unknown until the end.
    done : rows so far.
    of : unit of the count, if not rows.
    start : rows done before this session, which do not count for its rate.
    began : `perf_counter` at its begin.
    seconds : seconds since it began.
    over : True after its end.
    compiled : seconds of these in which kernels were compiled, once per machine.
    """

    name: str
    rows: int | None
    done: int = 0
    seconds: float = 0.0
    over: bool = False
    compiled: float = 0.0
    of: str = "rows"
    start: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> float:
        """Rows a second so far."""
        return (self.done - self.start) / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds left at the rate so far; None where the total is unknown or nothing is done yet."""
        if self.rows is None or self.done <= self.start:
            return None
        elapsed = self.seconds if self.over else time.perf_counter() - self.began
        return (self.rows - self.done) * elapsed / (self.done - self.start)

    def line(self) -> str:
        """Format name, count, total, rate and seconds left, where known."""
        count = f"{self.done:,} of {self.rows:,} {self.of}" if self.rows else f"{self.done:,} {self.of}"
        parts = [f"{self.name}: {count}" if self.rows or self.done else self.name]
        if self.rate >= 1.0:
            parts.append(f"{self.rate:,.0f} a second")
        if self.left:
            parts.append(f"{format_duration(self.left)} left")
        return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@contextmanager
def report_progress_to(watcher: Watcher) -> Iterator[None]:
    """Report every phase to `watcher` until the block ends."""
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


@contextmanager
def record_progress() -> Iterator[list[ProgressPhase]]:
    """Yield the list of phases that end inside the block, in order."""
    ended = []
    with report_progress_to(lambda one: ended.append(one) if one.over else None):
        yield ended


@contextmanager
def progress_phase(
    name: str, rows: int | None = None, *, of: str = "rows", start: int = 0
) -> Iterator[Callable[[int], None]]:
    """Run a phase of `rows` rows, `start` of them done before; yields a function that takes the number of rows just
    done.
    """
    if _inside.get():
        yield lambda count: None
        return
    current = ProgressPhase(name, None if rows is None else int(rows), done=start, of=of, start=start)

    def notify() -> None:
        current.seconds = time.perf_counter() - current.began
        for watcher in tuple(watchers):
            watcher(current)

    def done(count: int) -> None:
        current.done += int(count)
        if current.rows is not None:
            current.done = min(current.done, current.rows)
        notify()

    outermost = _inside.set(True)
    notify()
    try:
        with numba_events.install_timer("numba:compile", lambda seconds: setattr(current, "compiled", seconds)):
            yield done
        current.rows = current.done = current.done if current.rows is None else current.rows
    finally:
        _inside.reset(outermost)
        current.over = True
        notify()


class Heartbeat:
    """Calls `write(line)` every `seconds` from its own thread, from `start` or `with` until `stop`.

    what : the work as a whole; its line includes the current phase.
    first : seconds until the first line.

    Attribute `phase`: the last one that moved.
    """

    def __init__(self, write: Callable[[str], None], what: str = "", *, seconds: float = SECONDS, first: float = 0.0):
        self.what, self._write, self._seconds, self._first = what, write, seconds, first or seconds
        self.phase: ProgressPhase | None = None
        self._ended = threading.Event()
        self._began = time.perf_counter()

    def start(self) -> "Heartbeat":
        self._began = time.perf_counter()
        watchers.append(self._moved)
        # In the caller's context: a notebook's output then belongs to the cell that started it.
        target = copy_context().run
        self._thread = threading.Thread(target=target, args=(self._beat,), name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop; no line is written after this."""
        self._ended.set()
        watchers.remove(self._moved)
        self._thread.join()

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.stop()

    def line(self) -> str:
        """Format work, phase, total and time left, and the seconds so far."""
        parts = [self.what] if self.what else []
        if self.phase is not None and not self.phase.over:
            parts.append(self.phase.line())
        return ", ".join([*(parts or ["working"]), f"{time.perf_counter() - self._began:.0f} s so far"])

    def _moved(self, phase: ProgressPhase) -> None:
        self.phase = phase

    def _beat(self) -> None:
        pause = self._first
        while not self._ended.wait(pause):
            self._write(self.line())
            pause = self._seconds
