"""Slots whose every file operation runs in a child process, with deadlines.

The training sees an error after the deadline and continues; the interpreter ends without waiting for a child that the
kernel will not end (`worker_process`). Payloads are in shared memory or in a local file: no large data passes the pipe.
"""

import json
import mmap
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.errors import CheckpointError, UnresponsiveMountError, WorkspaceError
from ml_factory.storage.files import files
from ml_factory.storage.worker_process import (
    WorkerDiedError,
    WorkerParentConnection,
    WorkerProcess,
    WorkerUnavailableError,
)

_HASHES = Path(xxhash.__file__).resolve().parents[1]
_SERVED_BY = __name__
LOCAL_DISK, MOUNT = "local disk", "mount"
_ERRORS = {kind.__name__: kind for kind in (LeaseTakenOverError, CheckpointError, WorkspaceError)}


class KilledChildError(UnresponsiveMountError):
    """The child was killed in the middle of an operation; its disk may be well, and the operation can be repeated."""


class ChildSlots(WorkerProcess):
    """`Slots` of a folder that this process never accesses itself.

    Parameters
    ----------
    folder, quota, lease : as of `SlotPool` and `Slots`.
    lock, lock_seconds : as of `SlotPool`; the lock is on a local disk.
    disk : what the folder is on, for messages: LOCAL_DISK or MOUNT.
    memory : descriptor of the staging buffer that `write` reads.
    deadline : seconds without a sign of life after which a child is killed.
    niceness : of the child, so that training keeps its cores.

    Methods raise what `Slots` raises, UnresponsiveMountError when the folder does not answer, and KilledChildError.
    """

    other_machines_write = True

    def __init__(
        self, folder: Path, lock: Path, lease: SlotWriterId, *, disk: str = MOUNT, memory: int = -1,
        quota: int | None = None, deadline: float = 60, lock_seconds: float | None = None, niceness: int = 14,
    ):  # fmt: skip
        self.folder, self.disk = Path(folder), disk
        options = {
            "folder": str(folder), "lock": str(lock), "lock_seconds": lock_seconds, "quota": quota, "memory": memory,
            "lease": lease.to_dict(),
        }  # fmt: skip
        descriptors = [memory] if memory >= 0 else []
        super().__init__(_SERVED_BY, [json.dumps(options), niceness], str(folder), deadline, descriptors, [_HASHES])

    def write(
        self, unit: CheckpointUnit, keep: int, info: dict, payload: memoryview, after: int = 0,
        deadline: float | None = None,
    ) -> dict:  # fmt: skip
        return self._call("write", unit, keep, info, len(payload), after, deadline=deadline)

    def copy_from_pool(self, unit: CheckpointUnit, keep: int, source: str, fence: int = 0) -> dict:
        return self._call("copy_from_pool", unit, keep, source, fence)

    def copy_to_pool(self, unit: CheckpointUnit, keep: int, home: str) -> list[str]:
        return self._call("copy_to_pool", unit, keep, home)

    def list_unverified(self, unit: CheckpointUnit) -> list[dict]:
        return self._call("list_unverified", unit)

    def list_phases(self, run: str) -> list[str]:
        return self._call("list_phases", run)

    def list_trainings(self, phase: str) -> list[dict]:
        return self._call("list_trainings", phase)

    def read_lease(self, unit: CheckpointUnit) -> dict:
        return self._call("read_lease", unit)

    def renew(self, unit: CheckpointUnit, record: dict) -> None:
        self._call("renew", unit, record)

    def release(self, unit: CheckpointUnit, holder: dict | None = None) -> None:
        self._call("release", unit, holder)

    def free_slot_bytes(self) -> int:
        return self._call("free_slot_bytes")

    def empty_free_slots(self) -> int:
        return self._call("empty_free_slots")

    def verify(self, path: str) -> dict:
        return self._call("verify", path)

    def _call(self, method: str, *args: object, deadline: float | None = None) -> Any:
        encoded = [[arg.run, arg.phase] if isinstance(arg, CheckpointUnit) else arg for arg in args]
        try:
            answer, _ = self.call({"method": method, "args": encoded}, deadline)
        except WorkerDiedError as error:
            raise KilledChildError(
                f"The process that works on the {self.disk} was killed", where=self.folder, got=error,
                next_step="free memory where it is killed again: the kernel ends processes when memory runs out",
            ) from error  # fmt: skip
        except WorkerUnavailableError as error:
            files.mark_unresponsive(self.folder)
            raise no_answer_error(self.disk, self.folder, error) from error
        if "error" not in answer:
            return answer["result"]
        error_fields = answer["error"]
        raise _ERRORS[error_fields.pop("kind")](error_fields.pop("what"), **error_fields)


def no_answer_error(disk: str, folder: Path, reason: object) -> UnresponsiveMountError:
    """Return the error for a disk (LOCAL_DISK or MOUNT) that does not answer."""
    step = "mount it again; until then checkpoints stay on the local disk"
    if disk == LOCAL_DISK:
        step = "check this disk of the machine; it is tried again"
    return UnresponsiveMountError(f"The {disk} does not answer", where=folder, got=reason, next_step=step)


# ---------------------------------------------------------------------- the child's side


class _ReportingDisk(Disk):
    """A disk that sends a sign of life after each operation."""

    def __init__(self, link: WorkerParentConnection):
        self._link = link

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def reporting(*args: object) -> Any:
            result = method(*args)
            self._link.alive()
            return result

        return reporting


def serve(channel: str, parent: str, settings: str, niceness: str) -> None:
    """Run the parent's requests until the parent is gone."""
    os.nice(int(niceness))
    link, options = WorkerParentConnection(channel, parent), json.loads(settings)
    files.run_in_process()
    pool = SlotPool(
        Path(options["folder"]), _ReportingDisk(link), lock=Path(options["lock"]), quota=options["quota"],
        lock_seconds=options["lock_seconds"],
    )  # fmt: skip
    slots = Slots(pool, SlotWriterId(**options["lease"]))

    def handle(request: dict) -> tuple[dict, bytes]:
        try:
            return {"result": _run_method(slots, request["method"], request["args"], options["memory"])}, b""
        except (CheckpointError, WorkspaceError, OSError) as error:
            return {"error": _encode_error(error)}, b""

    link.answer_requests(handle)


def _run_method(slots: Slots, method: str, args: list, memory: int) -> Any:
    args = [CheckpointUnit(*arg) if isinstance(arg, list) else arg for arg in args]
    if method == "write":
        args[3] = _map_buffer(memory, os.fstat(memory).st_size)[: args[3]]
    return getattr(slots, method)(*args)


@lru_cache(maxsize=1)
def _map_buffer(memory: int, size: int) -> memoryview:
    """Map the staging buffer once: its pages need not be faulted in again for the next save."""
    return memoryview(mmap.mmap(memory, size, access=mmap.ACCESS_READ))


def _encode_error(error: Exception) -> dict:
    """Encode an error as JSON; `ChildSlots._call` raises it again."""
    if isinstance(error, OSError):
        return {"kind": "WorkspaceError", "what": f"The disk refused: {error}"}
    names = ("what", "where", "got", "wanted", "next_step")
    fields = {name: str(getattr(error, name)) for name in names if getattr(error, name) not in (None, "")}
    return {"kind": next(name for name, kind in _ERRORS.items() if isinstance(error, kind)), **fields}
