"""Ctrl-C and SIGTERM: a training saves at its next step, then ends as the signal asks; on the command line one line has
the command that continues, and the exit code is the usual one.
"""

import logging
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("ml_factory")
# Verbs that resume where they were interrupted; the others start again.
_RESUMED = ("prepare", "train", "cross-validate", "stack", "auto", "distribute", "suite", "run",
            "audit", *(f"recipe {name}" for name in ("resnet50", "sdce", "t5", "compress")))  # fmt: skip


class Interrupted(SystemExit):
    """The process was interrupted. The exit code is 128 + the signal's number, as in shells: 130 or 143."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread on SIGINT and SIGTERM inside the block; restore the handlers afterwards.

    A signal that this process was started to ignore stays ignored. A training that handles the signals itself
    (`StopSignalFlag`) saves first and then lets them act.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_message(number: int, words: Sequence[str]) -> str:
    """Return the line printed on an interrupt; words : those of the command line after the program's name.

    --fresh is left out of the command: it would open another run instead of resuming this one.
    """
    command = shlex.join(["python", "-m", "ml_factory", *(word for word in words if word != "--fresh")])
    resumed = " ".join(words[: 2 if words[:1] == ["recipe"] else 1]) in _RESUMED
    what = "The same command resumes the run" if resumed else "The same command starts again"
    return f"interrupted by {signal.Signals(number).name}. {what}: {command}"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(128 + number)


class StopSignalFlag:
    """Signal handlers while a listener is registered; the earlier handlers are restored afterwards.

    Attributes
    ----------
    requested : number of the received signal, or None. A second signal acts at once, as it would without this flag.
    """

    def __init__(self):
        self.requested: int | None = None
        self._before: dict[int, object] = {}
        self._listeners = 0

    def listen(self) -> None:
        """Register a listener; each call pairs with `remove_listener`. Handlers are set by the first listener on the
        main thread.
        """
        self._listeners += 1
        if not self._before and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._on_signal)

    def remove_listener(self) -> None:
        """Unregister; the last listener restores the handlers. A signal that no step has honoured acts now."""
        self._listeners = max(0, self._listeners - 1)
        if not self._listeners:
            self.resend_if_requested()
            self._restore_handlers()

    def resend_if_requested(self) -> None:
        """Restore the handlers and send the received signal again, after everything is saved. Returns when none
        came.
        """
        number, self.requested = self.requested, None
        if number is not None:
            self._restore_handlers()
            os.kill(os.getpid(), number)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested = number
        signal.signal(number, self._before.pop(number))
        _log.warning(
            "%s: saving at the next step, then stopping; a second signal stops at once", signal.Signals(number).name
        )

    def _restore_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._before:
                signal.signal(*self._before.popitem())


stop = StopSignalFlag()
