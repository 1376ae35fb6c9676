"""Slots whose every file operation happens in a child process, with deadlines.

The training sees an error after the deadline and goes on; the interpreter ends without waiting for a child that the
kernel will not let go (`children`). What is to be written lies in shared memory or in a local file: nothing large
passes the pipe.
"""

import json
import mmap
import os
from functools import lru_cache
from pathlib import Path

import xxhash

from ml_factory.checkpoints.leases import TakenOverError
from ml_factory.checkpoints.slot_pool import Pool, Unit, WriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.atomic_files import Disk
from ml_factory.storage.file_access import UnresponsiveMountError, mark_unresponsive, run_in_process
from ml_factory.storage.worker_process import ParentConnection, WorkerProcess, WorkerUnavailable

_HASHES = Path(xxhash.__file__).resolve().parents[1]
_SERVED_BY = __name__
_ERRORS = {kind.__name__: kind for kind in (TakenOverError, CheckpointError, WorkspaceError)}


class RemoteSlots(WorkerProcess):
    """`Slots` of a folder that this process never touches itself.

    folder, lock, quota, lease : as `Pool` and `Slots` take them; the lock is on a local disk.
    memory : descriptor of the staging buffer that `write` reads.  deadline : seconds of silence after which a child is
    given up.  niceness : of the child, so that training keeps its cores.
    Methods raise what `Slots` raises, and UnresponsiveMountError when the folder does not answer.
    """

    def __init__(
        self, folder: Path, lock: Path, lease: WriterId, *, memory: int = -1, quota: int | None = None,
        deadline: float = 60, niceness: int = 14,
    ):  # fmt: skip
        self.folder = Path(folder)
        told = {"folder": str(folder), "lock": str(lock), "quota": quota, "lease": lease.to_dict(), "memory": memory}
        shared = [memory] if memory >= 0 else []
        super().__init__(_SERVED_BY, [json.dumps(told), niceness], str(folder), deadline, shared, [_HASHES])

    def write(self, unit: Unit, keep: int, info: dict, payload: memoryview) -> dict:
        return self._call("write", unit, keep, info, len(payload))

    def copy_in(self, unit: Unit, keep: int, source: str, fence: int = 0) -> dict:
        return self._call("copy_in", unit, keep, source, fence)

    def copy_out(self, unit: Unit, keep: int, home: str) -> list[str]:
        return self._call("copy_out", unit, keep, home)

    def list_unverified(self, unit: Unit) -> list[dict]:
        return self._call("list_unverified", unit)

    def list_phases(self, run: str) -> list[str]:
        return self._call("list_phases", run)

    def list_trainings(self, phase: str) -> list[dict]:
        return self._call("list_trainings", phase)

    def read_lease(self, unit: Unit) -> dict:
        return self._call("read_lease", unit)

    def renew(self, unit: Unit, told: dict) -> None:
        return self._call("renew", unit, told)

    def release(self, unit: Unit, holder: dict | None = None) -> int:
        return self._call("release", unit, holder)

    def verify(self, path: str) -> dict:
        return self._call("verify", path)

    def _call(self, method: str, *args):
        plain = [[arg.run, arg.phase] if isinstance(arg, Unit) else arg for arg in args]
        try:
            answer, _ = self.call({"method": method, "args": plain})
        except WorkerUnavailable as error:
            mark_unresponsive(self.folder)
            raise UnresponsiveMountError(
                "This folder does not answer", where=self.folder, got=error,
                next_step="mount it again; until then checkpoints stay on the local disk",
            ) from error  # fmt: skip
        if "error" not in answer:
            return answer["result"]
        told = answer["error"]
        raise _ERRORS[told.pop("kind")](told.pop("what"), **told)


# ---------------------------------------------------------------------- in the child


class _TellingDisk(Disk):
    """A disk that says after each operation that it came back."""

    def __init__(self, link: ParentConnection):
        self._link = link

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def told(*args):
            result = method(*args)
            self._link.alive()
            return result

        return told


def serve(channel: str, parent: str, told: str, niceness: str) -> None:
    """Do what the parent asks until it is gone."""
    os.nice(int(niceness))
    link, given = ParentConnection(channel, parent), json.loads(told)
    run_in_process()
    pool = Pool(Path(given["folder"]), _TellingDisk(link), lock=Path(given["lock"]), quota=given["quota"])
    slots = Slots(pool, WriterId(**given["lease"]))

    def do(request: dict) -> tuple[dict, bytes]:
        try:
            return {"result": _do(slots, request["method"], request["args"], given["memory"])}, b""
        except (CheckpointError, WorkspaceError, OSError) as error:
            return {"error": _facts(error)}, b""

    link.answer_with(do)


def _do(slots: Slots, method: str, args: list, memory: int):
    if method in ("list_phases", "list_trainings", "verify"):
        return getattr(slots, method)(*args)
    unit, *rest = Unit(*args[0]), *args[1:]
    if method == "write":
        keep, info, size = rest
        return slots.write(unit, keep, info, _mapped(memory, os.fstat(memory).st_size)[:size])
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
