"""A real mount for a test: a folder shown through FUSE, whose calls may hang.

`python -m tests.faults.mount MOUNTPOINT CLOUD CONTROL` is its daemon. While the folder CONTROL holds `hang`, no call
returns; with `full`, no byte is taken; with `late`, a rename is seen a second later; with `drop`, each second file that
is closed vanishes. SIGKILL is a disconnected drive: every call then answers ENOTCONN.
"""

import ctypes.util
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE = 60.0  # seconds until a daemon has mounted, and until a call hangs; generous, since machines are busy


def why_not() -> str:
    """Return what this machine lacks for a mount; empty when nothing is known to be missing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that can be opened"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (requirements/dev.txt)"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 is not installed (apt-get install fuse3)"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "not root, and no fusermount3 (apt-get install fuse3)"
    return ""


class Mount:
    """A mounted drive. `path` is the mount; `cloud` beside it holds its files."""

    def __init__(self, folder: Path):
        self.path, self.cloud, self._control = folder / "drive", folder / "cloud", folder / "control"
        for made in (self.path, self.cloud, self._control):
            made.mkdir(parents=True)
        self.start()

    def start(self) -> None:
        """Mount what the cloud has. Raises RuntimeError where the machine refuses."""
        words = [sys.executable, "-m", "tests.faults.mount", self.path, self.cloud, self._control]
        with open(self._control / "log", "w") as log:
            self.process = subprocess.Popen([*map(str, words)], cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + _DEADLINE
        while f" {self.path} " not in Path("/proc/self/mounts").read_text():  # asks the drive nothing
            if self.process.poll() is not None or time.monotonic() > end:
                self.unmount()
                raise RuntimeError((self._control / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.02)

    def hang(self) -> None:
        """Let no call return until `heal`."""
        self.strike("hang")

    def strike(self, fault: str) -> None:
        """Begin one of the faults above, or disconnect."""
        self.kill() if fault == "disconnect" else (self._control / fault).touch()

    def heal(self) -> None:
        for fault in ("hang", "full", "late", "drop", "struck"):
            (self._control / fault).unlink(missing_ok=True)
        if self.process.poll() is not None:
            self.unmount()
            self.start()

    def wait_struck(self) -> None:
        """Wait until a call hangs."""
        end = time.monotonic() + _DEADLINE
        while not (self._control / "struck").exists():
            assert time.monotonic() < end, "nothing has asked"
            time.sleep(0.02)

    def kill(self) -> None:
        """Disconnect the drive: every call answers ENOTCONN from now on, those that hang as well."""
        self.process.kill()
        self.process.wait()

    def unmount(self) -> None:
        """Take the mount away, also from under processes that still look at it."""
        self.kill()
        words = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*words, self.path], capture_output=True, check=False)


# ---------------------------------------------------------------------- the daemon


def _serve(mountpoint: str, cloud: str, control: str) -> None:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    hang, struck, closed = Path(control, "hang"), Path(control, "struck"), count()

    def write(path: str, data: bytes, offset: int, fh: int) -> int:
        if Path(control, "full").exists():
            raise OSError(errno.EDQUOT, "full")
        return os.pwrite(fh, data, offset)

    def rename(old: str, new: str) -> None:
        if Path(control, "late").exists():
            threading.Timer(1.0, os.rename, (old, cloud + new)).start()
        else:
            os.rename(old, cloud + new)

    def release(path: str, fh: int) -> None:
        os.close(fh)
        if Path(control, "drop").exists() and next(closed) % 2:
            Path(path).unlink(missing_ok=True)

    def facts(path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(path)
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in ("mode", "nlink", "size", "uid", "gid")} | times

    disk = ("f_bsize", "f_frsize", "f_blocks", "f_bavail", "f_bfree")
    calls: dict[str, Callable] = {
        "getattr": facts,
        "readdir": lambda path, fh: [".", "..", *os.listdir(path)],
        "create": lambda path, mode, fi=None: os.open(path, os.O_RDWR | os.O_CREAT, 0o644),
        "open": lambda path, flags: os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)),
        "read": lambda path, size, offset, fh: os.pread(fh, size, offset),
        "write": write,
        "truncate": lambda path, length, fh=None: os.truncate(path, length),
        "rename": rename,
        "mkdir": lambda path, mode: os.mkdir(path),
        "rmdir": os.rmdir,
        "unlink": os.unlink,
        "release": release,
        "fsync": lambda path, datasync, fh: os.fsync(fh),
        "flush": lambda path, fh: None,
        "utimens": lambda path, times=None: None,  # accepted and forgotten, as the cloud does
        "statfs": lambda path: {name: getattr(os.statvfs(path), name) for name in disk},
    }

    def asked(op: str) -> Callable:
        def handed(self, path, *args):
            while hang.exists():
                struck.touch()
                time.sleep(0.02)
            found = calls[op](cloud + path, *args)
            return 0 if found is None else found

        return handed

    methods = {"use_ns": True, "init": lambda self, path: None, **{op: asked(op) for op in calls}}
    passed = type("Passed", (mfusepy.Operations,), methods)
    # No attribute or name is remembered by the kernel, so that every call comes here.
    mfusepy.FUSE(passed(), mountpoint, foreground=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
