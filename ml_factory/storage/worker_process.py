"""A child process that is asked, and given up on when it falls silent.

What may hang (a mount) stops the process that asked it, and no signal gets it out. So that process is a small child:
it says after each operation that it lives, and one that says nothing for too long is killed and left behind, never
waited for: one inside a dead mount ends when the kernel lets it.

    parent -> child   {…}
    child -> parent   {} while it works; then {"bytes": n, …} and n bytes
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

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path[:0] = sys.argv[1].split('{sep}'); from {module} import serve; serve(*sys.argv[2:])"
_TELL_EVERY = 0.2  # seconds
_MOST_ABANDONED = 4
_PIECE = 1 << 20
_abandoned: list[tuple[str, subprocess.Popen]] = []  # what they are stuck in, and they


class WorkerUnavailable(TimeoutError):
    """A child said nothing in time, died, or cannot be started; the text says which."""


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until something can be read from a descriptor, or it was closed at the other end; False after `seconds`."""
    poll = select.poll()  # not select.select, which refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(seconds, 0.0)))


class WorkerProcess:
    """One child process, started when it is first asked something and again after it was given up.

    module : whose `serve(channel, parent, *words)` the child runs.  stuck_in : what it may hang in; no child is started
    while four that asked the same still hang.  deadline : seconds of silence after which it is given up.
    descriptors : open files that it inherits.  paths : where it finds what it imports beside the library.
    One request at a time; a second thread waits for its turn.
    """

    def __init__(
        self, module: str, words: Sequence[object], stuck_in: str, deadline: float, descriptors: Sequence[int] = (),
        paths: Sequence[Path] = (),
    ):  # fmt: skip
        self.deadline = deadline
        self._module, self._words, self._stuck_in, self._descriptors = module, words, stuck_in, descriptors
        self._paths = [_ROOT, *paths]
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._heard, self._parent, self._closed = bytearray(), os.getpid(), False
        self._one_call = threading.Lock()

    def call(self, request: dict, deadline: float | None = None) -> tuple[dict, bytes]:
        """(the answer, the bytes behind it). Raises NoAnswer; then the next request has another child."""
        patience = self.deadline if deadline is None else deadline
        if not self._one_call.acquire(timeout=patience):
            raise WorkerUnavailable("an earlier request is still under way")
        try:
            if self._closed:
                raise WorkerUnavailable("it was let go")
            if self._process is None or self._process.poll() is not None or self._parent != os.getpid():
                self._start()
            try:
                self._channel.settimeout(patience)
                self._channel.sendall(json.dumps(request).encode() + b"\n")
                return self._answer(patience)
            except WorkerUnavailable:
                self._give_up()
                raise
            except OSError as error:
                self._give_up()
                raise WorkerUnavailable(
                    "the child process died" if isinstance(error, ConnectionError) else error
                ) from error
            except BaseException:  # a signal in the middle: the answer that is still to come is nobody's
                self._give_up()
                raise
        finally:
            self._one_call.release()

    def close(self) -> None:
        """Let the child go; one that does not answer is killed, never waited for."""
        if self._parent != os.getpid():  # made before a fork: the child is not ours
            return
        self._closed = True
        if not self._one_call.acquire(timeout=0):  # a thread waits for its answer: it hears that there is none
            if (process := self._process) is not None:
                process.kill()
            return
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._channel.close()  # an idle child ends by itself now
                self._process.wait(0.5)
        self._give_up()
        self._one_call.release()

    __del__ = close

    def _answer(self, patience: float) -> tuple[dict, bytes]:
        """The next line that is not only a sign of life, and the bytes behind it."""
        while (line := self._line(patience)) == b"{}":
            pass
        answer = json.loads(line)
        while len(self._heard) < answer["bytes"]:
            self._hear(patience)
        data = bytes(self._heard[: answer["bytes"]])
        del self._heard[: answer["bytes"]]
        return answer, data

    def _line(self, patience: float) -> bytes:
        while (end := self._heard.find(b"\n")) < 0:
            self._hear(patience)
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    def _hear(self, patience: float) -> None:
        if not readable(self._channel.fileno(), patience):
            raise WorkerUnavailable(f"no answer for {patience:g} s")
        more = self._channel.recv(_PIECE)
        if not more:
            raise ConnectionResetError
        self._heard += more

    def _start(self) -> None:
        """Start a child, unless too many earlier ones are still stuck."""
        _abandoned[:] = [(what, process) for what, process in _abandoned if _lives(process.pid)]
        stuck = sum(what == self._stuck_in for what, _ in _abandoned)
        if stuck >= _MOST_ABANDONED:
            raise WorkerUnavailable(f"{stuck} earlier requests still hang")
        ours, theirs = socket.socketpair()
        self._heard, self._parent = bytearray(), os.getpid()
        start, paths = _START.format(sep=os.pathsep, module=self._module), os.pathsep.join(map(str, self._paths))
        words = [sys.executable, "-I", "-S", "-c", start, paths, theirs.fileno(), os.getpid(), *self._words]
        # A group of its own, so that Ctrl-C is not for it; not a session, where its niceness would count for nothing:
        # the kernel shares the cores among sessions first (autogroup).
        with theirs:
            self._process = subprocess.Popen(
                [str(word) for word in words], pass_fds=[theirs.fileno(), *self._descriptors], cwd="/",
                process_group=0, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._channel = ours

    def _give_up(self) -> None:
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
                process.returncode = -9  # nobody waits for it any more, not even the interpreter's end
                _abandoned.append((self._stuck_in, process))


def _lives(pid: int) -> bool:
    """Whether a killed child is still there: inside a mount, the kernel lets it go only when the mount answers."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


# ---------------------------------------------------------------------- in the child


class ParentConnection:
    """The child's end of the line. It ends the process when the parent is gone: another one may own its files."""

    def __init__(self, channel: str, parent: str):
        self._socket, self._told = socket.socket(fileno=int(channel)), 0.0
        threading.Thread(target=_die_with, args=(self._socket.fileno(), int(parent)), daemon=True).start()

    def alive(self) -> None:
        """Say that the last operation came back; cheap."""
        now = time.monotonic()
        if now - self._told > _TELL_EVERY:
            self._told = now
            self._socket.sendall(b"{}\n")

    def answer_with(self, do: Callable[[dict], tuple[dict, bytes]]) -> None:
        """Answer every request until the parent is gone."""
        with self._socket.makefile("rb") as requests:
            for line in requests:
                answer, data = do(json.loads(line))
                self._socket.sendall(json.dumps({**answer, "bytes": len(data)}).encode() + b"\n")
                self._socket.sendall(data)


def _die_with(channel: int, parent: int) -> None:
    poll = select.poll()
    poll.register(channel, 0)
    while not poll.poll(200) and os.getppid() == parent:
        pass
    os._exit(0)
