"""How far long work has come: told to whoever watches, silent otherwise.

The work says `with phase("features", rows) as done: … done(n)`; a watcher (the command line's bar, a notebook's table)
is a function of a Phase, called when it begins, moves and ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Watcher = Callable[["Phase"], None]
_watchers: list[Watcher] = []


@dataclass
class Phase:
    """One piece of long work. rows : in all.  done : so far.  seconds : since it began.  over : whether it ended."""

    name: str
    rows: int
    done: int = 0
    seconds: float = 0.0
    over: bool = False

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
def phase(name: str, rows: int) -> Iterator[Callable[[int], None]]:
    """A phase of `rows` rows; the block calls what it is given with the number of rows just done."""
    told, began = Phase(name, int(rows)), time.perf_counter()

    def tell() -> None:
        told.seconds = time.perf_counter() - began
        for watcher in tuple(_watchers):
            watcher(told)

    def done(count: int) -> None:
        told.done = min(told.done + int(count), told.rows)
        tell()

    tell()
    try:
        yield done
        told.done = told.rows
    finally:
        told.over = True
        tell()
