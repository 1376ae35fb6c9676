"""Heartbeat: a status line every few seconds during long work: phase, time, and, where known, total and time left."""

import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ml_factory.lazy_module import LazyModule
from ml_factory.progress import ProgressPhase, add_progress_watcher, format_duration, remove_progress_watcher

SECONDS = 4.0  # between two lines of a pipe
NOTEBOOK_SECONDS = (3.0, 1.0)  # until a cell's line appears, and between its updates
ipython, display_of = LazyModule("IPython"), LazyModule("IPython.display")


class Heartbeat:
    """Calls `write(line)` every `seconds` from its own thread, from `start` or `with` until `stop`.

    what : the work as a whole; its line includes the current phase.
    first : seconds until the first line.
    """

    def __init__(self, write: Callable[[str], None], what: str = "", *, seconds: float = SECONDS, first: float = 0.0):
        self.what, self._write, self._seconds, self._first = what, write, seconds, first or seconds
        self._phase: ProgressPhase | None = None
        self._ended = threading.Event()
        self._began = time.perf_counter()

    def start(self) -> "Heartbeat":
        self._began = time.perf_counter()
        add_progress_watcher(self._moved)
        # In the caller's context: a notebook's output then belongs to the cell that started it.
        target = contextvars.copy_context().run
        self._thread = threading.Thread(target=target, args=(self._beat,), name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop; no line is written after this."""
        self._ended.set()
        remove_progress_watcher(self._moved)
        self._thread.join()

    def __enter__(self) -> "Heartbeat":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def line(self) -> str:
        """Format work, phase, total and time left, and the seconds so far."""
        parts = [self.what] if self.what else []
        if self._phase is not None and not self._phase.over:
            parts.append(self._phase.line())
        return ", ".join([*(parts or ["working"]), f"{format_duration(time.perf_counter() - self._began)} so far"])

    def _moved(self, phase: ProgressPhase) -> None:
        self._phase = phase

    def _beat(self) -> None:
        pause = self._first
        while not self._ended.wait(pause):
            self._write(self.line())
            pause = self._seconds


def is_interactive_notebook() -> bool:
    """Return True in an interactive notebook: Colab, Jupyter, VS Code; False under papermill or nbval."""
    known = ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME")  # set by Colab, and by a Jupyter server for its kernels
    shell = ipython.get_ipython()
    return any(name in os.environ for name in known) or "__vsc_ipynb_file__" in getattr(shell, "user_ns", ())


class CellHeartbeat:
    """One status line below every cell that takes longer than three seconds, updated once a second, removed at
    its end.
    """

    def __init__(self):
        self._line: Any = None
        self._heartbeat: Heartbeat | None = None

    def register(self, shell: Any) -> None:
        """Register from the next cell on; a second registration replaces the first."""
        before = getattr(shell, "ml_factory_heartbeat", None)
        for name, method in (("pre_run_cell", "begin"), ("post_run_cell", "end")):
            if before is not None:
                shell.events.unregister(name, getattr(before, method))
            shell.events.register(name, getattr(self, method))
        shell.ml_factory_heartbeat = self

    def begin(self, *_: object) -> None:
        self.end()
        first, seconds = NOTEBOOK_SECONDS
        self._heartbeat = Heartbeat(self._show, seconds=seconds, first=first).start()

    def end(self, *_: object) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            if self._line is not None:
                self._line.update({"text/plain": ""}, raw=True)
        self._heartbeat = self._line = None

    def _show(self, text: str) -> None:
        line = {"text/plain": text}
        if self._line is None:
            self._line = display_of.display(line, raw=True, display_id=True)
        else:
            self._line.update(line, raw=True)


def show_cell_heartbeat() -> None:
    """Show the heartbeat of long cells in an interactive notebook; a no-op elsewhere."""
    shell = ipython.get_ipython()
    if shell is not None and is_interactive_notebook():
        CellHeartbeat().register(shell)
