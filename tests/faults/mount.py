"""A real mount for a test: a folder shown through FUSE, whose calls may hang, and which tells who asked.

`python -m tests.faults.mount MOUNTPOINT CLOUD CONTROL` is its daemon. While the folder CONTROL holds `hang`, no call
returns; `calls` there has a line for each call. SIGKILL is a disconnected drive: every call then answers ENOTCONN.
"""

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
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
        (self._control / "hang").touch()

    def heal(self) -> None:
        (self._control / "hang").unlink(missing_ok=True)
        (self._control / "struck").unlink(missing_ok=True)

    def wait_struck(self) -> None:
        """Wait until a call hangs."""
        end = time.monotonic() + _DEADLINE
        while not (self._control / "struck").exists():
            assert time.monotonic() < end, "nothing has asked"
            time.sleep(0.02)

    def requested_by(self, process: int) -> list[str]:
        """Return the calls this process made itself, as "op path"."""
        calls = (line.partition(" ") for line in (self._control / "calls").read_text().splitlines())
        return [call for asker, _, call in calls if asker == str(process)]

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


def _process_of(thread: int) -> int:
    """Return the process of a thread that FUSE names; the thread's own number when the thread is gone."""
    with suppress(OSError):
        for line in Path("/proc", str(thread), "status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return thread


def _serve(mountpoint: str, cloud: str, control: str) -> None:
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    hang, struck = Path(control, "hang"), Path(control, "struck")

    class Passed(mfusepy.Operations):
        """Calls of the kernel handed to the folder, one for one."""

        use_ns = True

        def init(self, path):
            pass

        def getattr(self, path, fh=None):
            facts = os.lstat(path)
            names = ("mode", "nlink", "size", "uid", "gid")
            times = {f"st_{kind}time": getattr(facts, f"st_{kind}time_ns") for kind in "amc"}
            return {f"st_{name}": getattr(facts, f"st_{name}") for name in names} | times

        def readdir(self, path, fh):
            return [".", "..", *os.listdir(path)]

        def create(self, path, mode, fi=None):
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

        def open(self, path, flags):
            return os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))

        def read(self, path, size, offset, fh):
            return os.pread(fh, size, offset)

        def write(self, path, data, offset, fh):
            return os.pwrite(fh, data, offset)

        def truncate(self, path, length, fh=None):
            os.truncate(path, length)

        def rename(self, old, new):
            os.rename(old, cloud + new)

        def mkdir(self, path, mode):
            os.mkdir(path)

        def rmdir(self, path):
            os.rmdir(path)

        def unlink(self, path):
            os.unlink(path)

        def release(self, path, fh):
            os.close(fh)

        def fsync(self, path, datasync, fh):
            os.fsync(fh)

        def flush(self, path, fh):
            pass

        def utimens(self, path, times=None):
            pass  # accepted and forgotten, as the cloud does

        def statfs(self, path):
            facts = os.statvfs(path)
            return {name: getattr(facts, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bavail", "f_bfree")}

    def asked(op: str, call: Callable) -> Callable:
        def handed(self, path, *args):
            with open(Path(control, "calls"), "a") as calls:
                calls.write(f"{_process_of(mfusepy.fuse_get_context()[2])} {op} {path}\n")
            while hang.exists():
                struck.touch()
                time.sleep(0.02)
            found = call(self, cloud + path, *args)
            return 0 if found is None else found

        return handed

    for op, call in list(vars(Passed).items()):
        if callable(call) and op != "init":
            setattr(Passed, op, asked(op, call))
    # No attribute or name is remembered by the kernel, so that every call comes here.
    mfusepy.FUSE(Passed(), mountpoint, foreground=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
