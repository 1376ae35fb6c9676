"""A call of another library tried in a fork of this process, with limits of time and memory, before it runs here."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OUT_OF_MEMORY = "MemoryError"
_MEMORY_CODE = 3  # with which the fork ends
_POLL_SECONDS = 0.005
_STATUS = Path("/proc/self/status")
_ADDRESS_SPACE = 16 << 30  # bytes beyond what this process has: the limit where the kernel does not count written pages


def failure_in_fork(call: Callable[[], object], *, memory: int, cpu_seconds: int, seconds: float) -> str:
    """Return the name of the signal that ends the call in a fork of this process, OUT_OF_MEMORY where it would allocate
    more than `memory`; "" where it ends otherwise.

    Another exception of the call counts as no failure: the caller repeats the call and meets it. Nor does a fork that
    is still there after `seconds`: a lock that another thread held may have kept it waiting.

    Parameters
    ----------
    memory : bytes that the call may allocate beyond what this process has.
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
            return signal.Signals(-code).name if code < 0 else OUT_OF_MEMORY if code == _MEMORY_CODE else ""
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
        before = _memory()
        for name, limit, more in (
            ("VmData", resource.RLIMIT_DATA, memory), ("VmSize", resource.RLIMIT_AS, memory + _ADDRESS_SPACE)
        ):  # fmt: skip
            with suppress(OSError, ValueError, KeyError):  # a kernel that reports nothing, or refuses the limit
                resource.setrlimit(limit, (before[name] + more,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        call()
        if _memory().get("VmHWM", 0) > before.get("VmRSS", 0) + memory:  # an allocator may have reserved it before
            raise MemoryError
    except BaseException as error:  # noqa: BLE001 - the parent repeats the call and meets it
        os._exit(_MEMORY_CODE if isinstance(error, MemoryError) or "bad_alloc" in str(error) else 1)
    os._exit(0)


def _memory() -> dict[str, int]:
    """Return the bytes of this process by the kernel's names; {} where it reports nothing."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in _STATUS.read_text().splitlines() if line.endswith("kB"))
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    return {}
