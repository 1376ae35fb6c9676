"""The drive as a real mount: `python -m tests.faults.daemon MOUNTPOINT CLOUD SOCKET '{"seed": 0, …}'`.

A Unix socket takes one JSON request a line ({"do": "rule", "fault": "EIO", …}) and answers each with one line, also
while calls hang. SIGKILL is a death like any: the cloud's folder keeps what had arrived.
"""

import errno
import json
import os
import socket
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
import mfusepy

from tests.faults.cloud import Cloud
from tests.faults.drive import Drive
from tests.faults.rules import Rule

_BLOCK = 4096


class Watched(Drive):
    """A drive that remembers who asked.

    askers : process id -> its calls in order; 0 for the kernel itself.
    """

    def __init__(self, cloud: Cloud, **settings):
        super().__init__(cloud, **settings)
        self.askers: dict[int, list[str]] = {}

    def enter(self, op: str, path: str, size: int = 0) -> set[str]:
        *_, thread = mfusepy.fuse_get_context()
        self.askers.setdefault(_process_of(thread), []).append(f"{op} {path}")
        return super().enter(op, path, size)


def _process_of(thread: int) -> int:
    """Return the process of a thread that FUSE names; the thread's own number when the thread is gone."""
    with suppress(OSError):
        for line in Path("/proc", str(thread), "status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return thread


class Mounted(mfusepy.Operations):
    """Calls of the kernel handed to the drive, one for one."""

    use_ns = True

    def __init__(self, drive: Watched):
        self.drive = drive
        self.ready = threading.Event()

    def init(self, path: str) -> None:
        self.ready.set()

    def getattr(self, path: str, fh: int | None = None) -> dict:
        folder, size, changed = self.drive.stat(path)
        mode = stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o644
        times = {f"st_{kind}time": int(changed * 1e9) for kind in "amc"}
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        return {"st_mode": mode, "st_nlink": 2 if folder else 1, "st_size": size, **times, **owner}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self.drive.names(path)]

    def mkdir(self, path: str, mode: int) -> int:
        self.drive.make_folder(path)
        return 0

    def rmdir(self, path: str) -> int:
        self.drive.remove_folder(path)
        return 0

    def unlink(self, path: str) -> int:
        self.drive.remove(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        self.drive.rename(old, new)
        return 0

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        return self.drive.open(path, create=True, cut=bool(flags & os.O_TRUNC))

    def open(self, path: str, flags: int) -> int:
        return self.drive.open(path, cut=bool(flags & os.O_TRUNC))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self.drive.read(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self.drive.write(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        if fh is not None:
            self.drive.truncate(fh, length)
            return 0
        number = self.drive.open(path)
        try:
            self.drive.truncate(number, length)
        finally:
            self.drive.forget(number)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.drive.sync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def flush(self, path: str, fh: int) -> int:
        self.drive.close(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        self.drive.forget(fh)
        return 0

    def statfs(self, path: str) -> dict:
        free = self.drive.free(path) // _BLOCK
        return {"f_bsize": _BLOCK, "f_frsize": _BLOCK, "f_blocks": free, "f_bavail": free, "f_bfree": free}

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return 0  # accepted and forgotten, as the cloud does

    def chmod(self, path: str, mode: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def answer(drive: Watched, request: dict) -> dict:
    """Answer a test's request through the socket."""
    do = request.pop("do")
    if do == "rule":
        drive.faults.add(Rule(**request))
    elif do == "heal":
        drive.faults.heal()
    elif do == "wait":
        return {"struck": drive.faults.wait(request["fault"], request["times"], request["seconds"])}
    elif do == "upload":
        drive.upload_all()
    elif do == "empty trash":
        drive.trash = 0
    elif do == "set":
        for name, value in request.items():
            setattr(drive, {"uploads": "uploads", "quota": "quota", "honest": "honest"}[name], value)
    elif do == "facts":
        facts = {name: getattr(drive, name) for name in ("trash", "peak", "calls", "askers")}
        return {**facts, "used": drive.used(), "struck": drive.faults.struck, "hanging": drive.faults.hanging}
    else:
        return {"error": f"what is {do}?"}
    return {}


def serve(drive: Watched, path: str, ready: threading.Event) -> None:
    """Answer requests, each connection in a thread of its own; the socket appears when the mount is there."""
    ready.wait()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_talk, args=(drive, connection), daemon=True).start()


def _talk(drive: Watched, connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            try:
                observed = answer(drive, json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                observed = {"error": repr(error)}
            lines.write(json.dumps(observed) + "\n")
            lines.flush()


def main() -> None:
    mountpoint, cloud, control, settings = sys.argv[1:]
    mounted = Mounted(Watched(Cloud(Path(cloud)), **json.loads(settings)))
    threading.Thread(target=serve, args=(mounted.drive, control, mounted.ready), daemon=True).start()
    # No attribute or name is remembered by the kernel, so that every call comes here.
    mfusepy.FUSE(mounted, mountpoint, foreground=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)


if __name__ == "__main__":
    main()
