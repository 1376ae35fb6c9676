"""Slots whose every file operation happens in a child process, with deadlines.

A mount that hangs stops the process that asked it, and no signal gets it out. So that process is a small child: it
tells after each file operation that it lives, and one that falls silent is killed and left behind. The training sees
an error after the deadline and goes on; the interpreter ends without waiting for a child that the kernel will not let
go. What is to be written lies in shared memory or in a local file: nothing large passes the pipe.

    parent -> child   {"method": "copy_in", "args": [...]}
    child -> parent   {} while it works; then {"result": ...} or {"error": {...}}
"""

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import xxhash

from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.runs.leases import TakenOverError
from ml_factory.runs.pool import Lease, Pool, Unit
from ml_factory.runs.slots import Slots
from ml_factory.runs.storage import Disk

_ROOT = Path(__file__).resolve().parents[2]
_HASHES = Path(xxhash.__file__).resolve().parents[1]
_START = "import sys; sys.path[:0] = sys.argv[1:3]; from ml_factory.runs.mount_io import serve; serve(*sys.argv[3:])"
_TELL_EVERY = 0.2  # seconds
_ERRORS = {kind.__name__: kind for kind in (TakenOverError, CheckpointError, WorkspaceError)}
_MOST_ABANDONED = 4
_abandoned: list[subprocess.Popen] = []


class ChildSlots:
    """`Slots` of a folder that this process never touches itself.

    folder, lock, quota, lease : as `Pool` and `Slots` take them; the lock is on a local disk.
    memory : descriptor of the staging buffer that `write` reads.  deadline : seconds of silence after which a child is
    given up.  niceness : of the child, so that training keeps its cores.
    Methods raise what `Slots` raises, and WorkspaceError when the folder does not answer.
    """

    def __init__(
        self, folder: Path, lock: Path, lease: Lease, *, memory: int = -1, quota: int | None = None,
        deadline: float = 60, niceness: int = 14,
    ):  # fmt: skip
        self.folder, self.deadline, self._memory = Path(folder), deadline, memory
        told = {"folder": str(folder), "lock": str(lock), "quota": quota, "lease": lease.to_dict()}
        self._told, self._niceness = json.dumps(told | {"memory": memory}), niceness
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._heard, self._parent, self._closed = b"", os.getpid(), False
        self._one_call = threading.Lock()

    def write(self, unit: Unit, keep: int, info: dict, payload: memoryview) -> dict:
        return self._call("write", unit, keep, info, len(payload))

    def copy_in(self, unit: Unit, keep: int, source: str, fence: int = 0) -> dict:
        return self._call("copy_in", unit, keep, source, fence)

    def copy_out(self, unit: Unit, keep: int, home: str) -> list[str]:
        return self._call("copy_out", unit, keep, home)

    def told(self, unit: Unit) -> list[dict]:
        return self._call("told", unit)

    def units(self, run: str) -> list[str]:
        return self._call("units", run)

    def lease_of(self, unit: Unit) -> dict:
        return self._call("lease_of", unit)

    def renew(self, unit: Unit, told: dict) -> None:
        return self._call("renew", unit, told)

    def give_back(self, unit: Unit) -> int:
        return self._call("give_back", unit)

    def survey(self, unit: Unit) -> tuple[dict[Path, dict], dict[Path, Exception]]:
        good, bad = self._call("survey", unit)
        return {Path(one["path"]): one for one in good}, {Path(path): CheckpointError(why) for path, why in bad.items()}

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

    def _call(self, method: str, *args):
        """Raises WorkspaceError when nothing is heard for `deadline` seconds, or when the child dies."""
        if not self._one_call.acquire(timeout=self.deadline):
            raise self._silent("an earlier request is still under way")
        try:
            if self._closed:
                raise self._silent("it was let go")
            if self._process is None or self._process.poll() is not None or self._parent != os.getpid():
                self._start()
            plain = [[arg.run, arg.phase] if isinstance(arg, Unit) else arg for arg in args]
            try:
                self._channel.sendall(json.dumps({"method": method, "args": plain}).encode() + b"\n")
                answer = self._answer()
            except OSError as error:
                self._give_up()
                died = isinstance(error, ConnectionError)
                raise self._silent("the child process died" if died else error) from error
        finally:
            self._one_call.release()
        if "error" not in answer:
            return answer["result"]
        told = answer["error"]
        raise _ERRORS[told.pop("kind")](told.pop("what"), **told)

    def _answer(self) -> dict:
        """The next line that is not only a sign of life."""
        heard = time.monotonic()
        while True:
            line, found, rest = self._heard.partition(b"\n")
            if found:
                self._heard = rest
                if line != b"{}":
                    return json.loads(line)
                continue
            left = self.deadline - (time.monotonic() - heard)
            if left <= 0 or not select.select([self._channel], [], [], left)[0]:
                raise TimeoutError(f"no answer for {self.deadline:g} s")
            more = self._channel.recv(1 << 16)
            if not more:
                raise ConnectionResetError
            self._heard, heard = self._heard + more, time.monotonic()

    def _start(self) -> None:
        """Start a child, unless too many earlier ones are still stuck inside a mount that hangs."""
        _abandoned[:] = [process for process in _abandoned if _lives(process.pid)]
        if len(_abandoned) >= _MOST_ABANDONED:
            raise self._silent(f"{len(_abandoned)} earlier requests still hang")
        ours, theirs = socket.socketpair()
        self._heard, self._parent = b"", os.getpid()
        words = [sys.executable, "-I", "-S", "-c", _START, _ROOT, _HASHES, theirs.fileno(), self._told, os.getpid()]
        kept = [theirs.fileno(), *([self._memory] if self._memory >= 0 else [])]
        # A group of its own, so that Ctrl-C is not for it; not a session, where its niceness would count for nothing:
        # the kernel shares the cores among sessions first (autogroup).
        with theirs:
            self._process = subprocess.Popen(
                [str(word) for word in [*words, self._niceness]], pass_fds=kept, cwd="/", process_group=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._channel = ours

    def _give_up(self) -> None:
        """Kill the child and forget it: one inside a dead mount ends when the kernel lets it."""
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
                _abandoned.append(process)

    def _silent(self, why: object) -> WorkspaceError:
        return WorkspaceError(
            "This folder does not answer", where=self.folder, got=why,
            next_step="mount it again; until then checkpoints stay on the local disk",
        )  # fmt: skip


def _lives(pid: int) -> bool:
    """Whether a killed child is still there: inside a mount, the kernel lets it go only when the mount answers."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


# ---------------------------------------------------------------------- in the child


class _TellingDisk(Disk):
    """A disk that says after each operation that it came back."""

    def __init__(self, channel: socket.socket):
        self._channel, self._told = channel, 0.0

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def told(*args):
            result = method(*args)
            now = time.monotonic()
            if now - self._told > _TELL_EVERY:
                self._told = now
                self._channel.sendall(b"{}\n")
            return result

        return told


def serve(channel: str, told: str, parent: str, niceness: str) -> None:
    """Do what the parent asks until it is gone."""
    os.nice(int(niceness))
    link, given = socket.socket(fileno=int(channel)), json.loads(told)
    threading.Thread(target=_die_with, args=(link.fileno(), int(parent)), daemon=True).start()
    pool = Pool(Path(given["folder"]), _TellingDisk(link), lock=Path(given["lock"]), quota=given["quota"])
    slots = Slots(pool, Lease(**given["lease"]))
    for line in link.makefile("rb"):
        request = json.loads(line)
        try:
            answer = {"result": _do(slots, request["method"], request["args"], given["memory"])}
        except (CheckpointError, WorkspaceError, OSError) as error:
            answer = {"error": _facts(error)}
        link.sendall(json.dumps(answer).encode() + b"\n")


def _do(slots: Slots, method: str, args: list, memory: int):
    if method == "units":
        return slots.units(*args)
    unit, *rest = Unit(*args[0]), *args[1:]
    if method == "write":
        keep, info, size = rest
        return slots.write(unit, keep, info, _mapped(memory, os.fstat(memory).st_size)[:size])
    if method == "survey":
        good, bad = slots.survey(unit)
        return list(good.values()), {str(path): str(error) for path, error in bad.items()}
    return getattr(slots, method)(unit, *rest)


@lru_cache(maxsize=1)
def _mapped(memory: int, size: int) -> memoryview:
    """The staging buffer, mapped once: its pages need not be found again for the next save."""
    return memoryview(mmap.mmap(memory, size, access=mmap.ACCESS_READ))


def _facts(error: Exception) -> dict:
    """An error as JSON; `_call` makes it again."""
    if isinstance(error, OSError):
        return {"kind": "WorkspaceError", "what": f"The disk refused: {error}"}
    names = ("what", "where", "got", "wanted", "next_step")
    facts = {name: str(getattr(error, name)) for name in names if getattr(error, name) not in (None, "")}
    return {"kind": next(name for name, kind in _ERRORS.items() if isinstance(error, kind)), **facts}


def _die_with(channel: int, parent: int) -> None:
    """A child whose parent is gone writes no more: another process may own the slots already."""
    poll = select.poll()
    poll.register(channel, 0)
    while not poll.poll(200) and os.getppid() == parent:
        pass
    os._exit(0)
