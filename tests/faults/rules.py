"""Faults by rule: which calls of a drive fail, hang, lie or never return."""

import errno
import os
import signal
import threading
from dataclasses import dataclass
from fnmatch import fnmatch

# Beside the names of errno: what else may strike a call.
HABITS = frozenset({"hang", "die", "slow", "short", "drop", "torn", "duplicate", "scramble", "copy"})
_COPY_CHUNK = 1 << 16
_PLENTY = 15 * 10**9


@dataclass
class Rule:
    """One fault and where it strikes.

    fault : a name of errno (ENOTCONN, EIO, ETIMEDOUT, EDQUOT …) that the call answers, or
        hang : the call does not return until it is released; then it is carried out
        die : the daemon is gone in the middle of this call
        slow : `rate` bytes/s, for read and write
        short : read and write do half of the request, and return that count, as they may
        drop : write and truncate report success and store nothing; upload never happens
        torn : write reports success and stores half; upload leaves half in the cloud
        duplicate : upload leaves the old file and adds the new one under a name with (1)
        scramble : stat returns a random time
        copy : rename copies piece by piece and then deletes
    ops : the calls it strikes (make_folder, names, stat, free, open, read, write, truncate, sync, close, remove,
        rename, copy, upload); all but upload when empty.
    path : only files that match.  after : so many matching calls pass first.  times : it strikes so often, None: ever.
    """

    fault: str
    ops: tuple[str, ...] = ()
    path: str = "*"
    after: int = 0
    times: int | None = None
    rate: float = 50_000
    seen: int = 0

    def __post_init__(self):
        if self.fault not in HABITS and not hasattr(errno, self.fault):
            raise ValueError(f"no fault is called {self.fault}")
        self.ops = tuple(self.ops)

    def strikes(self, op: str, path: str) -> bool:
        """Count this call; return True when the fault strikes it."""
        ours = op in self.ops if self.ops else op != "upload"
        if not ours or not fnmatch(path, self.path):
            return False
        self.seen += 1
        return self.after < self.seen and (self.times is None or self.seen <= self.after + self.times)


class Faults:
    """The rules in force, how often each fault has struck, and the calls that hang."""

    def __init__(self):
        self.rules: list[Rule] = []
        self.struck: dict[str, int] = {}
        self.hanging = 0
        self.changed = threading.Condition()
        self._release = threading.Event()

    def add(self, rule: Rule) -> None:
        with self.changed:
            self.rules.append(rule)

    def heal(self) -> None:
        """No more faults; calls that hang go on."""
        with self.changed:
            self.rules.clear()
            self._release.set()
            self._release = threading.Event()

    def strike(self, op: str, path: str, size: int = 0) -> set[str]:
        """Let every fault that strikes this call happen; those that change what the call does are returned.

        Raises OSError for a fault named after errno.
        """
        with self.changed:
            rules = [rule for rule in self.rules if rule.strikes(op, path)]
            for rule in rules:
                self.struck[rule.fault] = self.struck.get(rule.fault, 0) + 1
            release = self._release
            self.changed.notify_all()
        faults = {rule.fault for rule in rules}
        if "die" in faults:
            self.die()
        if "hang" in faults:
            self.hang(release)
        for rule in rules:
            if rule.fault == "slow":
                release.wait(size / rule.rate)
            elif rule.fault not in HABITS:
                code = getattr(errno, rule.fault)
                raise OSError(code, os.strerror(code), path)
        return faults

    def wait(self, fault: str, times: int, seconds: float) -> bool:
        """Until this fault has struck so often; False when it did not within the time."""
        with self.changed:
            return self.changed.wait_for(lambda: self.struck.get(fault, 0) >= times, seconds)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, release: threading.Event) -> None:
        self.hanging += 1
        release.wait()
        self.hanging -= 1
