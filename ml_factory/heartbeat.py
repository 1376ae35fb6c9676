"""Heartbeat: a status line every few seconds during long work: phase, time, and, where known, total and time left."""

import contextvars
import os
import threading
import time
from collections.abc import Callable

from ml_factory.lazy_module import LazyModule
from ml_factory.progress import ProgressPhase, add_progress_watcher, remove_progress_watcher

SECONDS = 4.0  # between two lines of a pipe
ipython = LazyModule("IPython")


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


def is_interactive_notebook() -> bool:
    """Return True in an interactive notebook: Colab, Jupyter, VS Code; False under papermill or nbval."""
    known = ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME")  # set by Colab, and by a Jupyter server for its kernels
    shell = ipython.get_ipython()
    return any(name in os.environ for name in known) or "__vsc_ipynb_file__" in getattr(shell, "user_ns", ())
