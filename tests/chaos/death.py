"""Death of a process of this campaign: SIGKILL, its children first, as when a machine is preempted."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path


def die(pid: int) -> None:
    """Kill the process and all below it, and the one that asks."""
    for one in (*_below(pid), pid, os.getpid()):
        if one != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def note(diary: Path, what: str, **facts) -> None:
    """One line of what happened, on the disk before anything else does."""
    with open(diary, "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, **facts}) + "\n")


def _below(pid: int) -> list[int]:
    """All descendants, from /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return [one for one in found if one != os.getpid()]
