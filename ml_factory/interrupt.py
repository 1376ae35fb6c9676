"""Ctrl-C and SIGTERM on the command line: one line with the command that continues, and the usual exit code."""

import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

# Verbs that resume where they were interrupted; the others start again.
_RESUMED = ("prepare", "train", "cross-validate", "stack", "auto", "distribute", "suite", "run",
            "audit", *(f"recipe {name}" for name in ("resnet50", "sdce", "t5", "compress")))  # fmt: skip


class Interrupted(SystemExit):
    """The process was interrupted. The exit code is 128 + the signal's number, as in shells: 130 or 143."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread on SIGINT and SIGTERM inside the block; restore the handlers afterwards.

    A signal that this process was started to ignore stays ignored. A training that handles the signals itself
    (`checkpoints.stop_signals`) saves first and then lets them act.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
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
    raise Interrupted(number)
