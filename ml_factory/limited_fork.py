"""A call of another library tried in a fork of this process, with limits of time and memory, before it runs here."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.005
_STATUS = Path("/proc/self/status")


def signal_ending_fork(call: Callable[[], object], *, memory: int, cpu_seconds: int, seconds: float) -> str:
    """Return the name of the signal that ends the call in a fork of this process; "" where none does.

    An exception of the call counts as none: it comes again here. A fork that is still there after `seconds` counts as
    none too: a lock that another thread held may have kept it waiting.

    Parameters
    ----------
    memory : bytes that the call may take beyond what this process has.
    cpu_seconds : of all its threads together.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: this one runs the call alone
        child = os.fork()
    if child == 0:
        _run_and_exit(call, memory, cpu_seconds)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return signal.Signals(-code).name if code < 0 else ""
        time.sleep(_POLL_SECONDS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ""


def _run_and_exit(call: Callable[[], object], memory: int, cpu_seconds: int) -> None:
    """Run the call in the fork, silently; nothing of the parent's is flushed or closed."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV):
            signal.signal(number, signal.SIG_DFL)
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        with suppress(OSError, ValueError, StopIteration):
            pages = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmSize:"))
            most = int(pages.split()[1]) * 1024 + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        call()
    except BaseException:  # noqa: BLE001 - it comes again in the parent
        os._exit(1)
    os._exit(0)
