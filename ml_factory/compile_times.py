"""Record the time that numba spends compiling kernels during a phase."""

import time
from collections.abc import Callable
from typing import Protocol

from numba.core.event import Event, Listener, install_listener


class _CompileTimes(Protocol):
    """The recorded values: seconds of compiling so far, and whether it compiles now."""

    compiled: float
    compiling: bool


def record_compile_times(record: _CompileTimes, changed: Callable[[], None]):
    """Return a context in which `record` is updated; `changed` is called when compiling begins and ends."""
    return install_listener("numba:compile", _Compilations(record, changed))


class _Compilations(Listener):
    """Listener that updates `compiling` and `compiled`. Events nest: a kernel's includes those of the kernels it
    calls.
    """

    def __init__(self, record: _CompileTimes, changed: Callable[[], None]):
        self.record, self.changed, self.depth, self.began = record, changed, 0, 0.0

    def on_start(self, event: Event) -> None:
        self.depth += 1
        if self.depth == 1:
            self.began, self.record.compiling = time.perf_counter(), True
            self.changed()

    def on_end(self, event: Event) -> None:
        self.depth -= 1
        if not self.depth:
            self.record.compiled += time.perf_counter() - self.began
            self.record.compiling = False
            self.changed()
