"""SIGTERM and SIGINT as a flag: a training saves at its next step, then ends as the signal asks."""

import logging
import os
import signal
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("ml_factory")


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
