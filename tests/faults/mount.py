"""A drive mounted for a test, from outside: mount, faults, kill, and what the cloud had received."""

import ctypes.util
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.faults.rules import Rule

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE = 60.0  # seconds until a daemon has mounted, and for an answer; generous, since machines are busy


class NoMount(Exception):
    """This machine cannot mount a file system of ours; the text holds the reason."""


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
    """A mounted drive. `path` is the mount, absolute; its other files are next to the mount, in `folder`.

    settings : as tests.faults.drive.Drive (seed, uploads, quota, honest).
    Raises NoMount when the machine refuses.
    """

    def __init__(self, folder: Path, **settings):
        self.folder, self.path, self.cloud = folder, folder / "drive", folder / "cloud"
        self.settings = settings
        self.process: subprocess.Popen | None = None
        self.path.mkdir(parents=True)
        self.start()

    def start(self) -> None:
        """Mount what the cloud has: after `kill`, that is a fresh machine."""
        self._control = self.folder / "control"
        self._control.unlink(missing_ok=True)
        output = self.folder / "daemon.log"
        words = [sys.executable, "-m", "tests.faults.daemon", self.path, self.cloud, self._control]
        with open(output, "ab") as log:
            self.process = subprocess.Popen(
                [*map(str, words), json.dumps(self.settings)], cwd=ROOT, stdout=log, stderr=log
            )
        end = time.monotonic() + _DEADLINE
        while not self._control.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                text = output.read_text(errors="replace")[-2000:]
                raise (NoMount if "mount failed" in text or "fusermount" in text else RuntimeError)(text)
            time.sleep(0.02)

    def fault(self, fault: str, *ops: str, **more) -> None:
        """Add a rule, see tests.faults.rules.Rule."""
        Rule(fault, ops, **more)  # a misspelt one fails here
        self.query("rule", fault=fault, ops=ops, **more)

    def heal(self) -> None:
        self.query("heal")

    def wait_struck(self, fault: str, times: int = 1) -> None:
        """Until the fault has struck so often."""
        if not self.query("wait", fault=fault, times=times, seconds=_DEADLINE)["struck"]:
            raise TimeoutError(f"{fault} never struck: {self.query('facts')}")

    def upload(self) -> None:
        """Everything that is closed arrives now."""
        self.query("upload")

    def facts(self) -> dict:
        """trash, used and peak bytes, calls, how often each fault struck, how many calls hang."""
        return self.query("facts")

    def requested_by(self, process: int) -> list[str]:
        """The calls this process made itself, as "op path"."""
        return self.facts()["askers"].get(str(process), [])

    def query(self, do: str, **words) -> dict:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2 * _DEADLINE)
            connection.connect(str(self._control))
            with connection.makefile("rw") as lines:
                lines.write(json.dumps({"do": do, **words}) + "\n")
                lines.flush()
                observed = json.loads(lines.readline())
        if "error" in observed:
            raise ValueError(observed["error"])
        return observed

    def kill(self) -> None:
        """SIGKILL: every call on the mount answers ENOTCONN from now on, those that hang as well."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            self.process = None

    def unmount(self) -> None:
        """Take a dead mount away, also from under processes that still look at it."""
        self.kill()
        words = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*words, self.path], capture_output=True, check=False)

    def remount(self) -> None:
        """The machine is gone; a fresh one mounts what the cloud had received."""
        self.unmount()
        self.start()

    def cloud_only(self, folder: Path) -> Path:
        """A copy of what the cloud has received, on a local disk."""
        return Path(shutil.copytree(self.cloud, folder))
