"""A child process that runs requests with a deadline, and is killed when it stops responding.

An operation that may hang (on a mount) blocks its process, and no signal gets the process out. A small child therefore
does the work: it sends a sign of life after each operation, and a child that sends nothing for too long is killed and
abandoned, never waited for: one inside a dead mount ends when the kernel lets it.

    parent -> child   {…}
    child -> parent   {} while it works; then {"answer": …}
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml_factory.process_identity import process_id

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path[:0] = sys.argv[1].split('{sep}'); from {module} import serve; serve(*sys.argv[2:])"
_ALIVE_INTERVAL = 0.2  # seconds
_MAX_ABANDONED = 4
_PIECE = 1 << 20
_abandoned: list[tuple[str, subprocess.Popen]] = []  # (resource, child that no code waits for)


class WorkerUnavailableError(TimeoutError):
    """A child sent nothing in time, died, or cannot be started; the text holds the reason."""


class WorkerDiedError(WorkerUnavailableError):
    """A child ended in the middle of a request, killed or out of memory; nothing is known against its resource."""


def start_python_process(arguments: Sequence[object], **options: Any) -> subprocess.Popen:
    """Start a Python process that Ctrl-C does not reach, by default without a folder, standard input and output.

    arguments : of the interpreter.
    options : as of subprocess.Popen.
    """
    for entry in list(_abandoned):  # one by one: another thread may append
        if entry[1].poll() is not None:
            with suppress(ValueError):  # another thread removed it
                _abandoned.remove(entry)
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # A process group of its own, not a session, where its niceness would have no effect: the kernel shares the cores
    # among sessions first (autogroup).
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], process_group=0, **{"cwd": "/", **silent, **options}
    )


def abandon_worker_process(process: subprocess.Popen, resource: str) -> None:
    """Keep a child that no code waits for any more: inside a mount, the kernel ends a killed one only when the mount
    answers.
    """
    _abandoned.append((resource, process))
    _reap(process)


def _reap(process: subprocess.Popen) -> None:
    """Wait for the child in a thread, so that it never stays as a zombie, whatever ends it."""
    threading.Thread(target=process.wait, name="reaper", daemon=True).start()


def _wait_until_readable(descriptor: int, seconds: float) -> bool:
    """Wait until the descriptor can be read or its other end was closed; return False after `seconds`."""
    poll = select.poll()  # not select.select, which refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(seconds, 0.0)))


class WorkerProcess:
    """One child process, started with the first request and again after it was killed.

    Parameters
    ----------
    module : its `serve(channel, parent, *arguments)` runs in the child.
    arguments : passed to `serve` as text.
    stuck_in : resource that the child may hang in, such as a mount; no child is started while four for this resource
        hang.
    deadline : seconds without a sign of life after which the child is killed.
    paths : folders that the child imports from, in addition to the library's.

    One request at a time; a second thread waits for its turn.
    """

    def __init__(
        self, module: str, arguments: Sequence[object], stuck_in: str, deadline: float, paths: Sequence[str | Path] = ()
    ):
        self.deadline = deadline
        self._module, self._arguments, self._stuck_in = module, arguments, stuck_in
        self._paths = [_ROOT, *paths]
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._received, self._parent, self._closed = bytearray(), process_id(), False
        self._one_call = threading.Lock()

    def call(self, request: object) -> Any:
        """Send one request; return the answer.

        Raises WorkerUnavailableError, or WorkerDiedError; the next request then starts another child.
        """
        if not self._one_call.acquire(timeout=self.deadline):
            raise WorkerUnavailableError("an earlier request is still under way")
        try:
            if self._closed:
                raise WorkerUnavailableError("it was closed")
            if self._process is None or self._process.poll() is not None or self._parent != process_id():
                self._start_or_raise()
            try:
                self._channel.settimeout(self.deadline)
                self._channel.sendall(json.dumps(request).encode() + b"\n")
                return self._answer()
            except WorkerUnavailableError:
                self._kill()
                raise
            except OSError as error:
                self._kill()
                if isinstance(error, ConnectionError):
                    raise WorkerDiedError("the child process died") from error
                raise WorkerUnavailableError(error) from error
            except BaseException:  # a signal in the middle: the pending answer belongs to no request
                self._kill()
                raise
        finally:
            self._one_call.release()

    def _start_or_raise(self) -> None:
        """Start the child. Raises WorkerUnavailableError where the system has no process, memory or descriptor left."""
        try:
            self._start()
        except WorkerUnavailableError:
            raise
        except (OSError, RuntimeError) as error:
            self._kill()
            raise WorkerUnavailableError(f"a child process could not be started: {error}") from error

    def close(self) -> None:
        """End the child; one that does not respond is killed, never waited for."""
        if self._parent != process_id():  # made before a fork: the child is the parent's
            return
        self._closed = True
        if not self._one_call.acquire(timeout=0):  # a thread waits for its answer: the kill ends that wait
            if (process := self._process) is not None:
                process.kill()
            return
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._channel.close()  # an idle child ends by itself now
                self._process.wait(0.5)
        self._kill()
        self._one_call.release()

    __del__ = close

    def _answer(self) -> Any:
        """Return the next line that is not only a sign of life."""
        while True:
            while (end := self._received.find(b"\n")) < 0:
                if not _wait_until_readable(self._channel.fileno(), self.deadline):
                    raise WorkerUnavailableError(f"no answer for {self.deadline:g} s")
                more = self._channel.recv(_PIECE)
                if not more:
                    raise ConnectionResetError
                self._received += more
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            if line != b"{}":
                return json.loads(line)["answer"]

    def _start(self) -> None:
        """Start a child, unless too many earlier ones still hang."""
        hanging = sum(resource == self._stuck_in and child.poll() is None for resource, child in list(_abandoned))
        if hanging >= _MAX_ABANDONED:
            raise WorkerUnavailableError(f"{hanging} earlier requests still hang")
        if self._channel is not None:  # of a child that died between two requests, or of the process before a fork
            self._channel.close()
        self._channel, theirs = socket.socketpair()
        self._received, self._parent = bytearray(), process_id()
        start, paths = _START.format(sep=os.pathsep, module=self._module), os.pathsep.join(map(str, self._paths))
        with theirs:
            self._process = start_python_process(
                ["-I", "-S", "-c", start, paths, theirs.fileno(), os.getpid(), *self._arguments],
                pass_fds=[theirs.fileno()],
            )
        _reap(self._process)

    def _kill(self) -> None:
        """Kill the child and forget it."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None and process.poll() is None:
            process.kill()
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                _abandoned.append((self._stuck_in, process))


# ---------------------------------------------------------------------- the child's side


class WorkerParentConnection:
    """The child's end of the channel. It ends the process when the parent is gone: another process may own its
    files.
    """

    def __init__(self, channel: str, parent: str):
        self._socket, self._reported_at = socket.socket(fileno=int(channel)), 0.0
        threading.Thread(target=_exit_with_parent, args=(self._socket.fileno(), int(parent)), daemon=True).start()

    def alive(self) -> None:
        """Send a sign of life, at most once per _ALIVE_INTERVAL; cheap."""
        now = time.monotonic()
        if now - self._reported_at > _ALIVE_INTERVAL:
            self._reported_at = now
            self._socket.sendall(b"{}\n")

    def answer_requests(self, handle: Callable[[Any], object]) -> None:
        """Answer every request until the parent is gone."""
        with self._socket.makefile("rb") as requests:
            for line in requests:
                self._socket.sendall(json.dumps({"answer": handle(json.loads(line))}).encode() + b"\n")


def _exit_with_parent(channel: int, parent: int) -> None:
    poll = select.poll()
    poll.register(channel, 0)
    while not poll.poll(200) and os.getppid() == parent:
        pass
    os._exit(0)
