"""SIGTERM and SIGINT as a flag that a training honours at its next step: it saves, then ends as the signal asks."""

import logging
import os
import signal
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("ml_factory")


class StopFlag:
    """Handlers for the time in which somebody listens; those from before come back after it.

    asked : the signal that came, or None. A second one acts at once, as it would without us.
    """

    def __init__(self):
        self.requested: int | None = None
        self._before: dict[int, object] = {}
        self._listeners = 0

    def listen(self) -> None:
        """Pairs with `unlisten`. Handlers can be set by the main thread alone: with the first listener there."""
        self._listeners += 1
        if not self._before and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._heard)

    def unlisten(self) -> None:
        """The last one to leave puts the handlers back (from another thread: the next signal does, and then acts); one
        that nobody honoured yet acts now."""
        self._listeners = max(0, self._listeners - 1)
        if not self._listeners:
            self.resend_if_requested()
            self._put_back()

    def resend_if_requested(self) -> None:
        """Everything is saved: let the signal do what it does without us. Returns when none came."""
        asked, self.requested = self.requested, None
        if asked is not None:
            self._put_back()
            os.kill(os.getpid(), asked)

    def _heard(self, number: int, frame: object) -> None:
        if not self._listeners:
            self._put_back()
            os.kill(os.getpid(), number)
            return
        self.requested = number
        signal.signal(number, self._before.pop(number))
        _log.warning("%s: saving at the next step, then stopping; once more stops at once", signal.Signals(number).name)

    def _put_back(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._before:
                signal.signal(*self._before.popitem())


stop = StopFlag()
