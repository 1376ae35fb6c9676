"""One life of a process: forked from one that has imported everything, in a session and a home of its own."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cloud import Disk
from tests.chaos.death import note
from tests.chaos.hooks import Hooks, Kill, install, run_on_new_machine
from tests.chaos.work import UNITS, Hashes


@dataclass(frozen=True)
class Ended:
    """Outcome of a life.

    killed : True when its hook killed it.
    hashes : of the finished unit.
    loaded : checkpoints it resumed from, in order.
    text : its output, with the traceback of a failure.
    """

    killed: bool
    hashes: Hashes | None
    loaded: list[dict]
    text: str


def live(
    machine: Disk, unit: str, kill: Kill | None, *, broken: Callable[[], None] | None = None, number: int = 0,
    new_machine: bool = False,
) -> Ended:  # fmt: skip
    """Do `unit` on the machine in a process of its own, until it ends or is killed.

    broken : sabotage done first.
    new_machine : leases see another machine than that of the life before, started minutes later.
    """
    diary, out = machine.folder / f"life-{number}.jsonl", machine.folder / f"life-{number}.txt"
    pid = os.fork()
    if pid == 0:
        _child(machine, unit, kill, broken, diary, out, number if new_machine else None)
    _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    output = {what: [line for line in lines if line["what"] == what] for what in ("killed", "loaded", "hashes")}
    text = out.read_text(errors="replace")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and output["killed"]:
        return Ended(True, None, output["loaded"], text)
    return Ended(False, output["hashes"][0]["value"] if output["hashes"] else None, output["loaded"], text)


def _child(
    machine: Disk, unit: str, kill: Kill | None, broken, diary: Path, out: Path, machine_number: int | None
) -> None:  # fmt: skip
    code = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        for name in ("XDG_CACHE_HOME", "ML_FACTORY_QUICK", "ML_FACTORY_ROOT", "ML_FACTORY_MOUNTS"):
            os.environ.pop(name, None)
        os.environ |= {"HOME": str(machine.home), "ML_FACTORY_WANDB": "off", "ML_FACTORY_SAVE_MINUTES": "0"}
        try:
            install(Hooks(diary, kill, machine.secure))
            if machine_number is not None:
                run_on_new_machine(machine_number)
            if broken:
                broken()
            note(diary, "hashes", value=UNITS[unit](machine.root))
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the parent reads of it
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
