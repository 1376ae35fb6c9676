"""Ctrl-C and SIGTERM: a training saves at its next step, then ends as the signal asks; on the command line one line has
the command that continues, and the exit code is the usual one.
"""

import logging
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("ml_factory")
# Verbs that resume where they were interrupted; the others start again.
_RESUMED = ("prepare", "train", "cross-validate", "stack", "auto", "distribute", "suite", "run",
            "audit", *(f"recipe {name}" for name in ("resnet50", "sdce", "t5", "compress")))  # fmt: skip
_NEVER_FRESH = ("prepare", "distribute", "run")  # of these, without an option --fresh
_FRESH = re.compile(r"\0(--fresh(=[^\0]*)?|-p[\0=]?FRESH=[^\0]*)(?=\0|$)")  # in words joined by NUL


class Interrupted(SystemExit):
    """The process was interrupted. The exit code is 128 + the signal's number, as in shells: 130 or 143."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread on SIGINT and SIGTERM inside the block; restore the handlers afterwards.

    A signal that this process was started to ignore stays ignored. A training that handles the signals itself
    (`StopSignalFlag`) saves first and then lets them act.
    """
    before = _replace_handlers(_interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_message(number: int, words: Sequence[str]) -> str:
    """Return the line printed on an interrupt; words : those of the command line after the program's name.

    The command is without --fresh and FRESH, which would open another run instead of resuming this one; a --config may
    have it.
    """
    verb = " ".join(words[: 2 if words[:1] == ["recipe"] else 1])
    again = _FRESH.sub("", "\0".join(["python", "-m", "ml_factory", *words])).split("\0")
    resumed = verb in _RESUMED
    if resumed and verb not in _NEVER_FRESH and any(word.startswith("--config") for word in words):
        again.append("--fresh=false")
    command = shlex.join(again)
    what = "The same command resumes the run" if resumed else "The same command starts again"
    return f"interrupted by {signal.Signals(number).name}. {what}: {command}"


def _replace_handlers(handler: Callable) -> dict[int, object]:
    """Set the handler of the signals that are not ignored, on the main thread; return those before, by number."""
    on_main = threading.current_thread() is threading.main_thread()
    numbers = [one for one in _SIGNALS if on_main and signal.getsignal(one) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in numbers}


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
        self._before = self._before or _replace_handlers(self._on_signal)

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
