"""How far long work has come: told to whoever watches, silent otherwise.

The work says `with phase("features", rows) as done: … done(n)`; a watcher (the command line's bars, a result's table)
is a function of a Phase, called when it begins, moves and ends. A phase inside another is part of it, and not told.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from numba.core.event import Event, Listener, install_listener

Watcher = Callable[["Phase"], None]
_watchers: list[Watcher] = []
_inside: ContextVar[bool] = ContextVar("_inside", default=False)


@dataclass(eq=False)
class Phase:
    """One piece of long work.

    rows : in all; None where only the end tells.  done : so far.  of : what is counted, if not rows.
    seconds : since it began.  over : whether it ended.
    compiled : seconds of these in which kernels were compiled, which each machine does once.  compiling : it does now.
    """

    name: str
    rows: int | None
    done: int = 0
    seconds: float = 0.0
    over: bool = False
    compiled: float = 0.0
    compiling: bool = False
    of: str = "rows"

    @property
    def rate(self) -> float:
        """Rows a second so far."""
        return self.done / self.seconds if self.seconds > 0.0 else 0.0


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every phase until the block ends."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def record() -> Iterator[list[Phase]]:
    """The phases that end inside the block, in order."""
    ended = []
    with watch(lambda one: ended.append(one) if one.over else None):
        yield ended


@contextmanager
def phase(name: str, rows: int | None = None, *, of: str = "rows") -> Iterator[Callable[[int], None]]:
    """A phase of `rows` rows; the block calls what it is given with the number of rows just done."""
    if _inside.get():
        yield lambda count: None
        return
    told, began = Phase(name, None if rows is None else int(rows), of=of), time.perf_counter()

    def tell() -> None:
        told.seconds = time.perf_counter() - began
        for watcher in tuple(_watchers):
            watcher(told)

    def done(count: int) -> None:
        told.done += int(count)
        if told.rows is not None:
            told.done = min(told.done, told.rows)
        tell()

    outermost = _inside.set(True)
    tell()
    try:
        with install_listener("numba:compile", _Compilations(told, tell)):
            yield done
        told.rows = told.done = told.done if told.rows is None else told.rows
    finally:
        _inside.reset(outermost)
        told.over = True
        tell()


class _Compilations(Listener):
    """Keeps `compiling` and `compiled` of a phase; numba compiles one kernel at a time, and those it calls inside."""

    def __init__(self, told: Phase, tell: Callable[[], None]):
        self.told, self.tell, self.depth, self.began = told, tell, 0, 0.0

    def on_start(self, event: Event) -> None:
        self.depth += 1
        if self.depth == 1:
            self.began, self.told.compiling = time.perf_counter(), True
            self.tell()

    def on_end(self, event: Event) -> None:
        self.depth -= 1
        if not self.depth:
            self.told.compiled += time.perf_counter() - self.began
            self.told.compiling = False
            self.tell()
