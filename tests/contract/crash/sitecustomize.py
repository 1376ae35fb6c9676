"""Kill a process, and all it started, at its n-th durable operation on files: put this folder on PYTHONPATH.

CRASH_AT : n, 1 or more; 0 counts and lets it end.  CRASH_COUNT : the file that then holds the count.
What a program has written survives a crash only after os.replace, os.rename, os.fsync or os.ftruncate: a process that
dies before the n-th of these, for every n, meets every state that a crash can leave.
"""

import atexit
import os
import signal
import threading

if "CRASH_AT" in os.environ and "CRASH_IN" not in os.environ:
    os.environ["CRASH_IN"] = str(os.getpid())  # children are counted with nobody
    die_at, main, lock = int(os.environ["CRASH_AT"]), os.getpid(), threading.Lock()
    count = 0

    def watched(operation):
        def call(*given, **more):
            global count
            if os.getpid() == main:
                with lock:
                    count += 1
                    if count == die_at:
                        os.killpg(os.getpgid(0), signal.SIGKILL)
            return operation(*given, **more)

        return call

    for name in ("replace", "rename", "fsync", "ftruncate"):
        setattr(os, name, watched(getattr(os, name)))

    @atexit.register
    def write_count() -> None:
        with open(os.environ["CRASH_COUNT"], "w") as file:
            file.write(str(count))
