"""Background work: jobs in order on one daemon thread, one job on every core, and children that are not waited for."""

import logging
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ml_factory.errors import FactoryError
from ml_factory.process_identity import cores

_log = logging.getLogger("ml_factory")


class BackgroundThread:
    """A daemon thread that runs jobs in order, while there are any; `wait` returns when none is left.

    A job that fails is logged and stops no other job.
    """

    def __init__(self, name: str):
        self._name, self._working = name, False
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], object]) -> None:
        with self._changed:
            self._jobs.append(job)
        self._start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until every job is finished; return False after `seconds`."""
        self._start()  # jobs whose `submit` was interrupted
        with self._changed:
            return self._changed.wait_for(lambda: not (self._working or self._jobs), seconds)

    def _start(self) -> None:
        if not self._jobs or self._working:
            return
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:  # the process is ending, or has as many threads as it may have
            self._work()

    def _work(self) -> None:
        with self._changed:
            if self._working:  # another thread was started for the same jobs
                return
            self._working = True
        try:
            while job := self._next_job():
                try:
                    job()
                except FactoryError as error:
                    _log.warning("%s", error)
                except Exception:  # noqa: BLE001 - a thread that ends here would leave every later save unwritten
                    _log.exception("A job of the thread %s failed; it continues with the next", self._name)
        except BaseException:  # Ctrl-C, where jobs run in place
            with self._changed:
                self._working = False
                self._changed.notify_all()
            raise

    def _next_job(self) -> Callable[[], object] | None:
        """Return the next job; without one, end the work in the same moment."""
        with self._changed:
            if self._jobs:
                return self._jobs.popleft()
            self._working = False
            self._changed.notify_all()
            return None


def map_on_cores(work: Callable[[Any], Any], items: Iterable) -> list:
    """Return what `work` gives for each item, in order, by a thread for each core; work that releases Python's lock."""
    items = list(items)
    if min(cores(), len(items)) <= 1:
        return list(map(work, items))
    with ThreadPoolExecutor(cores()) as threads:
        return list(threads.map(work, items))


def start_python_process(arguments: Sequence[object], **options: Any) -> subprocess.Popen:
    """Start a Python process that Ctrl-C does not reach, by default without a folder, standard input and output.

    arguments : of the interpreter.
    options : as of subprocess.Popen.
    """
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # A process group of its own, not a session, where its niceness would have no effect: the kernel shares the cores
    # among sessions first (autogroup).
    child = subprocess.Popen(
        [sys.executable, *map(str, arguments)], process_group=0, **{"cwd": "/", **silent, **options}
    )
    threading.Thread(target=child.wait, name="reaper", daemon=True).start()  # so that it never stays as a zombie
    return child
